# SPDX-License-Identifier: Apache-2.0
"""Where the merging of a node's logs stands, in a file that outlives a crash."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple
from zlib import crc32

STATE_NAME = ".nvrx_log_aggregator.state"
FRESH_S = 60.0
_VERSION = 1
_FILE_FIELDS = 5


class FilePosition(NamedTuple):
    """How far a file is read. Its first bytes tell it from a later file with its inode number."""

    inode: int
    done: int  # offset up to which the merged file has everything
    after: int  # offset after the present batch; ``done`` without one
    head_bytes: int
    head_crc: int

    def is_of(self, descriptor: int) -> bool:
        """Return whether an open file of this inode is the file that was meant."""
        if os.fstat(descriptor).st_size < self.done:
            return False
        return crc32(os.pread(descriptor, self.head_bytes, 0)) == self.head_crc


class Batch(NamedTuple):
    """Bytes that are being appended to the output."""

    length: int
    crc: int
    is_ordered: bool

    @classmethod
    def of(cls, data: bytes, *, is_ordered: bool) -> Batch:
        return cls(len(data), crc32(data), is_ordered)


class Position(NamedTuple):
    """Everything that an aggregator must know when it starts again."""

    output_inode: int
    output_bytes: int
    files: tuple[FilePosition, ...]  # in the order of a batch
    batch: Batch | None  # may or may not be in the output; None when nothing is under way
    boot_id: str  # the boot that ``monotonic_s`` belongs to
    monotonic_s: float

    def done_of(self, descriptor: int) -> int:
        """Return how far an open file is surely read; 0 when it is not known."""
        inode = os.fstat(descriptor).st_ino
        known = (each for each in self.files if each.inode == inode and each.is_of(descriptor))
        return next((each.done for each in known), 0)

    def is_fresh(self, monotonic_s: float) -> bool:
        """Return whether the aggregator that wrote this is alive, or may be back any moment."""
        return 0.0 <= monotonic_s - self.monotonic_s < FRESH_S


def encode(position: Position, number: int) -> bytes:
    """Return a position as text with a checksum; the higher the number, the later it is."""
    fields = {
        "version": _VERSION,
        "number": number,
        "output": [position.output_inode, position.output_bytes],
        "batch": position.batch,
        "boot_id": position.boot_id,
        "monotonic_s": position.monotonic_s,
        "files": position.files,
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    return b"%08x %08x %s\n" % (crc32(text), len(text), text)


def decode(data: bytes) -> tuple[int, Position] | None:
    """Return number and position in the text form, None where there is none that is whole."""
    try:
        crc, length = int(data[:8], 16), int(data[9:17], 16)
        text = data[18 : 18 + length]
        if len(text) != length or crc32(text) != crc:
            return None
        fields = json.loads(text)
        if fields["version"] != _VERSION or not isinstance(fields["monotonic_s"], (int, float)):
            return None
        batch = fields["batch"] and _naturals(fields["batch"], 3)
        inode, size = _naturals(fields["output"], 2)
        files = tuple(FilePosition(*_naturals(each, _FILE_FIELDS)) for each in fields["files"])
        last = None if batch is None else Batch(batch[0], batch[1], bool(batch[2]))
        boot_id, monotonic_s = str(fields["boot_id"]), fields["monotonic_s"]
        number = _naturals([fields["number"]], 1)[0]
        return number, Position(inode, size, files, last, boot_id, monotonic_s)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _naturals(value: object, count: int) -> list[int]:
    if not isinstance(value, list) or len(value) != count:
        raise TypeError("not a list of that length")
    if not all(isinstance(each, int) and each >= 0 for each in value):
        raise ValueError("not all numbers of 0 or more")
    return value


_SLOTS = 2
_LARGEST_BYTES = 64 * 1024 * 1024
_PAGE_BYTES = 4096
_NEW_NAME = STATE_NAME + ".new"
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def read_position(directory: int) -> Position | None:
    """Return the last position of the aggregator of a directory, None where there is none."""
    try:
        descriptor = os.open(STATE_NAME, os.O_RDONLY | _OPEN, dir_fd=directory)
    except OSError:
        return None
    try:
        found = _latest(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if found is None else found[1]


class PositionFile:
    """The position file of one directory, written by one aggregator; the descriptor stays open."""

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self._number = 0
        self._slot_bytes = 0
        self._fd = -1
        self.last: Position | None = None
        self.is_damaged = False
        try:
            self._fd = os.open(STATE_NAME, os.O_RDWR | _OPEN, dir_fd=directory)
            found = _latest(self._fd)
            self.is_damaged = found is None
        except FileNotFoundError:
            found = None
        if found is not None:
            self._number, self.last = found
            self._slot_bytes = os.fstat(self._fd).st_size // _SLOTS

    def write(self, position: Position) -> None:
        """Replace the older of the two positions."""
        data = encode(position, self._number + 1)
        if self._fd < 0 or len(data) > self._slot_bytes or not os.fstat(self._fd).st_nlink:
            self._make(data)
        else:
            self._put(self._fd, data)
        self._number += 1
        self.last = position

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _put(self, fd: int, data: bytes) -> None:
        at = (self._number + 1) % _SLOTS * self._slot_bytes
        while data:
            written = os.pwrite(fd, data, at)
            data, at = data[written:], at + written

    def _make(self, data: bytes) -> None:
        """Put a new file, with space for twice as much, in the place of the old one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_NEW_NAME, dir_fd=self._directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN
        fd = os.open(_NEW_NAME, flags, 0o600, dir_fd=self._directory)
        before = self._slot_bytes
        self._slot_bytes = -(-len(data) // _PAGE_BYTES) * _PAGE_BYTES * 2
        try:
            os.posix_fallocate(fd, 0, self._slot_bytes * _SLOTS)
            self._put(fd, data)
            os.rename(_NEW_NAME, STATE_NAME, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError as error:
            self._slot_bytes = before
            os.close(fd)
            os.unlink(_NEW_NAME, dir_fd=self._directory)
            raise OSError(error.errno, error.strerror, STATE_NAME) from error
        except BaseException:
            os.close(fd)
            raise
        self.close()
        self._fd = fd


def _latest(descriptor: int) -> tuple[int, Position] | None:
    """Return the later of the positions in a file that are whole."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_BYTES:
        return None
    slot_bytes = found.st_size // _SLOTS
    slots = (decode(os.pread(descriptor, slot_bytes, n * slot_bytes)) for n in range(_SLOTS))
    return max((slot for slot in slots if slot is not None), key=itemgetter(0), default=None)


_UNREAD_FACTOR = 16
_CHUNK_BYTES = 1 << 20
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_COMPLAINT_END = b" log records dropped\n"


def remove_old(names: Sequence[str], max_backup_files: int, directory: int) -> int:
    """Delete all but the newest files of one writer; unread files may stay as well."""
    position = read_position(directory)
    if position is not None:
        from nvidia_resiliency_ext.shared_utils.procfs import boot_id

        if position.boot_id != boot_id():
            position = None
    is_aggregated = position is not None and position.is_fresh(time.monotonic())
    most = _UNREAD_FACTOR * max(1, max_backup_files) if is_aggregated else max_backup_files
    dropped = 0
    left = len(names)
    for name in names[: len(names) - max_backup_files]:
        try:
            descriptor = os.open(name, _FLAGS, dir_fd=directory)
        except OSError:
            continue  # gone, or a link or a device: whatever it is, it is no log of ours
        try:
            offset = 0 if position is None else position.done_of(descriptor)
            is_unread = offset < os.fstat(descriptor).st_size
            if is_unread and left <= most:
                continue
            dropped += count_records(descriptor, offset) if is_unread else 0
        finally:
            os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        left -= 1
    return dropped


def count_records(descriptor: int, offset: int = 0) -> int:
    """Return how many records a file has from ``offset`` on, complaints of the writer aside."""
    count = 0
    before = b"\n"
    with open(descriptor, "rb", closefd=False) as file:
        if not offset:
            file.seek(0)
            count -= file.readline(_CHUNK_BYTES).endswith(_COMPLAINT_END)
        file.seek(offset)
        while chunk := file.read(_CHUNK_BYTES):
            joined = before + chunk
            # A line begins after each line break, and goes on with a record if a tab is first.
            count += joined.count(b"\n", 0, -1) - joined.count(b"\n\t")
            before = joined[-1:]
    return count
