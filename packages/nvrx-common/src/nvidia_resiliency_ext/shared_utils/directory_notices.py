# SPDX-License-Identifier: Apache-2.0
"""Notices of the kernel (inotify) about the entries of a directory.

Where the kernel gives none (`NVRX_FORCE_NO_INOTIFY=1`, some network file systems), the caller looks
at the directory itself from time to time.
"""

from __future__ import annotations

import ctypes
import os
import struct

__all__ = ["DirectoryNotices"]

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
        self._fd = -1
        if os.environ.get("NVRX_FORCE_NO_INOTIFY") == "1":
            return
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except AttributeError:
            return
        path = f"/proc/self/fd/{directory}".encode()
        if self._fd >= 0 and libc.inotify_add_watch(self._fd, path, _MASK) < 0:
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
