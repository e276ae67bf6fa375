# SPDX-License-Identifier: Apache-2.0
"""What the record of events says about local checkpoints."""

from __future__ import annotations

from nvidia_resiliency_ext.shared_utils.events import CkptLoad, CkptSave, EventLog

__all__ = ["CheckpointRecord"]

_MODE = "local"


class CheckpointRecord:
    """Writes events of local checkpoints; nothing where no record is kept."""

    def __init__(self) -> None:
        self._log = EventLog.join(src="ckpt")

    def saved(self, iteration: int, nbytes: int, seconds: float, *, rank: int) -> None:
        """Record that all ranks have a checkpoint."""
        event = CkptSave(
            iteration=iteration, bytes=nbytes, write_s=seconds, mode=_MODE, result="ok"
        )
        self._log.record(event, cycle=None, rank=rank)

    def save_failed(self, iteration: int, error: str, seconds: float, *, rank: int) -> None:
        """Record that a save failed on at least one rank."""
        event = CkptSave(
            iteration=iteration, write_s=seconds, mode=_MODE, result="failed", error=error
        )
        self._log.record(event, cycle=None, rank=rank)

    def loaded(self, iteration: int, seconds: float, *, rank: int) -> None:
        """Record that all ranks have loaded a checkpoint."""
        event = CkptLoad(iteration=iteration, stall_s=seconds, mode=_MODE, result="ok")
        self._log.record(event, cycle=None, rank=rank)

    def load_failed(self, iteration: int, error: str, *, rank: int) -> None:
        """Record that no checkpoint could be loaded."""
        event = CkptLoad(iteration=iteration, mode=_MODE, result="failed", error=error)
        self._log.record(event, cycle=None, rank=rank)
