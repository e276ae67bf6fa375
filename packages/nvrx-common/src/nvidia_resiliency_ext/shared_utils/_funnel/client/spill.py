# SPDX-License-Identifier: Apache-2.0
"""The queue in files: a file for each chunk, whose name says what must be in it.

So names alone tell the order and the sizes, and what a crash or a disk has damaged is known.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import zlib
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

from .limits import Chunk, Gap
from .spill_place import (
    Identity,
    make_place,
    ownerless,
    remove_place,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .limits import MemoryBudget

    Report = Callable[[int, str], None]


SUFFIX = ".lines"
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{1,8})-([0-9a-f]{1,8})-([0-9a-f]{8})\.lines")
_GENERATION = 1 << 32  # numbers for the chunks of one process


class _File(NamedTuple):
    """A chunk in a file: its number, lines, bytes and checksum, as the file's name says."""

    seq: int
    lines: int
    size: int
    checksum: int

    @property
    def name(self) -> str:
        return f"{self.seq:016x}-{self.lines:x}-{self.size:x}-{self.checksum:08x}{SUFFIX}"


class Spill:
    """A queue of chunks in files; the owner holds a lock around every call.

    Nothing here raises: files that cannot be written count as full, files that cannot be read as
    empty, and one line says so.

    Args:
        spill_dir: Where the directory is made when it is first needed.
    """

    def __init__(
        self, spill_dir: str, identity: Identity, budget: MemoryBudget, report: Report
    ) -> None:
        self.identity = identity
        self._spill_dir = spill_dir
        self._budget = budget
        self._report = report
        self._read: deque[_File] = deque()  # and not confirmed
        self._unread: deque[_File] = deque()
        self._path = ""
        self._owner_fd = -1
        self._has_failed = False

    @property
    def path(self) -> str:
        """The directory, empty as long as nothing has been spilled."""
        return self._path

    @property
    def unread(self) -> Gap:
        """Lines and bytes that have still to be read."""
        lines = sum(file.lines for file in self._unread)
        return Gap(0, lines, sum(file.size for file in self._unread))

    def next_generation(self) -> int:
        """Return a number for a chunk that no process can have used for this stream so far.

        A killed process may have sent more than its files tell, from memory.
        """
        highest = max((file.seq for file in (*self._read, *self._unread)), default=0)
        return (highest // _GENERATION + 1) * _GENERATION

    def append(self, chunk: Chunk) -> bool:
        """Add a chunk behind the others."""
        size = len(chunk.data)
        if not self._budget.take_spill(size):
            return False
        file = self._write(chunk)
        if file is None:
            self._budget.add(spill=-size)
            return False
        self._unread.append(file)
        return True

    def put_first(self, chunks: list[Chunk]) -> bool:
        """Add chunks that were read before all others, whatever the limit, unless they are here."""
        present = {file.seq for file in self._read}
        for chunk in chunks:
            if chunk.seq in present:
                continue
            file = self._write(chunk)
            if file is None:
                return False
            self._read.append(file)
            self._budget.add(spill=file.size)
        return True

    def has_unread(self) -> bool:
        """Say whether `read` may return something."""
        return bool(self._unread)

    def read(self) -> Chunk | None:
        """Return the oldest chunk not read so far; None when its file is damaged."""
        if not self._unread:
            return None
        file = self._unread[0]
        try:
            data = read_regular_file(os.path.join(self._path, file.name), file.size + 1)
        except OSError:
            data = b""
        if len(data) != file.size or zlib.crc32(data) != file.checksum:
            self._report(
                logging.ERROR,
                f"{self._path}/{file.name} is damaged:"
                f" {file.lines} lines ({file.size} bytes) in it are lost",
            )
            return None
        self._read.append(self._unread.popleft())
        return Chunk(file.seq, data, file.lines)

    def drop_oldest(self) -> Gap | None:
        """Give up the oldest chunk that was not read; None without one."""
        if not self._unread:
            return None
        file = self._unread.popleft()
        self._remove(file)
        return Gap(file.seq, file.lines, file.size)

    def confirmed(self, seq: int) -> None:
        """Remove the files of chunks that have been read and confirmed."""
        while self._read and self._read[0].seq <= seq:
            self._remove(self._read.popleft())
        if not self._read and not self._unread:
            self._remove_directory()

    def forget_descriptors(self) -> None:
        """Close the descriptor that a forked child has inherited; the files are its parent's."""
        self._read.clear()
        self._unread.clear()
        if self._owner_fd >= 0:
            os.close(self._owner_fd)
        self._owner_fd = -1

    def close(self, *, keeps_files: bool) -> None:
        """Give the space back, and remove the files unless a later process shall send them."""
        self._budget.add(spill=-sum(file.size for file in (*self._read, *self._unread)))
        if not keeps_files:
            self._remove_directory()
        self.forget_descriptors()

    def take_over(self, path: str, owner_fd: int) -> None:
        """Begin with the files that another process left in a directory."""
        self._path, self._owner_fd = path, owner_fd
        for name in sorted(os.listdir(path)):
            match = _NAME.fullmatch(name)
            if match is not None:
                file = _File(*(int(number, 16) for number in match.groups()))
                self._unread.append(file)
                self._budget.add(spill=file.size)
            elif name.endswith(SUFFIX):
                line = f"{path}/{name} holds no log lines and is left alone"
                self._report(logging.WARNING, line)

    def _write(self, chunk: Chunk) -> _File | None:
        """Put a chunk into a file; None when that fails."""
        file = _File(chunk.seq, chunk.lines, len(chunk.data), zlib.crc32(chunk.data))
        try:
            if not self._path:
                self._path, self._owner_fd = make_place(self._spill_dir, self.identity)
                line = f"log lines for {self.identity.path} wait in {self._path} for the log server"
                self._report(logging.INFO, line)
            _write_new(os.path.join(self._path, file.name), chunk.data)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                where = self._path or self._spill_dir
                self._report(logging.WARNING, f"log lines cannot wait in {where}: {error}")
            return None
        if self._has_failed:
            self._has_failed = False
            self._report(logging.INFO, f"log lines can wait in {self._path} again")
        return file

    def _remove(self, file: _File) -> None:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._path, file.name))
        self._budget.add(spill=-file.size)

    def _remove_directory(self) -> None:
        if self._owner_fd >= 0:
            path, owner_fd = self._path, self._owner_fd
            self._path, self._owner_fd = "", -1
            remove_place(path, owner_fd)


def _write_new(path: str, data: bytes) -> None:
    """Make a file with this content, or none."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, "no space left", path)  # noqa: TRY301 - as of `write`
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def adopt(spill_dir: str, identity: Identity, budget: MemoryBudget, report: Report) -> Spill | None:
    """Take over what an earlier process of the same name left for this target.

    Of several the oldest is taken; the others wait for later processes.
    """
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
