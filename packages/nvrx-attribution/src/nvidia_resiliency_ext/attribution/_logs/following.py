# SPDX-License-Identifier: Apache-2.0
"""Read a log while it grows: truncated, rotated or not yet there; it judges nothing."""

from __future__ import annotations

import os
import select
import stat
import time
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.attribution._core.errors import UnreadableInputError
from nvidia_resiliency_ext.shared_utils.directory_notices import DirectoryNotices

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LogFollower"]

_CHUNK_BYTES = 1 << 20
_LOOK_S = 0.5  # where the kernel does not report all growth
# File systems whose files grow by writes of this machine alone.
_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs"})


class LogFollower:
    """Yield what is appended to a log, from its beginning.

    Args:
        path: The log; it may come later, its directory must exist.
        settle_s: Seconds without growth after which the reader is told so.

    Raises:
        UnreadableInputError: The directory cannot be opened; while reading, that the log is there
            and cannot be read.
    """

    def __init__(self, path: str, settle_s: float = 0.2) -> None:
        self._path = os.path.abspath(path)
        self._name = os.path.basename(self._path)
        self._settle_s = settle_s
        self._file: int | None = None
        self._offset = 0
        parent = os.path.dirname(self._path)
        try:
            self._directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UnreadableInputError(parent, error.strerror or str(error)) from None
        self._notices = DirectoryNotices(self._directory)
        self._is_reported = False

    def chunks(self, quiet_s: float | None = None) -> Iterator[bytes]:
        """Yield data as it comes, and empty bytes once when none has come for `settle_s`.

        Args:
            quiet_s: End when nothing has come for so long; None: never.
        """
        last_growth = time.monotonic()
        is_settled = False
        while True:
            data = self._read()
            now = time.monotonic()
            if data:
                last_growth, is_settled = now, False
                yield data
                continue
            if not is_settled and now - last_growth >= self._settle_s:
                is_settled = True
                yield b""
            if quiet_s is not None and now - last_growth >= quiet_s:
                return
            limits = [] if is_settled else [last_growth + self._settle_s - now]
            if quiet_s is not None:
                limits.append(last_growth + quiet_s - now)
            self._wait(min(limits) if limits else None)

    def close(self) -> None:
        """Close log and directory; harmless when repeated."""
        self._notices.close()
        for descriptor in (self._file, self._directory):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._file, self._directory = None, -1

    def __enter__(self) -> LogFollower:  # noqa: PYI034 - Self came with Python 3.11
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _read(self) -> bytes:
        if self._file is None and not self._open():
            return b""
        assert self._file is not None
        try:
            data = os.read(self._file, _CHUNK_BYTES)
        except OSError as error:
            raise UnreadableInputError(self._path, error.strerror or str(error)) from None
        if data:
            self._offset += len(data)
            return data
        if os.fstat(self._file).st_size < self._offset:
            # Truncated: what stands there now is new.
            os.lseek(self._file, 0, os.SEEK_SET)
            self._offset = 0
        elif self._is_replaced():
            os.close(self._file)
            self._file = None
        else:
            return b""
        return self._read()

    def _open(self) -> bool:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._file = os.open(self._name, flags, dir_fd=self._directory)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UnreadableInputError(self._path, error.strerror or str(error)) from None
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise UnreadableInputError(self._path, "not a regular file")
        self._offset = 0
        # Of a file that is reached through a link the directory is told nothing.
        real = os.readlink(f"/proc/self/fd/{self._file}")
        here = os.readlink(f"/proc/self/fd/{self._directory}")
        self._is_reported = os.path.dirname(real) == here and _is_local(self._file)
        return True

    def _is_replaced(self) -> bool:
        assert self._file is not None
        try:
            now = os.stat(self._name, dir_fd=self._directory)
        except OSError:
            return False  # moved away; the next file has not come
        ours = os.fstat(self._file)
        return (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino)

    def _wait(self, seconds: float | None) -> None:
        is_told = self._notices.are_there and (self._file is None or self._is_reported)
        if not is_told:
            seconds = _LOOK_S if seconds is None else min(_LOOK_S, seconds)
        poll = select.poll()
        if self._notices.are_there:
            poll.register(self._notices.fileno(), select.POLLIN)
        poll.poll(None if seconds is None else max(0.0, seconds) * 1000)
        if self._notices.are_there:
            self._notices.names()


def _is_local(descriptor: int) -> bool:
    """Tell whether only this machine writes to the file system of a descriptor."""
    device = os.fstat(descriptor).st_dev
    mounted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split()[2] == mounted:
                return after.split()[0] in _LOCAL
    return False
