# SPDX-License-Identifier: Apache-2.0
"""One log and its streams: what is acknowledged, what comes again, where a line ends."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .chunks import NEWLINE_BYTE
from .files import IOV_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .chunks import Refusal
    from .files import LogFile, Piece, Place


_CYCLE = re.compile(r"_cycle(\d+)(?!\d)", re.ASCII)
_MAX_DIGITS = 18
_MAX_REMEMBERED = 10_000


@dataclass(slots=True, eq=False)
class CycleFile:
    """One cycle's log.

    Attributes:
        unwritten: Bytes that have arrived and are not in the file.
        flushed_at: Wall time of the last write; `None` before the first.
        is_complete: The line that says so was issued and nothing came since.
    """

    path: str
    family: str
    number: int
    arrived_at: float
    unwritten: int = 0
    flushed_at: float | None = None
    is_complete: bool = False


class Cycles:
    """All files of cycles that a server has seen; one thread at a time.

    Args:
        idle_s: How long nothing must have come for a file.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._families: dict[str, dict[str, CycleFile]] = {}
        self._files: dict[str, CycleFile] = {}

    def track(self, path: str, now: float) -> CycleFile | None:
        """Return the record of a file that belongs to a cycle, a new one at first sight."""
        known = self._files.get(path)
        if known is not None:
            return known
        folder, name = os.path.split(path)
        match = _CYCLE.search(name)
        if match is None or len(match[1]) > _MAX_DIGITS:
            return None
        family = os.path.join(folder, name[: match.start()] + name[match.end() :])
        made = CycleFile(path, family, int(match[1]), now)
        self._forget_old()
        self._files[path] = made
        self._families.setdefault(family, {})[path] = made
        return made

    def take_complete(self, now: float, *, at_end: bool = False) -> list[CycleFile]:
        """Return the files that look complete by now, each once.

        Args:
            now: The monotonic time.
            at_end: Nothing will come any more: the newest cycle counts too, and no time must pass.
        """
        found = []
        for family in self._families.values():
            newest = _newest(family)
            for file in sorted(family.values(), key=_number_of):
                if (file.number < newest or at_end) and self._is_ripe(file, now, at_end=at_end):
                    file.is_complete = True
                    found.append(file)
        return found

    def next_check(self) -> float:
        """Return when a file can look complete at the earliest; infinite if none can."""
        times = [
            file.arrived_at + self._idle_s
            for family in self._families.values()
            for newest in (_newest(family),)
            for file in family.values()
            if not file.is_complete and not file.unwritten and file.flushed_at is not None
            and file.number < newest
        ]  # fmt: skip
        return min(times, default=float("inf"))

    def _is_ripe(self, file: CycleFile, now: float, *, at_end: bool) -> bool:
        if file.is_complete or file.unwritten or file.flushed_at is None:
            return False
        return at_end or now - file.arrived_at >= self._idle_s

    def _forget_old(self) -> None:
        if len(self._files) < _MAX_REMEMBERED:
            return
        done = [file for file in self._files.values() if file.is_complete]
        for file in (done or list(self._files.values()))[: _MAX_REMEMBERED // 10]:
            del self._files[file.path]
            family = self._families[file.family]
            del family[file.path]
            if not family:
                del self._families[file.family]


def _newest(family: Mapping[str, CycleFile]) -> int:
    return max(file.number for file in family.values())


def _number_of(file: CycleFile) -> int:
    return file.number


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


class Connection(Protocol):
    """One RPC, as its service implements it."""

    def progress(self, source: Source) -> None:
        """Take note that a source of this connection moved: committed, admitted or refused.

        It is called from any thread, with no lock held, and must not block.
        """
        ...


class Pending:
    """A chunk that is not in its file yet; one without data ends its source's unfinished line.

    Attributes:
        data: What is to be written; bytes of its own where several small chunks became one.
        growing: The same, as long as further small chunks of its source may be added.
    """

    __slots__ = ("arrived_at", "data", "growing", "is_done", "is_end", "seq", "size", "source")

    def __init__(
        self, source: Source, seq: int, data: memoryview | bytearray, size: int, arrived_at: float
    ) -> None:
        self.source = source
        self.seq = seq
        self.data = data
        self.size = size
        self.arrived_at = arrived_at
        self.is_done = False
        self.is_end = False
        self.growing: bytearray | None = None


class Source:
    """One stream of chunks on one connection.

    A leaf's connection carries many. A stream that reconnects is a new source with the same
    `stream_id`.

    Attributes:
        identity: Tells whose line a file ends with; the `stream_id`, or something unique.
        is_patient: It waits for room in a file that hangs. A connection that carries the streams
            of many would hold up the others, so it is refused for now instead.
        targets: The files that it named, with when it last went over to each in `used_at`.
        current: The file that its last chunk was for.
        waiting: The target for whose room this source waits, with its chunk.
        refusal: Why nothing more is taken from it.
    """

    __slots__ = (
        "behind_bytes",
        "committed_seq",
        "connection",
        "current",
        "identity", "is_patient",
        "node_id",
        "outstanding",
        "received_bytes",
        "received_seq",
        "refusal",
        "refused_seq",
        "stream_id",
        "targets",
        "unfinished",
        "used_at",
        "waiting",
        "written_bytes",
    )  # fmt: skip

    def __init__(
        self, connection: Connection, stream_id: str, node_id: str, *, is_patient: bool = True
    ) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.is_patient = is_patient
        self.identity = stream_id or f"\n{id(self)}"
        self.node_id = node_id
        self.outstanding: deque[Pending] = deque()
        self.received_seq = 0
        self.committed_seq = 0
        self.received_bytes = 0
        self.written_bytes = 0
        self.behind_bytes = 0
        self.targets: dict[str, Target] = {}
        self.used_at: dict[str, float] = {}
        self.current: Target | None = None
        self.unfinished: set[Target] = set()
        self.waiting: tuple[Target, Pending] | None = None
        self.refusal: Refusal | None = None
        self.refused_seq = 0

    @property
    def is_settled(self) -> bool:
        """Nothing of it waits for room or for its file."""
        return not self.outstanding and self.waiting is None

    def admit(self, pending: Pending) -> None:
        """Count a chunk in, in the order in which the sender sent it."""
        self.outstanding.append(pending)
        self.behind_bytes += len(pending.data)

    def settle(self, pending: Pending) -> None:
        """Note that a chunk is in its file, and advance past all that are."""
        pending.is_done = True
        self.written_bytes += len(pending.data)
        self.behind_bytes -= len(pending.data)
        outstanding = self.outstanding
        while outstanding and outstanding[0].is_done:
            # A number that comes again must not take an acknowledgement back.
            self.committed_seq = max(self.committed_seq, outstanding.popleft().seq)

    def refuse(self, refusal: Refusal, seq: int) -> None:
        """Take nothing more; the first reason stays."""
        if self.refusal is None:
            self.refusal, self.refused_seq = refusal, seq

    def abandon(self, pending: Pending) -> None:
        """Forget a chunk that will never be in its file; the source has been refused."""
        self.behind_bytes -= len(pending.data)
        # It stays at its place, so that no acknowledgement passes it.
        pending.data = memoryview(b"")
