# SPDX-License-Identifier: Apache-2.0
"""Owns the files in which the lines of one target wait when memory is used up.

They lie in a directory of their own below the spill directory:

    <key>-<random>/
        stream.json     whose lines these are; its owner holds a lock on it as long as it lives
        00001000.lines  records, appended and never changed; removed when all is confirmed
        00001001.lines  ...

The key is made of the client's name and the target's path, so that a later process that opens the
same target finds what a killed one left, and goes on with the same stream id and numbers: what had
arrived after all is then known to the server and not written twice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import struct
import zlib
from collections import deque
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.os_utils import (
    private_dir,
    read_regular_file,
    remove_tree_at,
)

from .chunks import MAX_LINE_BYTES, Chunk, Gap, notice_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .room import Room

    Report = Callable[[int, str], None]

__all__ = ["Identity", "Spill", "adopt", "left_behind"]

_MAGIC = b"nvrxlog1"
_HEADER = struct.Struct("<8s24sI")  # magic; a gap before the records, and its checksum
_GAP = struct.Struct("<QQQ")
_RECORD = struct.Struct("<IIQI")  # checksum of the rest; size, number and lines of the data
_CHECKSUM = struct.Struct("<I")
_CHECKED = struct.Struct("<IQI")
_FIRST_NUMBER = 1000  # leaves room for files put before it
_SUFFIX = ".lines"
_OWNER = "stream.json"
_LARGEST_OWNER_BYTES = 64 * 1024
_LARGEST_RECORD_BYTES = 2 * MAX_LINE_BYTES
_FEWEST_SEGMENTS = 16
_SMALLEST_SEGMENT_BYTES = 256 * 1024
_RANDOM_BYTES = 6
_GENERATION = 1 << 32  # numbers for the chunks of one process
_KEY_DIGITS = 32


class Identity:
    """Whose lines a spill holds.

    Args:
        name: The client's name for what it leaves behind.
        node_id: The node that the lines are from.
        path: The target.
        stream_id: Under which the server counts them.
    """

    def __init__(self, name: str, node_id: str, path: str, stream_id: str) -> None:
        self.name = name
        self.node_id = node_id
        self.path = path
        self.stream_id = stream_id

    @property
    def key(self) -> str:
        """What the directory's name begins with."""
        text = f"{self.name}\0{self.node_id}\0{self.path}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_KEY_DIGITS]


class _Segment:
    """One file: where reading is, and what has still to be read."""

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

    def added(self, chunk: Chunk) -> None:
        """Count in a chunk that stands at its end now."""
        self.size += _RECORD.size + len(chunk.data)
        self.first_seq = self.first_seq or chunk.seq
        self.last_seq = max(self.last_seq, chunk.seq)
        self.unread = self.unread.joined(Gap(0, chunk.lines, len(chunk.data)))

    @property
    def name(self) -> str:
        return f"{self.number:08d}{_SUFFIX}"

    def has_unread(self) -> bool:
        return bool(self.gap.lines) or self.read_at < self.size


class Spill:
    """A queue of chunks in files; the owner holds a lock around every call.

    Nothing here raises: files that cannot be written count as full, files that cannot be read as
    empty, and one line says so.

    Args:
        spill_dir: Where the directory is made when it is first needed.
        identity: Whose lines they are.
        room: Counts their bytes.
        report: Takes a line for people.
    """

    def __init__(self, spill_dir: str, identity: Identity, room: Room, report: Report) -> None:
        self.identity = identity
        self._spill_dir = spill_dir
        self._room = room
        self._report = report
        share = room.spill_limit_bytes // _FEWEST_SEGMENTS
        self._segment_bytes = max(_SMALLEST_SEGMENT_BYTES, share)
        self._segments: deque[_Segment] = deque()
        self._path = ""
        self._owner_fd = -1
        self._last_number = _FIRST_NUMBER - 1
        self._has_failed = False

    @property
    def path(self) -> str:
        """The directory, empty as long as nothing has been spilled."""
        return self._path

    @property
    def unread(self) -> Gap:
        """Lines and bytes that have still to be read."""
        lines = sum(segment.unread.lines for segment in self._segments)
        return Gap(0, lines, sum(segment.unread.size for segment in self._segments))

    def next_generation(self) -> int:
        """Return a number for a chunk that no process can have used for this stream so far.

        A killed process may have sent more than its files tell, from memory.
        """
        highest = max((segment.last_seq for segment in self._segments), default=0)
        return (highest // _GENERATION + 1) * _GENERATION

    def append(self, chunk: Chunk, gap: Gap) -> bool:
        """Add a chunk behind the others, and before it what was given up there."""
        size = _RECORD.size + len(chunk.data)
        last = self._segments[-1] if self._segments else None
        fresh = last is None or bool(gap.lines) or last.size + size > self._segment_bytes
        needed = size + _HEADER.size if fresh else size
        if not self._room.take_spill(needed):
            return False
        try:
            if fresh or last is None:
                last = self._new_segment(self._last_number + 1, gap)
                self._segments.append(last)
            self._write(last, chunk)
        except OSError as error:
            self._room.give_spill(needed)
            if self._segments and self._segments[-1].size == _HEADER.size:
                self._discard(self._segments.pop())
            self._fail(error)
            return False
        if self._has_failed:
            self._has_failed = False
            self._report(logging.INFO, f"log lines can wait in {self._path} again")
        return True

    def put_first(self, chunks: list[Chunk]) -> bool:
        """Add chunks before all others, whatever the limit; those that are there already stay."""
        oldest = self._segments[0] if self._segments else None
        if oldest is not None:
            chunks = [chunk for chunk in chunks if chunk.seq < oldest.first_seq]
        if not chunks:
            return True
        number = self._last_number + 1 if oldest is None else oldest.number - 1
        try:
            segment = self._new_segment(number, Gap())
            self._segments.appendleft(segment)
            for chunk in chunks:
                self._write(segment, chunk)
        except OSError as error:
            self._fail(error)
            return False
        finally:
            if self._segments and self._segments[0].number == number:
                self._room.add_spill(self._segments[0].size)
        return True

    def has_unread(self) -> bool:
        """Say whether `read` may return something."""
        return any(segment.has_unread() for segment in self._segments)

    def read(self) -> Chunk | None:
        """Return the oldest chunk not read so far; None when its file is damaged."""
        segment = next((found for found in self._segments if found.has_unread()), None)
        if segment is None:
            return None
        if segment.gap.lines:
            notice, segment.gap = notice_of(segment.gap), Gap()
            return notice
        chunk = _read_record(segment.fd, segment.read_at, segment.size)
        if chunk is None:
            left = segment.unread
            self._report(
                logging.ERROR,
                f"{self._path}/{segment.name} is damaged:"
                f" {left.lines} lines ({left.size} bytes) in it are lost",
            )
            segment.gap = left._replace(seq=segment.last_seq)
            segment.read_at, segment.unread = segment.size, Gap()
            return None
        segment.read_at += _RECORD.size + len(chunk.data)
        left = segment.unread
        segment.unread = Gap(0, left.lines - chunk.lines, left.size - len(chunk.data))
        return chunk

    def drop_oldest(self) -> tuple[Gap, Gap] | None:
        """Give up the unread lines of the oldest file that has any."""
        for segment in self._segments:
            if segment.unread.lines:
                dropped = segment.unread._replace(seq=segment.last_seq)
                self._remove(segment)
                return dropped, segment.gap.joined(dropped)
        return None

    def put_gap(self, gap: Gap) -> bool:
        """Keep a gap before the oldest unread chunk; False when there is none."""
        segment = next((found for found in self._segments if found.has_unread()), None)
        if segment is None:
            return False
        segment.gap = gap.joined(segment.gap)
        with contextlib.suppress(OSError):
            os.pwrite(segment.fd, _pack_header(segment.gap), 0)
        return True

    def confirmed(self, seq: int) -> None:
        """Remove the files whose chunks have all been read and confirmed."""
        while self._segments:
            first = self._segments[0]
            if first.has_unread() or first.last_seq > seq:
                return
            self._remove(first)
        self._remove_directory()

    def forget_descriptors(self) -> None:
        """Close the descriptors that a forked child has inherited; the files are its parent's."""
        for segment in self._segments:
            os.close(segment.fd)
        self._segments.clear()
        if self._owner_fd >= 0:
            os.close(self._owner_fd)
        self._owner_fd = -1

    def close(self, *, keeps_files: bool) -> None:
        """Close the files, and remove them unless a later process shall send them."""
        if not keeps_files:
            while self._segments:
                self._remove(self._segments[0])
            self._remove_directory()
        for segment in self._segments:
            self._room.give_spill(segment.size)
        self.forget_descriptors()

    def take_over(self, path: str, owner_fd: int) -> None:
        """Begin with the files that another process left in a directory."""
        self._path, self._owner_fd = path, owner_fd
        for name in sorted(os.listdir(path)):
            number = name.removesuffix(_SUFFIX)
            if not name.endswith(_SUFFIX) or not number.isdigit():
                continue
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(os.path.join(path, name), flags)
            segment = _load_segment(int(number), fd)
            if segment is None:
                os.close(fd)
                line = f"{path}/{name} holds no log lines and is left alone"
                self._report(logging.WARNING, line)
                continue
            self._segments.append(segment)
            self._room.add_spill(segment.size)
            self._last_number = max(self._last_number, segment.number)

    def _new_segment(self, number: int, gap: Gap) -> _Segment:
        if not self._path:
            self._make_directory()
        path = os.path.join(self._path, f"{number:08d}{_SUFFIX}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        segment = _Segment(number, fd, gap)
        try:
            written = os.pwrite(fd, _pack_header(gap), 0)
        except OSError:
            self._discard(segment)
            raise
        if written != _HEADER.size:
            self._discard(segment)
            raise OSError(errno.ENOSPC, "no space left", path)
        self._last_number = max(self._last_number, number)
        return segment

    def _make_directory(self) -> None:
        name = f"{self.identity.key}-{os.urandom(_RANDOM_BYTES).hex()}"
        path = os.path.join(private_dir(self._spill_dir), name)
        try:
            os.mkdir(path, 0o700)
        except FileNotFoundError:
            # Somebody else left it at this moment and it was empty.
            private_dir(self._spill_dir)
            os.mkdir(path, 0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(os.path.join(path, _OWNER), flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(fd, json.dumps(vars(self.identity)).encode())
        except OSError:
            os.close(fd)
            raise
        self._path, self._owner_fd = path, fd
        line = f"log lines for {self.identity.path} wait in {path} for the log server"
        self._report(logging.INFO, line)

    def _write(self, segment: _Segment, chunk: Chunk) -> None:
        checked = _CHECKED.pack(len(chunk.data), chunk.seq, chunk.lines)
        checksum = zlib.crc32(chunk.data, zlib.crc32(checked))
        header = _CHECKSUM.pack(checksum) + checked
        # At a place of its own, so that what a failed write left there is written over.
        written = os.pwritev(segment.fd, [header, chunk.data], segment.size)
        if written != len(header) + len(chunk.data):
            raise OSError(errno.ENOSPC, "no space left", self._path)
        segment.added(chunk)

    def _discard(self, segment: _Segment) -> None:
        os.close(segment.fd)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._path, segment.name))

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            where = self._path or self._spill_dir
            self._report(logging.WARNING, f"log lines cannot wait in {where}: {error}")

    def _remove(self, segment: _Segment) -> None:
        self._segments.remove(segment)
        self._discard(segment)
        self._room.give_spill(segment.size)

    def _remove_directory(self) -> None:
        if self._owner_fd < 0:
            return
        path, self._path = self._path, ""
        _remove_tree(path)
        with contextlib.suppress(OSError):
            os.rmdir(self._spill_dir)  # only when nobody else has files in it
        # Last: as long as the lock is held nobody takes the directory over.
        os.close(self._owner_fd)
        self._owner_fd = -1


def adopt(spill_dir: str, identity: Identity, room: Room, report: Report) -> Spill | None:
    """Take over what an earlier process of the same name left for this target.

    Of several the oldest is taken; the others wait for later processes.

    Returns:
        The spill, with the stream id of that process; None when there is nothing.
    """
    for path in _directories(spill_dir, identity.key):
        fd = _lock_owner(path)
        if fd is None:
            continue
        found = _read_owner(path)
        if found is None or found.key != identity.key:
            os.close(fd)
            continue
        spill = Spill(spill_dir, found, room, report)
        try:
            spill.take_over(path, fd)
        except OSError as error:
            line = f"what an earlier process left in {path} cannot be read: {error}"
            report(logging.WARNING, line)
            spill.forget_descriptors()
            continue
        if spill.has_unread():
            return spill
        spill.close(keeps_files=False)
    return None


def left_behind(spill_dir: str, name: str, node_id: str) -> list[str]:
    """Return the targets for which ended processes of this name left lines, in no other hands."""
    paths = set()
    for path in _directories(spill_dir, ""):
        found = _read_owner(path)
        if found is None or (found.name, found.node_id) != (name, node_id):
            continue
        fd = _lock_owner(path)
        if fd is not None:
            os.close(fd)
            paths.add(found.path)
    return sorted(paths)


def _directories(spill_dir: str, key: str) -> list[str]:
    """Return directories of spills of our own, oldest first."""
    found = []
    with contextlib.suppress(OSError), os.scandir(spill_dir) as entries:
        for entry in entries:
            if not entry.name.startswith(key) or "-" not in entry.name:
                continue
            status = entry.stat(follow_symlinks=False)
            ours = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
            if stat.S_ISDIR(status.st_mode) and ours:
                found.append((status.st_ctime_ns, entry.path))
    return [path for _, path in sorted(found)]


def _lock_owner(path: str) -> int | None:
    """Return a locked descriptor of the owner file; None when its owner lives or it is gone."""
    owner = os.path.join(path, _OWNER)
    try:
        fd = os.open(owner, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last owner may have removed it between the two calls.
        if os.fstat(fd).st_nlink:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _read_owner(path: str) -> Identity | None:
    try:
        found = json.loads(read_regular_file(os.path.join(path, _OWNER), _LARGEST_OWNER_BYTES))
        values = [found[name] for name in ("name", "node_id", "path", "stream_id")]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return Identity(*values) if all(isinstance(value, str) for value in values) else None


def _load_segment(number: int, fd: int) -> _Segment | None:
    """Look through the records of a file; what a crash tore at its end is cut off."""
    status = os.fstat(fd)
    header = os.pread(fd, _HEADER.size, 0) if stat.S_ISREG(status.st_mode) else b""
    if len(header) != _HEADER.size or not header.startswith(_MAGIC):
        return None
    _, packed, checksum = _HEADER.unpack(header)
    gap = Gap(*_GAP.unpack(packed)) if zlib.crc32(packed) == checksum else Gap()
    segment = _Segment(number, fd, gap)
    while segment.size < status.st_size:
        chunk = _read_record(fd, segment.size, status.st_size)
        if chunk is None:
            os.ftruncate(fd, segment.size)
            break
        segment.added(chunk)
    return segment


def _pack_header(gap: Gap) -> bytes:
    packed = _GAP.pack(*gap)
    return _HEADER.pack(_MAGIC, packed, zlib.crc32(packed))


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


def _remove_tree(path: str) -> None:
    parent, name = os.path.split(path)
    with contextlib.suppress(OSError):
        directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_tree_at(name, directory)
        finally:
            os.close(directory)
