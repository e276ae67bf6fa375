# SPDX-License-Identifier: Apache-2.0
"""An event as one line of JSON, at most ``LINE_LIMIT`` bytes long, and the file of these lines."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from _thread import allocate_lock  # of what `threading` has, all that is needed at every import
from math import isfinite

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


LINE_LIMIT = 4096  # the size up to which an append is one piece on every file system we know
_SHORTEST_CUT = 16
_DEEPEST = 6


def encode_line(fields: Mapping[str, object]) -> bytes:
    """Return ``fields`` as one line, cut where it is longer than the limit.

    Values that JSON does not know (numbers of array libraries, exceptions, NaN) become numbers or
    text: an event is never lost because of what somebody put into it.
    """
    try:
        line = _ENCODER.encode(fields)
    except (ValueError, TypeError, RecursionError):
        line = ""
    if not line or len(line) >= LINE_LIMIT:
        sized = {str(name): _plain(value, 0) for name, value in fields.items()}
        # Halve the longest value until the line fits; numbers and short values stay whole.
        while len(line := _ENCODER.encode(sized)) >= LINE_LIMIT:
            longest = max(sized, key=lambda name: len(_ENCODER.encode(sized[name])))
            sized[longest] = _halved(sized[longest])
    return line.encode("ascii") + b"\n"


def _halved(value: object) -> object:
    """Return about half of ``value`` with a marker that says that something is missing."""
    if isinstance(value, str):
        kept, _, cut = value.rpartition(" ...[cut ")
        already = int(cut[:-1]) if kept and cut[:-1].isdigit() else 0
        text = kept if already else value
        keep = len(text) // 2
        if keep < _SHORTEST_CUT:
            return "...[cut]"
        return f"{text[:keep]} ...[cut {len(text) - keep + already}]"
    if isinstance(value, list) and len(value) > 1:
        kept_items = value[: len(value) // 2]
        return [item for item in kept_items if item != "...[cut]"] + ["...[cut]"]
    if isinstance(value, dict) and len(value) > 1:
        names = [name for name in value if name != "...[cut]"]
        return {**{name: value[name] for name in names[: len(names) // 2]}, "...[cut]": True}
    return "...[cut]"


def _plain(value: object, depth: int) -> object:
    """Return ``value`` made of JSON's own types only."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if depth >= _DEEPEST:
        return "...[cut]"
    if isinstance(value, dict):
        return {str(name): _plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    return _foreign(value)


def _foreign(value: object) -> object:
    """Return a number where ``value`` is one (of numpy, of torch), else its text."""
    if hasattr(value, "__index__"):
        return int(value.__index__())
    if hasattr(value, "__float__"):
        number = float(value.__float__())
        return number if isfinite(number) else str(number)
    return str(value)


_ENCODER = json.JSONEncoder(
    separators=(",", ":"), allow_nan=False, check_circular=False, default=_foreign
)


SCHEMA = "nvrx_events.v1"
_REOPEN_AFTER_S = 5.0
_LOCK_S = 1.0
_NAME_LIMIT = 64
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def _name_part(text: str) -> str:
    """Return ``text`` as a piece of a file name: no separators, no leading dot, bounded."""
    kept = "".join(ch if ch.isascii() and (ch.isalnum() or ch in "._-") else "_" for ch in text)
    return kept.lstrip(".")[:_NAME_LIMIT] or "unknown"


# What stands at the descriptor: our file, our file without a name, or nothing of ours.
_OURS, _REMOVED, _FOREIGN = range(3)


class NodeFile:
    """One append-only file of a host and a launch; any number of processes have it open."""

    def __init__(
        self,
        directory: str,
        *,
        host: str,
        launch_id: str,
        job_id: str | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the file without opening it."""
        self.directory = directory
        self.host = host
        self.launch_id = launch_id
        self.fd = -1
        self.size = 0  # bytes that all processes had written when it was last looked at
        self._job_id = job_id
        self._versions = dict(versions or {})
        self._identity = (0, 0)
        self._lock = allocate_lock()
        self._is_closed = False
        self._is_line_torn = False
        self._next_open_at = 0.0

    @property
    def path(self) -> str:
        name = f"events-{_name_part(self.host)}-{_name_part(self.launch_id)}.jsonl"
        return os.path.join(self.directory, name)

    def open(self, *, is_new: bool) -> str:
        """Open the file, unless another thread has, and return why that failed, if it did.

        A new file gets another ``launch_id`` where one of that name is there already.
        """
        # Not for ever: a fork may have copied a lock that was held.
        if not self._lock.acquire(timeout=_LOCK_S):
            return "another thread holds it"
        try:
            if self._is_closed:
                return "it is closed"
            return "" if self._look() == _OURS else self._open(is_new=is_new)
        finally:
            self._lock.release()

    def _open(self, *, is_new: bool) -> str:
        fd = -1
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            fd = self._open_new() if is_new else self._open_existing()
            found = os.fstat(fd)
        except OSError as error:
            why = error.strerror or type(error).__name__
        else:
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                self._identity = (found.st_dev, found.st_ino)
                self.fd = fd
                return ""
            why = "not a regular file of this user"
        if fd >= 0:
            os.close(fd)
        self._next_open_at = time.monotonic() + _REOPEN_AFTER_S
        return why

    def is_open(self) -> bool:
        """Say whether the descriptor is still our file.

        A program may close every descriptor that it does not know, and the number may then belong
        to a file of its own.
        """
        if self._look() == _OURS:
            return True
        self._let_go(even_ours=False)
        return self._look() == _OURS

    def close(self) -> None:
        self._is_closed = True
        self._let_go(even_ours=True)

    def _let_go(self, *, even_ours: bool) -> None:
        if not self._lock.acquire(timeout=_LOCK_S):
            return
        try:
            # Looked at once more, now that no other thread changes anything.
            state = self._look()
            if state == _OURS and not even_ours:
                return
            if state != _FOREIGN:
                os.close(self.fd)
            self.fd = -1
        finally:
            self._lock.release()

    def _look(self) -> int:
        if self.fd < 0:
            return _FOREIGN
        try:
            found = os.fstat(self.fd)
        except OSError:
            return _FOREIGN
        if (found.st_dev, found.st_ino) != self._identity:
            return _FOREIGN
        self.size = found.st_size
        return _OURS if found.st_nlink else _REMOVED

    def may_open(self) -> bool:
        """Say whether the last failure is long enough ago to try again."""
        return time.monotonic() >= self._next_open_at

    def write(self, line: bytes) -> str:
        """Write one line and return why that failed, nothing when it did not.

        What a short write left behind is ended by the newline before the next line.
        """
        data = b"\n" + line if self._is_line_torn else line
        try:
            written = os.write(self.fd, data)
        except OSError as error:
            return error.strerror or type(error).__name__
        self._is_line_torn = written < len(data)
        return "short write" if self._is_line_torn else ""

    def _open_new(self) -> int:
        first_id = self.launch_id
        for number in range(2, 100):
            try:
                return self._make()
            except FileExistsError:
                self.launch_id = f"{first_id[: _NAME_LIMIT - 3]}.{number}"
        raise FileExistsError(errno.EEXIST, f"too many files of launch {first_id}")

    def _open_existing(self) -> int:
        try:
            return os.open(self.path, _FLAGS)
        except FileNotFoundError:
            pass
        try:
            return self._make()
        except FileExistsError:
            return os.open(self.path, _FLAGS)

    def _make(self) -> int:
        """Make the file with its header, or leave neither a file nor a descriptor behind."""
        fd = os.open(self.path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self._write_header(fd)
        except BaseException:
            # Who opened it meanwhile notices that it has no name any more and opens it anew.
            os.close(fd)
            os.unlink(self.path)
            raise
        return fd

    def _write_header(self, fd: int) -> None:
        from nvidia_resiliency_ext.shared_utils import procfs

        header = encode_line(
            {
                "kind": "header",
                "schema": SCHEMA,
                "host": self.host,
                "launch_id": self.launch_id,
                "job_id": self._job_id,
                "boot_id": procfs.boot_id() or None,
                "clock": {"wall": time.time(), "mono": time.monotonic()},
                "versions": self._versions,
            }
        )
        if os.write(fd, header) < len(header):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
