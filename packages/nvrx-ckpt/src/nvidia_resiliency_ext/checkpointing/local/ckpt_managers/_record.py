# SPDX-License-Identifier: Apache-2.0
"""What the record of events says about local checkpoints."""

from __future__ import annotations

from typing import Any

from nvidia_resiliency_ext.shared_utils.events import CkptLoad, CkptSave, EventLog

__all__ = ["CheckpointRecord"]


class CheckpointRecord:
    """Writes events of local checkpoints; nothing where no record is kept."""

    def __init__(self) -> None:
        self._log = EventLog.join(src="ckpt")

    def add(
        self,
        kind: type[CkptSave | CkptLoad],
        iteration: int,
        rank: int,
        error: str = "",
        **more: Any,
    ) -> None:
        """Record that all ranks have saved or loaded a checkpoint, or that one could not."""
        result = "failed" if error else "ok"
        event = kind(iteration=iteration, mode="local", result=result, error=error or None, **more)
        self._log.record(event, cycle=None, rank=rank)
