# SPDX-License-Identifier: Apache-2.0
"""Owns one file of a spill: how lines stand in it, and how far it was read.

A header with a gap (lines given up before the records), then records that are appended and never
changed. Each has a checksum, so what a crash tore is known.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import zlib

from .chunks import MAX_LINE_BYTES, Chunk, Gap

__all__ = ["SUFFIX", "Segment"]

SUFFIX = ".lines"
_MAGIC = b"nvrxlog1"
_HEADER = struct.Struct("<8s24sI")  # magic; a gap before the records, and its checksum
_GAP = struct.Struct("<QQQ")
_RECORD = struct.Struct("<IIQI")  # checksum of the rest; size, number and lines of the data
_CHECKSUM = struct.Struct("<I")
_CHECKED = struct.Struct("<IQI")
_LARGEST_RECORD_BYTES = 2 * MAX_LINE_BYTES


class Segment:
    """One open file.

    Attributes:
        gap: What was given up before its first record.
        size: Where the next record goes.
        unread: Lines and bytes that have still to be read.
    """

    HEADER_BYTES = _HEADER.size

    __slots__ = ("fd", "first_seq", "gap", "last_seq", "number", "read_at", "size", "unread")

    def __init__(self, number: int, fd: int, gap: Gap) -> None:
        self.number = number
        self.fd = fd
        self.gap = gap
        self.size = _HEADER.size
        self.read_at = _HEADER.size
        self.first_seq = 0
        self.last_seq = gap.seq
        self.unread = Gap()

    @classmethod
    def create(cls, directory: str, number: int, gap: Gap) -> Segment:
        """Make a new file.

        Raises:
            OSError: It cannot be made or its header cannot be written; nothing is left of it.
        """
        segment = cls(number, -1, gap)
        path = os.path.join(directory, segment.name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        segment.fd = os.open(path, flags, 0o600)
        try:
            written = os.pwrite(segment.fd, _pack_header(gap), 0)
        except OSError:
            segment.discard(directory)
            raise
        if written != _HEADER.size:
            segment.discard(directory)
            raise OSError(errno.ENOSPC, "no space left", path)
        return segment

    @classmethod
    def load(cls, number: int, fd: int) -> Segment | None:
        """Look through the records of a file; what a crash tore at its end is cut off.

        Returns:
            The file, or `None` when it is none of ours.
        """
        status = os.fstat(fd)
        header = os.pread(fd, _HEADER.size, 0) if stat.S_ISREG(status.st_mode) else b""
        if len(header) != _HEADER.size or not header.startswith(_MAGIC):
            return None
        segment = cls(number, fd, _gap_of(header))
        while segment.size < status.st_size:
            chunk = _read_record(fd, segment.size, status.st_size)
            if chunk is None:
                os.ftruncate(fd, segment.size)
                break
            segment._added(chunk)
        return segment

    @staticmethod
    def record_bytes(chunk: Chunk) -> int:
        """Return what a chunk takes in a file."""
        return _RECORD.size + len(chunk.data)

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.number:08d}{SUFFIX}"

    def has_unread(self) -> bool:
        """Say whether there is a gap or a record that was not read."""
        return bool(self.gap.lines) or self.read_at < self.size

    def append(self, chunk: Chunk) -> None:
        """Add a chunk.

        Raises:
            OSError: It cannot be written whole, and is not there.
        """
        checked = _CHECKED.pack(len(chunk.data), chunk.seq, chunk.lines)
        checksum = zlib.crc32(chunk.data, zlib.crc32(checked))
        header = _CHECKSUM.pack(checksum) + checked
        # At a place of its own, so that what a failed write left there is written over.
        written = os.pwritev(self.fd, [header, chunk.data], self.size)
        if written != len(header) + len(chunk.data):
            raise OSError(errno.ENOSPC, "no space left", self.name)
        self._added(chunk)

    def read(self) -> Chunk | None:
        """Return the next record and go on behind it; `None` when it is damaged."""
        chunk = _read_record(self.fd, self.read_at, self.size)
        if chunk is not None:
            self.read_at += self.record_bytes(chunk)
            left = self.unread
            self.unread = Gap(0, left.lines - chunk.lines, left.size - len(chunk.data))
        return chunk

    def give_up(self) -> Gap:
        """Pass over all that was not read: it is a gap from now on. Return what that is."""
        left = self.unread
        self.gap = left._replace(seq=self.last_seq)
        self.read_at, self.unread = self.size, Gap()
        return left

    def put_gap(self, gap: Gap) -> None:
        """Keep a gap before what it has already."""
        self.gap = gap.joined(self.gap)
        with contextlib.suppress(OSError):
            os.pwrite(self.fd, _pack_header(self.gap), 0)

    def discard(self, directory: str) -> None:
        """Close the file and remove it."""
        os.close(self.fd)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, self.name))

    def _added(self, chunk: Chunk) -> None:
        self.size += self.record_bytes(chunk)
        self.first_seq = self.first_seq or chunk.seq
        self.last_seq = max(self.last_seq, chunk.seq)
        self.unread = self.unread.joined(Gap(0, chunk.lines, len(chunk.data)))


def _pack_header(gap: Gap) -> bytes:
    packed = _GAP.pack(*gap)
    return _HEADER.pack(_MAGIC, packed, zlib.crc32(packed))


def _gap_of(header: bytes) -> Gap:
    _, packed, checksum = _HEADER.unpack(header)
    return Gap(*_GAP.unpack(packed)) if zlib.crc32(packed) == checksum else Gap()


def _read_record(fd: int, offset: int, end: int) -> Chunk | None:
    try:
        header = os.pread(fd, _RECORD.size, offset)
        if len(header) != _RECORD.size:
            return None
        checksum, size, seq, lines = _RECORD.unpack(header)
        if size > min(_LARGEST_RECORD_BYTES, end - offset - _RECORD.size):
            return None
        data = os.pread(fd, size, offset + _RECORD.size)
    except OSError:
        return None
    checked = zlib.crc32(data, zlib.crc32(header[4:]))
    return Chunk(seq, data, lines) if len(data) == size and checked == checksum else None
