# SPDX-License-Identifier: Apache-2.0
"""The queue in files: their directories, how lines stand in them, how far they were read.

A lock on a directory's `stream.json` says that the owner lives; the kernel ends it with the
process. Files beside it hold records that are appended and never changed; checksums tell what a
crash tore.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import stat
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils.os_utils import lock_file, private_dir, remove_tree

from .limits import MAX_LINE_BYTES, Chunk, Gap, MemoryBudget

Report = Callable[[int, str], None]

_OWNER = "stream.json"
_LARGEST_OWNER_BYTES = 64 * 1024
_RANDOM_BYTES = 6
_KEY_DIGITS = 32


@dataclass(frozen=True)
class Identity:
    """Owner of the lines in a spill; `name` is the client's, by which a successor finds them."""

    name: str
    node_id: str
    path: str
    stream_id: str

    @property
    def key(self) -> str:
        """Return the beginning of the directory's name."""
        text = f"{self.name}\0{self.node_id}\0{self.path}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_KEY_DIGITS]


def make_place(spill_dir: str, identity: Identity) -> tuple[str, int]:
    """Make a directory for a spill; return it and a descriptor with its lock."""
    name = f"{identity.key}-{os.urandom(_RANDOM_BYTES).hex()}"
    path = os.path.join(private_dir(spill_dir), name)
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        # Somebody else left it at this moment and it was empty.
        private_dir(spill_dir)
        os.mkdir(path, 0o700)
    owner, fd = os.path.join(path, _OWNER), -1
    data = json.dumps(vars(identity)).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(owner, flags, 0o600)
        lock_file(fd)
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, "no space left", _OWNER)  # noqa: TRY301 - as of `write`
    except OSError:
        # On a full disk each try would leave one more.
        with contextlib.suppress(OSError):
            if fd >= 0:
                os.close(fd)
                os.unlink(owner)
            os.rmdir(path)
        raise
    return path, fd


def ownerless(spill_dir: str, key: str = "") -> Iterator[tuple[str, int, Identity]]:
    """Yield spill directories of ended processes, oldest first: path, descriptor, identity.

    The descriptor has the lock on it and belongs to the caller.
    """
    places = []
    with contextlib.suppress(OSError), os.scandir(spill_dir) as entries:
        for entry in entries:
            if not entry.name.startswith(key) or "-" not in entry.name:
                continue
            status = entry.stat(follow_symlinks=False)
            ours = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
            if stat.S_ISDIR(status.st_mode) and ours:
                places.append((status.st_ctime_ns, entry.path))
    for _, path in sorted(places):
        taken = _take_owner(path)
        if taken is not None and taken[1].key.startswith(key):
            yield path, *taken
        elif taken is not None:
            os.close(taken[0])


def left_behind(spill_dir: str, name: str, node_id: str) -> list[str]:
    """Return the targets for which ended processes of this name left lines, in no other hands."""
    paths = set()
    for _, fd, found in ownerless(spill_dir):
        os.close(fd)
        if (found.name, found.node_id) == (name, node_id):
            paths.add(found.path)
    return sorted(paths)


def _take_owner(path: str) -> tuple[int, Identity] | None:
    """Lock the owner file and read it; None when its owner lives, it is gone or says nothing."""
    try:
        owner = os.path.join(path, _OWNER)
        fd = os.open(owner, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        lock_file(fd)
        found = json.loads(os.pread(fd, _LARGEST_OWNER_BYTES, 0))
        values = [found[name] for name in ("name", "node_id", "path", "stream_id")]
        # Its last owner may have removed it before we had the lock.
        if os.fstat(fd).st_nlink and all(isinstance(value, str) for value in values):
            return fd, Identity(*values)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    os.close(fd)
    return None


SUFFIX = ".lines"
_RECORD = struct.Struct("<IIQI")  # checksum of the rest; size, number and lines of the data
_LARGEST_RECORD_BYTES = 2 * MAX_LINE_BYTES


class Segment:
    """One open file; `unread` counts the lines and bytes that have still to be read."""

    def __init__(self, number: int, fd: int = -1) -> None:
        self.number = number
        self.fd = fd
        self.size = self.read_at = 0
        self.first_seq = self.last_seq = 0
        self.unread = Gap()

    @classmethod
    def load(cls, number: int, fd: int) -> Segment | None:
        """Look through the records of a file, up to its end or the first damaged one."""
        status = os.fstat(fd)
        segment = cls(number, fd)
        while stat.S_ISREG(status.st_mode) and segment.size < status.st_size:
            chunk = _read_record(fd, segment.size, status.st_size)
            if chunk is None:
                break
            segment._added(chunk)
        return segment if segment.size else None

    @staticmethod
    def record_bytes(chunk: Chunk) -> int:
        return _RECORD.size + len(chunk.data)

    @property
    def name(self) -> str:
        return f"{self.number:08d}{SUFFIX}"

    def has_unread(self) -> bool:
        return self.read_at < self.size

    def append(self, chunk: Chunk) -> None:
        rest = _RECORD.pack(0, len(chunk.data), chunk.seq, chunk.lines)[4:]
        checksum = zlib.crc32(chunk.data, zlib.crc32(rest))
        header = checksum.to_bytes(4, "little") + rest
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

    def discard(self, directory: str) -> None:
        os.close(self.fd)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, self.name))

    def _added(self, chunk: Chunk) -> None:
        self.size += self.record_bytes(chunk)
        self.first_seq = self.first_seq or chunk.seq
        self.last_seq = max(self.last_seq, chunk.seq)
        self.unread = self.unread.joined(Gap(0, chunk.lines, len(chunk.data)))


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


_FIRST_NUMBER = 1000  # leaves space for files put before it
_FEWEST_SEGMENTS = 16
_SMALLEST_SEGMENT_BYTES = 256 * 1024
_GENERATION = 1 << 32  # numbers for the chunks of one process


class Spill:
    """A queue of chunks in files; the owner holds a lock around every call.

    Nothing here raises: unwritable files count as full, unreadable ones as empty; one line says so.
    """

    def __init__(
        self, spill_dir: str, identity: Identity, budget: MemoryBudget, report: Report
    ) -> None:
        self.identity = identity
        self._spill_dir = spill_dir
        self._budget = budget
        self._report = report
        share = budget.spill_limit_bytes // _FEWEST_SEGMENTS
        self._segment_bytes = max(_SMALLEST_SEGMENT_BYTES, share)
        self._segments: deque[Segment] = deque()
        self.path = ""
        self._owner_fd = -1
        self._last_number = _FIRST_NUMBER - 1
        self._has_failed = False

    @property
    def unread(self) -> Gap:
        lines = sum(segment.unread.lines for segment in self._segments)
        return Gap(0, lines, sum(segment.unread.size for segment in self._segments))

    def next_generation(self) -> int:
        """Return a number for a chunk above all that a killed process may have sent from memory."""
        highest = max((segment.last_seq for segment in self._segments), default=0)
        return (highest // _GENERATION + 1) * _GENERATION

    def append(self, chunk: Chunk) -> bool:
        size = Segment.record_bytes(chunk)
        if not self._budget.take_spill(size):
            return False
        last = self._segments[-1] if self._segments else None
        try:
            if last is None or last.size + size > self._segment_bytes:
                last = self._new_segment(self._last_number + 1)
                self._segments.append(last)
            last.append(chunk)
        except OSError as error:
            self._budget.add(spill=-size)
            if self._segments and not self._segments[-1].size:
                self._segments.pop().discard(self.path)
            self._fail(error)
            return False
        if self._has_failed:
            self._has_failed = False
            self._report(logging.INFO, f"log lines can wait in {self.path} again")
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
            segment = self._new_segment(number)
            self._segments.appendleft(segment)
            for chunk in chunks:
                segment.append(chunk)
        except OSError as error:
            self._fail(error)
            return False
        finally:
            if self._segments and self._segments[0].number == number:
                self._budget.add(spill=self._segments[0].size)
        return True

    def has_unread(self) -> bool:
        return any(segment.has_unread() for segment in self._segments)

    def read(self) -> Chunk | None:
        """Return the oldest chunk not read so far; None when its file is damaged."""
        segment = next((found for found in self._segments if found.has_unread()), None)
        if segment is None:
            return None
        chunk = segment.read()
        if chunk is None:
            left = segment.unread
            self._report(
                logging.ERROR,
                f"{self.path}/{segment.name} is damaged:"
                f" {left.lines} lines ({left.size} bytes) in it are lost",
            )
        return chunk

    def drop_oldest(self) -> Gap | None:
        """Give up the unread lines of the oldest file that has any; None without such a file.

        Read, unconfirmed files before it go too: the window holds their chunks, and `put_first`
        relies on all remaining files being newer.
        """
        while self.has_unread():
            segment = self._segments[0]
            self._remove(segment)
            if segment.has_unread():
                return segment.unread._replace(seq=segment.last_seq)
        return None

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
            self._budget.add(spill=-segment.size)
        self.forget_descriptors()

    def take_over(self, path: str, owner_fd: int) -> None:
        """Begin with the files that another process left in a directory."""
        self.path, self._owner_fd = path, owner_fd
        for name in sorted(os.listdir(path)):
            number = name.removesuffix(SUFFIX)
            if not name.endswith(SUFFIX) or not (number.isascii() and number.isdigit()):
                continue
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(os.path.join(path, name), flags)
            segment, size = Segment.load(int(number), fd), os.fstat(fd).st_size
            if segment is None:
                os.close(fd)
                line = f"{path}/{name} ({size} bytes) holds no log lines and is left alone"
                self._report(logging.WARNING, line)
                continue
            if segment.size < size:
                # A crash tears the end. After other damage nothing says where a record begins.
                line = f"{path}/{name} is damaged: its last {size - segment.size} bytes are lost"
                self._report(logging.WARNING, line)
                os.ftruncate(fd, segment.size)
            self._segments.append(segment)
            self._budget.add(spill=segment.size)
            self._last_number = max(self._last_number, segment.number)

    def _new_segment(self, number: int) -> Segment:
        if not self.path:
            self.path, self._owner_fd = make_place(self._spill_dir, self.identity)
            line = f"log lines for {self.identity.path} wait in {self.path} for the log server"
            self._report(logging.INFO, line)
        segment = Segment(number)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        segment.fd = os.open(os.path.join(self.path, segment.name), flags, 0o600)
        self._last_number = max(self._last_number, number)
        return segment

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            where = self.path or self._spill_dir
            self._report(logging.WARNING, f"log lines cannot wait in {where}: {error}")

    def _remove(self, segment: Segment) -> None:
        self._segments.remove(segment)
        segment.discard(self.path)
        self._budget.add(spill=-segment.size)

    def _remove_directory(self) -> None:
        """Remove the directory, and the one above when nobody else has files there."""
        if self._owner_fd >= 0:
            path, owner_fd = self.path, self._owner_fd
            self.path, self._owner_fd = "", -1
            with contextlib.suppress(OSError):
                remove_tree(path)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))
            # Last: as long as the lock is held nobody takes the directory over.
            os.close(owner_fd)


def adopt(spill_dir: str, identity: Identity, budget: MemoryBudget, report: Report) -> Spill | None:
    """Take over the oldest spill that an earlier process of the same name left for this target."""
    for path, fd, found in ownerless(spill_dir, identity.key):
        spill = Spill(spill_dir, found, budget, report)
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
