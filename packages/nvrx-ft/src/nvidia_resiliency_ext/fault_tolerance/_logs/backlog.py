# SPDX-License-Identifier: Apache-2.0
"""What waits to be written, oldest first: in memory, then in files, then dropped.

A queue holds, from oldest to newest: a gap (what was dropped), records in files, parts in memory.
It reads and writes files only through `SpillStore`.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

_SEGMENT_BYTES = 16 << 20


@dataclass(slots=True)
class _Segment:
    """One file and how much of it is still wanted."""

    fd: int
    size: int = 0
    records: int = 0


class Spill:
    """Lines in files of 16 MiB; a file goes when nothing of it is wanted any more.

    Args:
        directory: Where the files are made; they have no names, so nothing is left behind.
        limit_bytes: How much all files may hold.
    """

    def __init__(self, directory: str, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._segments: dict[int, _Segment] = {}
        self._newest = 0

    @property
    def used_bytes(self) -> int:
        """What the files hold, those parts that nobody wants included."""
        return sum(segment.size for segment in self._segments.values())

    def append(self, data: bytes, lines: int) -> Record:
        """Store lines.

        Raises:
            OSError: There is no space here or on the disk.
        """
        if self.used_bytes + len(data) > self._limit_bytes:
            raise OSError(errno.ENOSPC, "the limit of the spill file is reached")
        number, segment = self._segment_for(len(data))
        offset = segment.size
        view = memoryview(data)
        try:
            while view:
                view = view[os.pwrite(segment.fd, view, offset + len(data) - len(view)) :]
        except OSError:
            self._drop_if_unused(number)
            raise
        segment.size += len(data)
        segment.records += 1
        return Record(number, offset, len(data), lines)

    def take(self, record: Record) -> bytes:
        """Return lines and forget them.

        Raises:
            OSError: They cannot be read, or not in full.
        """
        try:
            data = os.pread(self._segments[record.segment].fd, record.size, record.offset)
        finally:
            self.forget(record)
        if len(data) != record.size:
            raise OSError(errno.EIO, "the spill file is shorter than it was")
        return data

    def forget(self, record: Record) -> None:
        """Give the space of a record back, once nothing else of its file is wanted."""
        self._segments[record.segment].records -= 1
        self._drop_if_unused(record.segment)

    def close(self) -> None:
        """Give all files back."""
        for segment in self._segments.values():
            os.close(segment.fd)
        self._segments.clear()

    def _segment_for(self, size: int) -> tuple[int, _Segment]:
        segment = self._segments.get(self._newest)
        if segment is None or segment.size + size > _SEGMENT_BYTES:
            self._newest += 1
            segment = self._segments[self._newest] = _Segment(_nameless_file(self._directory))
        return self._newest, segment

    def _drop_if_unused(self, number: int) -> None:
        segment = self._segments[number]
        if not segment.records:
            os.close(segment.fd)
            del self._segments[number]


def _nameless_file(directory: str) -> int:
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.dup(file.fileno())


BATCH_BYTES = 256 << 10
_RECORD_BYTES = 1 << 20
# What a part costs beside its bytes.
_PART_OVERHEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class Record:
    """Lines in a file: which one, where, how much."""

    segment: int
    offset: int
    size: int
    lines: int


class SpillStore(Protocol):
    """Where lines go for which memory has no space."""

    def append(self, data: bytes, lines: int) -> Record:
        """Store lines.

        Raises:
            OSError: There is no space.
        """

    def take(self, record: Record) -> bytes:
        """Return lines and forget them.

        Raises:
            OSError: They cannot be read.
        """

    def forget(self, record: Record) -> None:
        """Give the space of a record back."""


@dataclass(slots=True)
class Gap:
    """Lines that were dropped."""

    lines: int = 0
    size: int = 0

    def add(self, lines: int, size: int) -> None:
        """Count more of them."""
        self.lines += lines
        self.size += size

    def take_notice(self) -> bytes:
        """Return the line that says so, and forget them."""
        notice = f"[nvrx] dropped {self.lines} lines ({self.size} bytes)\n".encode()
        self.lines = self.size = 0
        return notice


class Queue:
    """What waits for one target. Only `Backlog` changes it."""

    def __init__(self) -> None:
        self.gap = Gap()
        self.spilled: deque[Record] = deque()
        self.parts: deque[bytes] = deque()
        self.cost = 0
        self.dropped = Gap()

    def __bool__(self) -> bool:
        """Whether anything waits, a notice included."""
        return bool(self.parts or self.spilled or self.gap.lines)

    def pop_parts(self, limit: int) -> bytes:
        """Return the oldest parts in memory: one at least, and no more than fit in `limit`."""
        parts = [self.parts.popleft()]
        size = len(parts[0])
        while self.parts and size + len(self.parts[0]) <= limit:
            parts.append(self.parts.popleft())
            size += len(parts[-1])
        self.cost -= size + _PART_OVERHEAD_BYTES * len(parts)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def drop(self, lines: int, size: int) -> None:
        """Count lines as dropped."""
        self.gap.add(lines, size)
        self.dropped.add(lines, size)


class Backlog:
    """The queues of all targets under one memory limit.

    Args:
        limit_bytes: How much may be in memory.
        spill: Where the rest goes; None drops it.
    """

    def __init__(self, limit_bytes: int, spill: SpillStore | None) -> None:
        self._limit_bytes = limit_bytes
        self._spill = spill
        self._queues: list[Queue] = []

    def open(self) -> Queue:
        """Return a new queue."""
        queue = Queue()
        self._queues.append(queue)
        return queue

    def close(self, queue: Queue) -> None:
        """Forget a queue and what is in it."""
        if queue in self._queues:
            self._queues.remove(queue)
        self._forget(queue.spilled)
        queue.parts.clear()
        queue.cost = 0

    @property
    def memory_bytes(self) -> int:
        """What is in memory."""
        return sum(queue.cost for queue in self._queues)

    def put(self, queue: Queue, data: bytes) -> None:
        """Append whole lines; what is too much for memory goes to files, or is dropped."""
        queue.parts.append(data)
        queue.cost += len(data) + _PART_OVERHEAD_BYTES
        while self.memory_bytes > self._limit_bytes:
            self._free_space(max(self._queues, key=lambda one: one.cost))

    def take(self, queue: Queue) -> bytes:
        """Return the oldest lines of a queue that has some."""
        if queue.gap.lines:
            return queue.gap.take_notice()
        if queue.spilled:
            record = queue.spilled.popleft()
            assert self._spill is not None
            try:
                return self._spill.take(record)
            except OSError:
                queue.drop(record.lines, record.size)
                return queue.gap.take_notice()
        return queue.pop_parts(BATCH_BYTES)

    def _free_space(self, queue: Queue) -> None:
        data = queue.pop_parts(_RECORD_BYTES)
        lines = data.count(b"\n")
        while self._spill is not None:
            try:
                queue.spilled.append(self._spill.append(data, lines))
            except OSError:
                if not queue.spilled:
                    break
                # The newest lines tell why a job died.
                oldest = queue.spilled.popleft()
                self._spill.forget(oldest)
                queue.drop(oldest.lines, oldest.size)
            else:
                return
        queue.drop(lines, len(data))

    def _forget(self, records: Iterable[Record]) -> None:
        if self._spill is not None:
            for record in records:
                self._spill.forget(record)
