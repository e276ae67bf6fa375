# SPDX-License-Identifier: Apache-2.0
"""A log on disk: its path, its file, and the ledger of what is in it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nvidia_resiliency_ext.shared_utils._funnel.shared import MAX_NAME_BYTES, MAX_PATH_BYTES
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, UnsafePathError
from nvidia_resiliency_ext.shared_utils.os_utils import (
    atomic_write,
    lock_file,
    open_append_beneath,
    open_unlinked,
)

from .chunks import Refusal

MAX_BYTES = 64 << 20
_MOST_RECORD_BYTES = MAX_BYTES // 8
_MAX_SEQ = (1 << 64) - 1
_SUFFIX = ".nvrx-acks"


@dataclass(slots=True)
class Ledger:
    """Content of a ledger: the last number of each stream in the log, and the last writer."""

    seqs: dict[str, int] = field(default_factory=dict)
    cut_log_to: int | None = None  # it ends inside a batch
    cut_ledger_to: int | None = None  # after the log
    last_stream: str | None = None


def ledger_name(log_name: str) -> str:
    """Return the name of the ledger beside a log; hidden, so that a listing shows logs only."""
    return f".{log_name}{_SUFFIX}"


def is_ledger_name(name: str) -> bool:
    """Return whether a file of that name is a ledger, which no sender may write to."""
    return name.startswith(".") and name.endswith(_SUFFIX)


def encode(start: int, end: int, seqs: Mapping[str, int]) -> bytes:
    """Return the record of a batch from `start` to `end`; its last writer comes last in `seqs`."""
    record = {"start": start, "end": end, "seqs": dict(seqs)}
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def merge(seqs: dict[str, int], newer: Mapping[str, int]) -> None:
    """Take over newer numbers; the stream that was silent for longest stands first."""
    for stream_id, seq in newer.items():
        seqs.pop(stream_id, None)
        seqs[stream_id] = seq


def encode_all(size: int, seqs: dict[str, int]) -> bytes:
    """Return the one record for a log of `size` bytes, without the longest silent streams."""
    while len(record := encode(size, size, seqs)) > _MOST_RECORD_BYTES:
        for stream_id in list(seqs)[: (len(seqs) + 1) // 2]:
            del seqs[stream_id]
    return record


def read_ledger(data: bytes, log_size: int) -> Ledger:
    """Return a ledger's statement about a log of that size; lines that are no records are ignored.

    A batch is written only after its record is whole.
    """
    found = Ledger()
    last: tuple[int, int, int, dict[str, int]] | None = None
    position = 0
    for line in data.splitlines(keepends=True):
        record = _record(line)
        if record is not None:
            if last is not None:
                merge(found.seqs, last[3])
            last = (position, *record)
        position += len(line)
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        found.cut_ledger_to = whole
    if last is None:
        return found
    offset, start, end, seqs = last
    if start <= log_size < end:
        found.cut_log_to, found.cut_ledger_to = start, offset
        return found
    merge(found.seqs, seqs)
    if log_size == end and seqs:
        found.last_stream = next(reversed(seqs))
    return found


def _record(line: bytes) -> tuple[int, int, dict[str, int]] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        start, end, seqs = record["start"], record["end"], record["seqs"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not (_is_number(start) and _is_number(end) and isinstance(seqs, dict) and start <= end):
        return None
    if not all(_is_number(seq) for seq in seqs.values()):
        return None
    return start, end, seqs


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SEQ


FILE_MODE = 0o640
DIRECTORY_MODE = 0o750
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FIRST_PRINTABLE, _DELETE = 0x20, 0x7F


@dataclass(frozen=True, slots=True)
class LogPath:
    """The path of a log: an allowed root, and the names below it."""

    root: str
    names: tuple[str, ...]


class Roots:
    """Resolved directories below which logs may lie; safe in all threads.

    `must_exist=False` is for code that checks paths and opens none.
    """

    def __init__(self, paths: Iterable[str], *, must_exist: bool = True) -> None:
        self._resolved: dict[str, str] = {}
        for path in paths:
            real = path
            try:
                real = os.path.realpath(path)
                if must_exist:
                    os.close(os.open(real, _OPEN_DIRECTORY))
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise ConfigError(f"allowed root {path!r}: {reason}") from error
            # As it was given and as it is: senders may know either.
            self._resolved[os.path.abspath(path)] = real
            self._resolved[real] = real
        if not self._resolved:
            raise ConfigError("no allowed root is given")

    def locate(self, path: str) -> LogPath:
        """Split `path` into its allowed root and the names below; the file system is not asked."""
        if not path:
            raise _invalid("file_path is empty")
        shown = repr(path if len(path) <= 200 else path[:200] + "...")  # noqa: PLR2004
        if len(path.encode()) > MAX_PATH_BYTES:
            raise Refusal("RESOURCE_EXHAUSTED", f"the path is too long: {shown}")
        if any(ord(c) < _FIRST_PRINTABLE or ord(c) == _DELETE for c in path):
            raise _invalid(f"the path has control characters: {shown}")
        names = path.split("/")
        if names[0] or not names[-1] or names[-1] == "." or ".." in names:
            raise _invalid(f"not an absolute path of a file without '..': {shown}")
        names = [name for name in names if name not in ("", ".")]
        if any(len(name.encode()) > MAX_NAME_BYTES for name in names):
            raise Refusal("RESOURCE_EXHAUSTED", f"a name in the path is too long: {shown}")
        if is_ledger_name(names[-1]):
            raise _invalid(f"the name is the funnel's own: {shown}")
        # The longest root wins, so that a root below another one is entered by itself.
        for count in range(len(names) - 1, -1, -1):
            root = self._resolved.get("/" + "/".join(names[:count]))
            if root is not None:
                return LogPath(root, tuple(names[count:]))
        raise _invalid(f"outside of the allowed roots: {shown}")

    def open(self, log_path: LogPath) -> tuple[int, int]:
        """Open a log for appending, with the directories to it made where they are missing."""
        directory = os.open(log_path.root, _OPEN_DIRECTORY)
        try:
            for name in log_path.names[:-1]:
                child = _enter(directory, name)
                os.close(directory)
                directory = child
            return directory, _open_log(directory, log_path.names[-1])
        except BaseException:
            # Nothing is swallowed; only the descriptor goes.
            os.close(directory)
            raise


def _enter(directory: int, name: str) -> int:
    try:
        return open_unlinked(name, _OPEN_DIRECTORY, directory, name)
    except FileNotFoundError:
        # Where somebody else made it, or a dangling link, the next line tells.
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, DIRECTORY_MODE, dir_fd=directory)
        return open_unlinked(name, _OPEN_DIRECTORY, directory, name)


def _open_log(directory: int, name: str) -> int:
    try:
        # Opening some devices does something already, so an honest look comes first;
        # open_append_beneath looks again at what it has opened.
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        status = None
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise UnsafePathError(errno.EINVAL, f"{name} is no regular file")
    return open_append_beneath(directory, name, FILE_MODE)


def _invalid(reason: str) -> Refusal:
    return Refusal("INVALID_ARGUMENT", reason)


Piece = memoryview | bytes | bytearray

IOV_MAX = 1024
# The page cache takes as large blocks as one write asks for, and large blocks are the ones that a
# virtual machine has given back to its host: each then costs several times what copying does.
_WRITE_BYTES = 128 << 10
_LEDGER_MODE = 0o600
_COMPACT_ABOVE_BYTES = 256 << 10
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class StaleLogError(OSError):
    """The open log has been removed; under its name is another file or none."""


class LogFile:
    """A log that this server appends to, locked against other servers."""

    def __init__(self, roots: Roots, log_path: LogPath) -> None:
        self._directory, self._log = roots.open(log_path)
        self._ledger = -1
        self._ledger_bytes = 0
        self._compact_above = _COMPACT_ABOVE_BYTES
        self._name = ledger_name(log_path.names[-1])
        self.seqs: dict[str, int] = {}
        self.last_stream: str | None = None
        self.ends_line = True
        try:
            _lock(self._log)
            self._recover()
        except BaseException:
            # Nothing is swallowed; only the descriptors go.
            self.close()
            raise

    def append(self, buffers: Sequence[Piece], seqs: Mapping[str, int], *, sync: bool) -> None:
        """Write a batch, whole or not at all; `seqs` is what the log holds then, last writer last.

        Raises:
            StaleLogError: The log has been removed.
            OSError: It cannot be written.
        """
        status = os.fstat(self._log)
        if status.st_nlink == 0:
            raise StaleLogError(errno.ESTALE, "the log has been removed")
        start = status.st_size
        size = sum(map(len, buffers))
        if seqs:
            self._append_record(start, start + size, seqs, sync=sync)
        try:
            self._write(buffers)
            if sync:
                os.fdatasync(self._log)
        except OSError:
            # Where this fails too, opening again does it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._log, start)
            raise
        merge(self.seqs, seqs)
        if self._ledger_bytes > self._compact_above:
            self._compact(start + size)

    def sync(self) -> None:
        os.fdatasync(self._log)

    def close(self) -> None:
        for descriptor in (self._ledger, self._log, self._directory):
            if descriptor >= 0:
                # Network file systems report late errors here; the data is not ours any more.
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._ledger = self._log = self._directory = -1

    def _write(self, buffers: Sequence[Piece]) -> None:
        for group in _groups(buffers):
            written = os.writev(self._log, group)
            if written == sum(map(len, group)):
                continue
            # Only a full disk or a limit stops in the middle; the rest then gives the reason.
            rest = memoryview(b"".join(group))[written:]
            while rest:
                count = os.write(self._log, rest)
                if count == 0:
                    raise OSError(errno.EIO, "the log takes no more bytes")
                rest = rest[count:]

    def _append_record(self, start: int, end: int, seqs: Mapping[str, int], *, sync: bool) -> None:
        if self._ledger < 0:
            self._ledger = open_append_beneath(self._directory, self._name, _LEDGER_MODE)
        record = encode(start, end, seqs)
        if os.write(self._ledger, record) != len(record):
            # What stands there is no record; nothing behind it may be glued to it.
            os.ftruncate(self._ledger, self._ledger_bytes)
            raise OSError(errno.ENOSPC, "no space for the ledger")
        self._ledger_bytes += len(record)
        if sync:
            os.fdatasync(self._ledger)

    def _recover(self) -> None:
        size = os.fstat(self._log).st_size
        data = self._read_ledger()
        if data is not None:
            found = read_ledger(data, size)
            if found.cut_log_to is not None:
                os.ftruncate(self._log, found.cut_log_to)
                size = found.cut_log_to
            # Only now: a ledger that was cut first would hide that the log must be.
            if found.cut_ledger_to is not None:
                os.ftruncate(self._ledger, found.cut_ledger_to)
                self._ledger_bytes = found.cut_ledger_to
            self.seqs, self.last_stream = found.seqs, found.last_stream
        if size:
            # The descriptor for appending cannot read.
            with open(f"/proc/self/fd/{self._log}", "rb", 0) as file:
                file.seek(size - 1)
                self.ends_line = file.read(1) == b"\n"

    def _read_ledger(self) -> bytes | None:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self._name, flags, dir_fd=self._directory)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise OSError(errno.EINVAL, f"{self._name} is no ledger of this log")
            data = file.readall()
        self._ledger = open_append_beneath(self._directory, self._name, _LEDGER_MODE)
        self._ledger_bytes = len(data)
        return data

    def _compact(self, log_size: int) -> None:
        record = encode_all(log_size, self.seqs)
        self._compact_above = max(_COMPACT_ABOVE_BYTES, 4 * len(record))
        path = f"/proc/self/fd/{self._directory}/{self._name}"
        try:
            atomic_write(path, record, _LEDGER_MODE, fsync=False)
        except OSError:
            # The old ledger is as good as before, only longer; the batch is in the log.
            self._compact_above = min(2 * self._ledger_bytes, MAX_BYTES // 2)
            return
        os.close(self._ledger)
        self._ledger, self._ledger_bytes = -1, len(record)


def _groups(buffers: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces in groups of at most _WRITE_BYTES, parts of large ones by themselves."""
    group: list[Piece] = []
    size = 0
    for piece in buffers:
        if group and size + len(piece) > _WRITE_BYTES:
            yield group
            group, size = [], 0
        if len(piece) > _WRITE_BYTES:
            whole = memoryview(piece)
            for start in range(0, len(piece), _WRITE_BYTES):
                yield [whole[start : start + _WRITE_BYTES]]
        else:
            group.append(piece)
            size += len(piece)
    if group:
        yield group


def _lock(descriptor: int) -> None:
    """Lock the log against other servers, which could write where this one truncates."""
    try:
        lock_file(descriptor)
    except BlockingIOError:
        raise OSError(errno.EAGAIN, "another log server writes this file") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
