# SPDX-License-Identifier: Apache-2.0
"""Owns the files that processes of a node log to, as the aggregator sees them; writes none.

A file is known by its inode and its first bytes, so renaming it changes nothing, and a new file
with an old inode number is read from its begin. A file stays open while it is being read, so what
a writer deletes is still read to its end.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING
from zlib import crc32

from nvidia_resiliency_ext.shared_utils._logging.position import FilePosition

from .take import CHUNK_BYTES, Read

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvidia_resiliency_ext.shared_utils._logging.position import Position

__all__ = ["Source", "Sources"]

_PREFIX = "rank_"
_NAME = re.compile(r"(?P<stem>rank_.*\.msg\.)(?P<time>\d+)", re.DOTALL)
_HEAD_BYTES = 256
_MOST_OPEN = 256
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Source:
    """One file: how far it is read, and what was seen of it last."""

    def __init__(self, name: str, inode: int) -> None:
        self.inode = inode
        self.offset = 0
        self.after = 0
        self.size = 0
        self.seen_bytes = 0
        self.head = (0, 0)
        self.is_hungry = True
        self.is_linked = True
        self.is_settled = False
        self.call(name)

    def call(self, name: str) -> None:
        """Take note of the file's name."""
        self.name = name
        match = _NAME.fullmatch(name)
        self.stem = match["stem"] if match else name
        self.time = int(match["time"]) if match else 0

    def position(self) -> FilePosition:
        """Return what is to be known of it after a crash."""
        return FilePosition(self.inode, self.offset, self.after, *self.head)


class Sources:
    """The files of one directory.

    Args:
        directory: Descriptor of the directory; it stays open.
    """

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self._by_inode: dict[int, Source] = {}
        self._by_name: dict[str, Source] = {}
        self._newest: dict[str, int] = {}
        self._turns = 0
        self._open: OrderedDict[int, int] = OrderedDict()

    def __iter__(self) -> Iterator[Source]:
        """Iterate over all that are known, in the order in which they were found."""
        return iter(tuple(self._by_inode.values()))

    def in_turn(self) -> list[Source]:
        """Return all, each writer's files from old to new; every time another writer is first."""
        ordered = sorted(self, key=lambda source: (source.stem, source.time, source.inode))
        self._turns += 1
        first = self._turns % len(ordered) if ordered else 0
        while 0 < first < len(ordered) and ordered[first].stem == ordered[first - 1].stem:
            first += 1
        return ordered[first:] + ordered[:first]

    def restore(self, position: Position) -> None:
        """Go on where an earlier aggregator was, with the files that are still the same."""
        self.look()
        known = {each.inode: each for each in position.files}
        for source in self:
            before = known.get(source.inode)
            if before is not None and self._is_same(source, before):
                source.offset, source.after = before.done, before.after
                source.head = (before.head_bytes, before.head_crc)
        # A batch is made again in the order in which it was made.
        order = {each.inode: number for number, each in enumerate(position.files)}
        ordered = sorted(self._by_inode.values(), key=lambda s: order.get(s.inode, len(order)))
        self._by_inode = {source.inode: source for source in ordered}

    def look(self) -> None:
        """Look at the whole directory: for new names, and for files that have grown."""
        found: set[int] = set()
        for name in os.listdir(self._directory):
            source = self._find(name) if name.startswith(_PREFIX) else None
            if source is not None:
                found.add(source.inode)
        for source in self:
            if source.inode not in found:
                source.is_linked = False
                source.is_hungry = True
                source.seen_bytes = sys.maxsize
                self._forget_name(source)

    def look_at(self, names: Iterable[str]) -> None:
        """Look at these names of the directory, at which something has happened."""
        for name in names:
            if not name.startswith(_PREFIX):
                continue
            source = self._by_name.get(name) or self._find(name)
            if source is not None:
                source.is_hungry = True

    def read(self, source: Source, limit: int | None = None) -> Read:
        """Read on in a file.

        Args:
            source: The file.
            limit: Where to stop: what comes behind that is no business of ours any more.

        Raises:
            OSError: It cannot be read.
        """
        fd = self._descriptor(source)
        status = os.fstat(fd)
        if status.st_size < source.offset:
            source.offset = source.after = 0  # somebody cut it
            source.head = (0, 0)
        is_settled = limit is not None or status.st_size == source.size
        source.size = status.st_size
        source.is_linked = status.st_nlink > 0
        end = source.size if limit is None else min(limit, source.size)
        data = os.pread(fd, max(0, min(CHUNK_BYTES, end - source.offset)), source.offset)
        if source.offset == 0 and data:
            head = data[:_HEAD_BYTES]
            source.head = (len(head), crc32(head))
        return Read(
            data=data,
            end=source.offset + len(data),
            has_more=len(data) == CHUNK_BYTES and end > source.offset + len(data),
            is_settled=is_settled,
            is_over=self.is_over(source),
        )

    def reread(self, source: Source) -> bytes:
        """Read again what a batch had of a file."""
        return os.pread(self._descriptor(source), source.after - source.offset, source.offset)

    def is_over(self, source: Source) -> bool:
        """Say whether its writer has gone on to another file."""
        return not source.is_linked or source.time < self._newest.get(source.stem, 0)

    def is_read(self, source: Source) -> bool:
        """Say whether everything that was seen of it is merged."""
        return source.offset >= source.size

    def remove(self, source: Source) -> None:
        """Delete a file that nobody needs any more, and forget it.

        Raises:
            OSError: It cannot be deleted.
        """
        if source.is_linked:
            try:
                found = os.stat(source.name, dir_fd=self._directory, follow_symlinks=False)
                if found.st_ino == source.inode and found.st_size == source.offset:
                    os.unlink(source.name, dir_fd=self._directory)
                elif found.st_ino == source.inode:
                    source.is_hungry = True  # it has grown after all
                    return
            except FileNotFoundError:
                pass
        self.forget(source)

    def forget(self, source: Source) -> None:
        """Forget a file that is gone."""
        self._by_inode.pop(source.inode, None)
        self._forget_name(source)
        fd = self._open.pop(source.inode, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _find(self, name: str) -> Source | None:
        """Return the file of a name if it is a regular one, and take note if it is new."""
        try:
            status = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        source = self._by_inode.get(status.st_ino)
        if source is None or not source.is_linked:
            source = self._add(name, status.st_ino)
        elif source.name != name:
            self._forget_name(source)
            source.call(name)
        source.seen_bytes = status.st_size
        if status.st_size != source.size:
            source.is_hungry = True
        self._by_name[name] = source
        return source

    def _add(self, name: str, inode: int) -> Source:
        replaced = self._by_inode.get(inode)
        if replaced is not None:
            self.forget(replaced)
        source = self._by_inode[inode] = Source(name, inode)
        if source.time > self._newest.get(source.stem, 0):
            self._newest[source.stem] = source.time
            # What came before it has no writer any more.
            for other in self._by_inode.values():
                if other.stem == source.stem:
                    other.is_hungry = True
        return source

    def _forget_name(self, source: Source) -> None:
        if self._by_name.get(source.name) is source:
            del self._by_name[source.name]

    def _is_same(self, source: Source, before: FilePosition) -> bool:
        try:
            return before.is_of(self._descriptor(source))
        except OSError:
            return False

    def _descriptor(self, source: Source) -> int:
        fd = self._open.get(source.inode)
        if fd is not None:
            self._open.move_to_end(source.inode)
            return fd
        fd = os.open(source.name, _FLAGS, dir_fd=self._directory)
        if os.fstat(fd).st_ino != source.inode:
            os.close(fd)
            raise FileNotFoundError(f"{source.name} is another file now")
        self._open[source.inode] = fd
        if len(self._open) > _MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return fd
