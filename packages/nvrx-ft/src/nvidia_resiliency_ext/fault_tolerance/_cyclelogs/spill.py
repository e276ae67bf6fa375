# SPDX-License-Identifier: Apache-2.0
"""Owns the files that hold lines for which memory has no room: nameless, gone with the process."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass

from .backlog import Record

__all__ = ["Spill"]

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
            OSError: There is no room here or on the disk.
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
        """Give the room of a record back, once nothing else of its file is wanted."""
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
