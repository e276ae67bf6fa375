# SPDX-License-Identifier: Apache-2.0
"""One log and its streams: what is acknowledged, what comes again, whose a line is."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .chunks import NEWLINE_BYTE, Refusal
from .cycles import CycleFile
from .files import IOV_MAX, LogFile, LogPath, Piece

_BATCH_BYTES = 4 << 20
_CAREFUL_BATCH_BYTES = 64 << 10
_NEWLINE = b"\n"
# A chunk may need a newline before it and one after it.
_BATCH_CHUNKS = IOV_MAX // 2
_PREFIX = re.compile(rb"^ *(\d{1,9}): ", re.MULTILINE)


@dataclass(slots=True, eq=False)
class Target:
    """One log."""

    path: str  # as the sender named it
    log_path: LogPath
    cycle: CycleFile | None
    waiting: deque[Pending] = field(default_factory=deque)  # not in the file, in order
    held_bytes: int = 0  # of the messages of `waiting`
    users: int = 0  # open sources that have named it
    waiters: int = 0  # sources that wait for space in it
    is_scheduled: bool = False  # a write at a later time is arranged
    is_awaited: bool = False  # a sender has ended and waits: nothing is kept for more
    is_stalled: bool = False
    is_refused: bool = False
    is_closing: bool = False
    is_unsynced: bool = False
    written_at: float = -math.inf  # monotonic; the first write waits for nothing
    error: OSError | None = None  # why it cannot be written at present
    retry_s: float = 0.0
    log: LogFile | None = None
    owners: dict[bytes, str] = field(default_factory=dict)  # of line prefixes, if watched

    @property
    def is_troubled(self) -> bool:
        """Return whether writing the log fails or hangs."""
        return self.is_stalled or self.error is not None

    def next_batch(self) -> list[Pending]:
        """Return the chunks to write next; they stay in `waiting` until `done`."""
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
        return held


@dataclass(slots=True)
class Batch:
    """One write: its bytes, and the state of the log after it."""

    buffers: list[Piece] = field(default_factory=list)
    seqs: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    ends_line: bool = True
    last_stream: str | None = None

    @classmethod
    def plan(cls, chunks: list[Pending], log: LogFile) -> Batch:
        """Plan a write: skip chunks that the log has, end a line that another writer left open."""
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


@dataclass(slots=True, eq=False)
class Pending:
    """A chunk that is not in its file yet; one without data ends its source's unfinished line."""

    source: Source
    seq: int
    data: memoryview | bytearray
    size: int
    arrived_at: float
    is_done: bool = False
    is_end: bool = False
    growing: bytearray | None = None  # `data`, while small chunks of its source may be added


@dataclass(slots=True, eq=False)
class Source:
    """One stream of chunks on one connection; a leaf's connection carries many.

    A stream that reconnects is a new source with the same `stream_id`. `on_progress` is called when
    chunks were committed, admitted or refused, in any thread, with no lock held; it must not block.
    A patient source waits for space in a file that hangs; one that shares its connection would hold
    up others, and is refused for now instead.
    """

    on_progress: Callable[[Source], None]
    stream_id: str
    node_id: str
    is_patient: bool = field(default=True, kw_only=True)
    identity: str = ""  # tells whose line a file ends with: the `stream_id`, or something unique
    outstanding: deque[Pending] = field(default_factory=deque)
    received_seq: int = 0
    committed_seq: int = 0
    received_bytes: int = 0
    written_bytes: int = 0
    behind_bytes: int = 0
    targets: dict[str, Target] = field(default_factory=dict)
    used_at: dict[str, float] = field(default_factory=dict)  # when it last left each of `targets`
    current: Target | None = None  # of its last chunk
    unfinished: set[Target] = field(default_factory=set)
    waiting: tuple[Target, Pending] | None = None  # for whose space it waits, with its chunk
    refusal: Refusal | None = None

    def __post_init__(self) -> None:
        self.identity = self.stream_id or f"\n{id(self)}"

    @property
    def is_settled(self) -> bool:
        """Nothing of it waits for space or for its file."""
        return not self.outstanding and self.waiting is None

    def settle(self, pending: Pending) -> None:
        """Note that a chunk is in its file, and advance past all that are."""
        pending.is_done = True
        self.written_bytes += len(pending.data)
        self.behind_bytes -= len(pending.data)
        outstanding = self.outstanding
        while outstanding and outstanding[0].is_done:
            # A number that comes again must not take an acknowledgement back.
            self.committed_seq = max(self.committed_seq, outstanding.popleft().seq)

    def seconds_behind(self, now: float) -> float:
        """Return the age of the oldest chunk that is not in its file."""
        oldest = next(iter(self.outstanding.copy()), None)
        return 0.0 if oldest is None else max(0.0, now - oldest.arrived_at)

    def refuse(self, refusal: Refusal) -> None:
        """Take nothing more; the first reason stays."""
        self.refusal = self.refusal or refusal


def claim(data: memoryview, node_id: str, owners: dict[bytes, str]) -> tuple[str, str] | None:
    """Note a node's prefixes, unless one is another node's."""
    found = set(_PREFIX.findall(data))
    for prefix in found:
        owner = owners.get(prefix, node_id)
        if owner != node_id:
            return prefix.decode(), owner
    owners.update(dict.fromkeys(found, node_id))
    return None
