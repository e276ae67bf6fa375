# SPDX-License-Identifier: Apache-2.0
"""Notices of the kernel (inotify) about the entries of a directory, or about files that grow.

Where the kernel gives none (`NVRX_FORCE_NO_INOTIFY=1`, some network file systems), the caller looks
itself from time to time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct

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


class DirectoryNotices:
    """Report which names of a directory have changed.

    Args:
        directory: Descriptor of the directory; the caller keeps and closes it.

    Example:
        >>> directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        >>> notices = DirectoryNotices(directory)
        >>> notices.names() in (set(), None)
        True
        >>> notices.close()
        >>> os.close(directory)
    """

    def __init__(self, directory: int) -> None:
        self._fd = _open()
        if self._fd >= 0 and _add(self._fd, f"/proc/self/fd/{directory}", _MASK) < 0:
            self.close()

    @property
    def are_there(self) -> bool:
        """Whether the kernel reports anything."""
        return self._fd >= 0

    def fileno(self) -> int:
        """Return a descriptor that is readable when `names` has something to return; -1: none."""
        return self._fd

    def names(self) -> set[str] | None:
        """Return the names that have changed; None when all of them may have."""
        found: set[str] = set()
        is_complete = self.are_there
        while self.are_there:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                break
            at = 0
            while at < len(data):
                _, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                name = data[at : at + length].rstrip(b"\0")
                at += length
                found.add(os.fsdecode(name))
                is_complete = is_complete and not mask & (_IN_Q_OVERFLOW | _IN_IGNORED)
        return found if is_complete else None

    def close(self) -> None:
        """End the notices; harmless when repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class FileNotices:
    """Report that one of some files has grown; which one, it does not say.

    Example:
        >>> notices = FileNotices()
        >>> is_reported = notices.watch("/dev/null")  # if not, look from time to time
        >>> notices.close()
    """

    def __init__(self) -> None:
        self._fd = _open()
        self._watches: set[int] = set()

    def fileno(self) -> int:
        """Return a descriptor that is readable when a file has grown; -1: there is none."""
        return self._fd

    def watch(self, path: str) -> bool:
        """Watch a file, too.

        Args:
            path: The file.

        Returns:
            Whether the kernel reports that it grows; False after `close` as well.
        """
        watch = _add(self._fd, path, _IN_MODIFY) if self._fd >= 0 else -1
        if watch >= 0:
            self._watches.add(watch)
        return watch >= 0

    def unwatch_all(self) -> None:
        """Watch none of the files any more."""
        for watch in self._watches:
            ctypes.CDLL(None).inotify_rm_watch(self._fd, watch)
        self._watches.clear()

    def clear(self) -> None:
        """Make the descriptor unreadable until a file grows again."""
        if self._fd >= 0:
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.read(self._fd, _READ_BYTES)

    def close(self) -> None:
        """End the notices; harmless when repeated."""
        fd, self._fd = self._fd, -1
        self._watches.clear()
        if fd >= 0:
            os.close(fd)


def _open() -> int:
    """Return a new inotify descriptor, -1 where there is none."""
    if os.environ.get("NVRX_FORCE_NO_INOTIFY") == "1":
        return -1
    try:
        return int(ctypes.CDLL(None).inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    except AttributeError:
        return -1


def _add(fd: int, path: str, mask: int) -> int:
    return int(ctypes.CDLL(None).inotify_add_watch(fd, os.fsencode(path), mask))
