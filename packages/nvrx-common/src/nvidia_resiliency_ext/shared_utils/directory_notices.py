# SPDX-License-Identifier: Apache-2.0
"""Notices of the kernel (inotify) about the entries of a directory, or about files that grow.

Where the kernel gives none (`NVRX_FORCE_NO_INOTIFY=1`, some network disks), the caller polls.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["DirectoryNotices", "FileNotices"]

_IN_MODIFY = 0x2
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000
_IN_ONLYDIR = 0x1000000
_MASK = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE | _IN_ONLYDIR
_EVENT = struct.Struct("iIII")
_READ_BYTES = 64 * 1024


class _Notices:
    """An inotify descriptor; -1 where the kernel gives none, and after `close`."""

    def __init__(self) -> None:
        self._fd = -1
        if os.environ.get("NVRX_FORCE_NO_INOTIFY") != "1":
            with contextlib.suppress(AttributeError):
                self._fd = int(_libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are notices; -1: there is none."""
        return self._fd

    def close(self) -> None:
        """End the notices; harmless when repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _add(self, path: str, mask: int) -> int:
        """Return the number of a new watch, -1 where there is none."""
        return int(_libc().inotify_add_watch(self._fd, os.fsencode(path), mask))

    def _unread(self) -> Iterator[bytes]:
        """Yield blocks of notices until none is left."""
        while self._fd >= 0:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            yield data


class DirectoryNotices(_Notices):
    """Report which names have changed in `directory`, a descriptor that the caller closes.

    Example:
        >>> directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        >>> notices = DirectoryNotices(directory)
        >>> notices.names() in (set(), None)
        True
        >>> notices.close()
        >>> os.close(directory)
    """

    def __init__(self, directory: int) -> None:
        super().__init__()
        if self.are_there and self._add(f"/proc/self/fd/{directory}", _MASK) < 0:
            self.close()

    @property
    def are_there(self) -> bool:
        """Whether the kernel reports anything."""
        return self._fd >= 0

    def names(self) -> set[str] | None:
        """Return the names that have changed; None when all of them may have."""
        found: set[str] = set()
        is_complete = self.are_there
        for data in self._unread():
            at = 0
            while at < len(data):
                _, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                name = data[at : at + length].rstrip(b"\0")
                at += length
                found.add(os.fsdecode(name))
                is_complete = is_complete and not mask & (_IN_Q_OVERFLOW | _IN_IGNORED)
        return found if is_complete else None


class FileNotices(_Notices):
    """Report that one of some files has grown; which one, it does not say.

    Example:
        >>> notices = FileNotices()
        >>> is_reported = notices.watch("/dev/null")  # if not, look from time to time
        >>> notices.close()
    """

    def __init__(self) -> None:
        super().__init__()
        self._watches: set[int] = set()

    def watch(self, path: str) -> bool:
        """Watch the file at `path`, too; return whether the kernel will report that it grows."""
        watch = self._add(path, _IN_MODIFY)
        if watch >= 0:
            self._watches.add(watch)
        return watch >= 0

    def unwatch_all(self) -> None:
        """Watch none of the files any more."""
        for watch in self._watches:
            _libc().inotify_rm_watch(self._fd, watch)
        self._watches.clear()

    def clear(self) -> None:
        """Make the descriptor unreadable until a file grows again."""
        for _ in self._unread():
            pass


def _libc() -> Any:
    return ctypes.CDLL(None)
