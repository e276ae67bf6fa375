# SPDX-License-Identifier: Apache-2.0
"""Read a log while it grows: truncated, rotated or not yet there; it evaluates nothing."""

from __future__ import annotations

import contextlib
import os
import select
import stat
import time
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.attribution._core.errors import UnreadableInputError
from nvidia_resiliency_ext.shared_utils.directory_notices import DirectoryNotices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["GrowingLog", "LogFollower"]

_CHUNK_BYTES = 1 << 20
_TAIL_BYTES = 4096  # by which a log that was cut and has grown again is told
_LOOK_S = 0.5  # where the kernel does not report all growth
# File systems whose files grow by writes of this machine alone.
_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs"})


class GrowingLog:
    """Read the bytes appended to a log, also after it was truncated or replaced; never wait.

    Args:
        opener: Return a descriptor of the log; raise `FileNotFoundError` while there is none.
        find: Return the status of the file that has the log's name now.

    Attributes:
        descriptor: The open log; -1: none.
        offset: How far it was read.
        starts: How often a file was begun at its first byte.
    """

    def __init__(self, opener: Callable[[], int], find: Callable[[], os.stat_result]) -> None:
        self._opener = opener
        self._find = find
        self._tail = b""
        self._is_partial = False
        self._needs_newline = False
        self.descriptor = -1
        self.offset = 0
        self.starts = 0

    def open(self) -> bool:
        """Open the log unless it is open; return False while there is none.

        Raises:
            OSError: It cannot be opened, or what `opener` raises.
        """
        if self.descriptor < 0:
            try:
                self.descriptor = self._opener()
            except FileNotFoundError:
                return False
            self.start_over()
        return True

    def move(self, offset: int) -> None:
        """Read on from another place of the open log."""
        self.offset = os.lseek(self.descriptor, offset, os.SEEK_SET)
        start = max(0, offset - _TAIL_BYTES)
        self._tail = os.pread(self.descriptor, offset - start, start)

    def read(self) -> bytes:
        """Return new bytes, at most 1 MiB; empty: there are none now.

        Raises:
            OSError: It cannot be read, or what `opener` raises.
        """
        if not self.open():
            return b""
        if self._is_cut():
            self.start_over()
        data = self._take()
        if data or not self._is_replaced():
            return data
        data = self._take()  # written between the last look and the replacement
        if data:
            return data
        try:
            descriptor = self._opener()
        except FileNotFoundError:
            return b""
        self.close()
        self.descriptor = descriptor
        self.start_over()
        return self._take()

    def start_over(self) -> None:
        """Read the open log from its beginning: its content is new."""
        self.starts += 1
        self._needs_newline = self._is_partial
        self.move(0)
        # A writer that does not append leaves a hole of its old size before what it writes.
        with contextlib.suppress(OSError):
            self.offset = os.lseek(self.descriptor, 0, os.SEEK_DATA)

    def close(self) -> None:
        """Close the log; harmless when repeated."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _take(self) -> bytes:
        data = os.read(self.descriptor, _CHUNK_BYTES)
        if not data:
            return data
        self.offset += len(data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        self._is_partial = not data.endswith(b"\n")
        # The rest of a line that was cut off never comes.
        before = b"\n" if self._needs_newline else b""
        self._needs_newline = False
        return before + data

    def _is_cut(self) -> bool:
        """Return whether the bytes read last are no longer in the log."""
        if os.fstat(self.descriptor).st_size < self.offset:
            return True
        if b"\0" in self._tail:
            return False  # a hole that another machine's write may fill yet
        size = len(self._tail)
        return os.pread(self.descriptor, size, self.offset - size) != self._tail

    def _is_replaced(self) -> bool:
        """Tell whether another file has the name and was written to; a writer may keep the old."""
        try:
            now = self._find()
        except OSError:
            return False  # moved away; the next file has not come
        ours = os.fstat(self.descriptor)
        return now.st_size > 0 and (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino)


class LogFollower:
    """Yield the bytes appended to a log, from its beginning.

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
        parent = os.path.dirname(self._path)
        try:
            self._directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UnreadableInputError(parent, error.strerror or str(error)) from None
        self._log = GrowingLog(self._open, self._find)
        self._notices = DirectoryNotices(self._directory)
        self._is_on_local = False

    def chunks(self, quiet_s: float | None = None) -> Iterator[bytes]:
        """Yield data as it comes, and empty bytes once when none has come for `settle_s`.

        Args:
            quiet_s: End when nothing has come for so long; None: never.
        """
        last_growth = time.monotonic()
        is_settled = False
        while True:
            try:
                data = self._log.read()
            except OSError as error:
                raise UnreadableInputError(self._path, error.strerror or str(error)) from None
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
        self._log.close()
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def __enter__(self) -> LogFollower:  # noqa: PYI034 - Self came with Python 3.11
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the log."""
        self.close()

    def _open(self) -> int:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(self._name, flags, dir_fd=self._directory)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise UnreadableInputError(self._path, "not a regular file")
        self._is_on_local = _is_local(file)
        return file

    def _is_reported(self) -> bool:
        """Return whether the directory is told of growth: not of a file moved away or linked to."""
        if not self._is_on_local:
            return False
        real = os.readlink(f"/proc/self/fd/{self._log.descriptor}")
        return os.path.dirname(real) == os.readlink(f"/proc/self/fd/{self._directory}")

    def _find(self) -> os.stat_result:
        return os.stat(self._name, dir_fd=self._directory)

    def _wait(self, seconds: float | None) -> None:
        is_told = self._notices.are_there and (self._log.descriptor < 0 or self._is_reported())
        if not is_told:
            seconds = _LOOK_S if seconds is None else min(_LOOK_S, seconds)
        poll = select.poll()
        if self._notices.are_there:
            poll.register(self._notices.fileno(), select.POLLIN)
        poll.poll(None if seconds is None else max(0.0, seconds) * 1000)
        if self._notices.are_there:
            self._notices.names()


def _is_local(descriptor: int) -> bool:
    """Return whether only this machine writes to the file system of a descriptor."""
    device = os.fstat(descriptor).st_dev
    mounted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split()[2] == mounted:
                return after.split()[0] in _LOCAL
    return False
