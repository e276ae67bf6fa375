# SPDX-License-Identifier: Apache-2.0
"""Owns one log as the server sees it: what waits for it and how writing it goes; no I/O.

Whoever calls holds the funnel's lock, except for `Batch`, which belongs to the writer alone.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils._funnel.chunks import NEWLINE_BYTE
from nvidia_resiliency_ext.shared_utils._funnel.log_file import IOV_MAX

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils._funnel.cycles import CycleFile
    from nvidia_resiliency_ext.shared_utils._funnel.log_file import LogFile, Piece
    from nvidia_resiliency_ext.shared_utils._funnel.places import Place
    from nvidia_resiliency_ext.shared_utils._funnel.streams import Pending, Source

__all__ = ["Batch", "Target"]

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 2.0
_BATCH_BYTES = 4 << 20
_CAREFUL_BATCH_BYTES = 64 << 10
_JOINED_BYTES = 64 << 10
_NEWLINE = b"\n"
# A chunk may need a newline before it and one after it.
_BATCH_CHUNKS = IOV_MAX // 2


class Target:
    """One log.

    Attributes:
        path: As the sender named it.
        waiting: Chunks that are not in the file, in order.
        held_bytes: Their messages' bytes.
        users: Open sources that have named it.
        waiters: Sources that wait for room in it.
        is_busy: It waits for a writer or is with one; no other writer takes it.
        is_scheduled: A write at a later time is arranged.
        is_awaited: A sender has ended and waits for what is here, so it is not kept for more.
        working_since: When the writer began what it does; `None` when it does nothing.
        written_at: When it was last written (monotonic).
        error: Why it cannot be written at present.
        owners: Whose line prefix is whose, where that is watched.
    """

    __slots__ = (
        "cycle", "error", "held_bytes", "is_awaited", "is_busy", "is_closing", "is_refused",
        "is_scheduled", "is_stalled", "is_unsynced", "log", "owners", "path", "place", "retry_s",
        "users", "waiters", "waiting", "working_since", "written_at", "written_bytes",
    )  # fmt: skip

    def __init__(self, path: str, place: Place, cycle: CycleFile | None) -> None:
        self.path = path
        self.place = place
        self.cycle = cycle
        self.waiting: deque[Pending] = deque()
        self.held_bytes = 0
        self.users = 0
        self.waiters = 0
        self.is_busy = False
        self.is_scheduled = False
        self.is_awaited = False
        self.is_stalled = False
        self.is_refused = False
        self.is_closing = False
        self.is_unsynced = False
        self.working_since: float | None = None
        self.written_at = -math.inf  # The first write waits for nothing.
        self.written_bytes = 0
        self.error: OSError | None = None
        self.retry_s = 0.0
        self.log: LogFile | None = None
        self.owners: dict[bytes, str] = {}

    @property
    def is_troubled(self) -> bool:
        """Writing it fails or hangs."""
        return self.is_stalled or self.error is not None

    def put(self, pending: Pending) -> None:
        """Add a chunk at the end."""
        self.waiting.append(pending)
        self.held_bytes += pending.size
        if self.cycle is not None:
            self.cycle.unwritten += pending.size

    def extend_last(self, source: Source, data: memoryview) -> bool:
        """Add a small chunk to the last one, if that is its source's and no writer has it.

        Looking after many small chunks would cost more than copying them.
        """
        last = self.waiting[-1] if self.waiting else None
        if last is None or last.growing is None or last.source is not source:
            return False
        size = len(data)
        last.growing += data
        last.size += size
        if last.size >= _JOINED_BYTES:
            last.growing = None
        self.held_bytes += size
        if self.cycle is not None:
            self.cycle.unwritten += size
        return True

    def next_batch(self) -> list[Pending]:
        """Return what to write next; it stays in `waiting` until `done`."""
        most = _CAREFUL_BATCH_BYTES if self.error is not None else _BATCH_BYTES
        taken: list[Pending] = []
        size = 0
        for pending in self.waiting:
            size += len(pending.data)
            if taken and (size > most or len(taken) == _BATCH_CHUNKS):
                break
            taken.append(pending)
        if taken:
            # The writer has it from now on.
            taken[-1].growing = None
        if len(taken) == len(self.waiting):
            self.is_awaited = False
        return taken

    def done(self, batch: list[Pending]) -> int:
        """Take a written batch out of `waiting` and return the bytes that it held."""
        held = 0
        for pending in batch:
            self.waiting.popleft()
            held += pending.size
        self.held_bytes -= held
        if self.cycle is not None:
            self.cycle.unwritten -= held
        return held

    def failed(self, error: OSError) -> float:
        """Note an error and return after how long to try again."""
        self.retry_s = min(_LONGEST_RETRY_S, self.retry_s * 2) if self.error else _FIRST_RETRY_S
        self.error = error
        return self.retry_s


@dataclass(slots=True)
class Batch:
    """What to write for some chunks, and what is true of the log once it is written."""

    buffers: list[Piece] = field(default_factory=list)
    seqs: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    ends_line: bool = True
    last_stream: str | None = None

    @classmethod
    def plan(cls, chunks: list[Pending], log: LogFile) -> Batch:
        """Leave out what the log has, and end a line that somebody else left unfinished."""
        plan = cls(ends_line=log.ends_line, last_stream=log.last_stream)
        for pending in chunks:
            plan._add(pending, log)
        return plan

    def _add(self, pending: Pending, log: LogFile) -> None:
        source = pending.source
        if pending.is_end:
            if not self.ends_line and self.last_stream == source.identity:
                self.buffers.append(_NEWLINE)
                self.ends_line = True
            return
        data = pending.data
        stream_id = source.stream_id
        if stream_id and pending.seq:
            known = self.seqs.get(stream_id)
            if pending.seq <= (log.seqs.get(stream_id, 0) if known is None else known):
                self.repeated += 1
                return
            if known is not None:
                # The stream that writes last must come last.
                del self.seqs[stream_id]
            self.seqs[stream_id] = pending.seq
        if not data:
            return
        if not self.ends_line and self.last_stream != source.identity:
            self.buffers.append(_NEWLINE)
        self.buffers.append(data)
        self.ends_line = data[-1] == NEWLINE_BYTE
        self.last_stream = source.identity
