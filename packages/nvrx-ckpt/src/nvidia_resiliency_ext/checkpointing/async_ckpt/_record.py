# SPDX-License-Identifier: Apache-2.0
"""Record the end of each save as an event, and the progress of a long one."""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.events import CkptSave, EventLog

if TYPE_CHECKING:
    from ._callers import AsyncCaller, Call

_PROGRESS_S = 10.0
_MAX_ERROR = 500


class SaveRecorder:
    """Writes `ckpt_save` events; `result` is ok, failed, or running (with the bytes so far)."""

    def __init__(self) -> None:
        self._log = _log()
        self._next_progress = 0.0

    def progress(self, call: Call, caller: AsyncCaller) -> None:
        """Record how far a running save is, every 10 s."""
        now = time.monotonic()
        if not self._log.enabled or not call.run or now < self._next_progress:
            return
        self._next_progress = now + _PROGRESS_S
        if now - call.started < _PROGRESS_S:
            return
        event = CkptSave(
            id=str(call.idx),
            bytes=caller.progress(call),
            write_s=round(now - call.started, 3),
            mode="async",
            result="running",
        )
        self._record(event)

    def ended(self, call: Call, finalize_s: float, error: BaseException | None) -> None:
        """Record the end of a save."""
        if not self._log.enabled:
            return
        event = CkptSave(
            id=str(call.idx),
            bytes=call.nbytes,
            stall_s=round(call.stage_s + finalize_s, 4),
            write_s=round(call.write_s, 4),
            mode="async",
            result="ok" if error is None else "failed",
            error=None if error is None else str(error)[:_MAX_ERROR],
        )
        self._record(event)

    def _record(self, event: CkptSave) -> None:
        rank = os.environ.get("RANK", "")
        self._log.record(event, cycle=None, rank=int(rank) if rank.isdigit() else None)


@functools.lru_cache(maxsize=1)
def _log() -> EventLog:
    """Return this process's part of the record; there is one, however many queues there are."""
    return EventLog.join(src="ckpt")
