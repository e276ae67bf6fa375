# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a node's processes: what is a record, and how much is taken."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter
from zlib import crc32

from .handler import LINE_HEAD, seconds_of
from .journal import FilePosition, Position

CONTINUED = b"\t"
_JSON_HEAD = r'\{"ts":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"'
# Groups cost time in a pattern that is tried at every line.
_HEAD = (re.sub(r"\(\?P<\w+>", "(?:", LINE_HEAD) + "|" + _JSON_HEAD).encode()
_START = re.compile(_HEAD)
_NEXT_START = re.compile(rb"\n(?=" + _HEAD + rb")")
_OTHER_LINE = re.compile(rb"\n(?!" + _HEAD + rb")")
_TIME = re.compile(rb'(?: *(?:\d+|\?): |\{"ts":")?(?P<time>.{23})(?P<utc>Z?)')
# A record that claims to be later than this is from a wrong clock and is not waited for.
_CLOCK_ERROR_MS = 60_000

_Timed = tuple[int, bytes]


def render(parts: Sequence[bytes], *, is_ordered: bool) -> bytes:
    """Return the bytes of these parts in the merged file, merged by time if `is_ordered`.

    Blank lines go, a line that begins no record is marked with a tab, bytes that are no UTF-8 are
    replaced. Records of one part keep their order.
    """
    whole = [part if part.endswith(b"\n") else part + b"\n" for part in parts if part]
    if is_ordered and len(whole) > 1:
        timed = merge(*map(_timed_records, whole), key=itemgetter(0))
        return _decodable(b"".join(data for _, data in timed))
    return _decodable(b"".join(map(_clean, whole)))


def last_record_start(data: bytes) -> int:
    """Return where the last record begins; 0 when no later line begins one."""
    end = len(data)
    while end > 0:
        start = data.rfind(b"\n", 0, end - 1) + 1
        if _START.match(data, start):
            return start
        end = start
    return 0


def until(data: bytes, limit_ms: int) -> int:
    """Return the length of the records before the first one later than ``limit_ms``."""
    for at_ms, start, _ in _timed(data):
        if limit_ms < at_ms < limit_ms + _CLOCK_ERROR_MS:
            return start
    return len(data)


def last_time_ms(data: bytes) -> int:
    """Return the latest time of any record, 0 without any."""
    return max((at_ms for at_ms, _, _ in _timed(data)), default=0)


def _clean(data: bytes) -> bytes:
    if _START.match(data) and _OTHER_LINE.search(data, 0, len(data) - 1) is None:
        return data
    return b"".join(_clean_line(line) for line in data.split(b"\n"))


def _clean_line(line: bytes) -> bytes:
    if _START.match(line):
        return line + b"\n"
    if not line or line.isspace():
        return b""
    return line + b"\n" if line.startswith(CONTINUED) else CONTINUED + line + b"\n"


def _timed(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield time, start and end of each record; the time is the latest so far, so order is kept.

    Lines before the first record are taken for one without a time.
    """
    latest_ms = start = 0
    if not data:
        return
    if _START.match(data):
        latest_ms = _milliseconds(data, 0)
    for match in _NEXT_START.finditer(data):
        end = match.end()
        yield latest_ms, start, end
        latest_ms, start = max(latest_ms, _milliseconds(data, end)), end
    yield latest_ms, start, len(data)


def _timed_records(data: bytes) -> Iterator[_Timed]:
    for at_ms, start, end in _timed(data):
        record = data[start:end]
        is_one_line = record.find(b"\n") == end - start - 1
        yield at_ms, record if start > 0 and is_one_line else _clean(record)


def _milliseconds(data: bytes, start: int) -> int:
    match = _TIME.match(data, start)
    if match is None:
        return 0
    text = match["time"]
    second = seconds_of(text[:-4], is_utc=True) if match["utc"] else seconds_of(text[:-4])
    return (second or 0) * 1000 + int(text[-3:])


def _decodable(data: bytes) -> bytes:
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace").encode()
    return data


CHUNK_BYTES = 1 << 20
SETTLE_MS = 250
_PAGE_BYTES = 4096
_LONGEST_CHAR = 4
_CONTINUING = 0x80
_FIRST_OF_MANY = 0xC0


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes read of one file."""

    data: bytes  # at most ``CHUNK_BYTES``
    end: int  # offset of the end of the data in the file
    has_more: bool = False
    is_settled: bool = False
    is_over: bool = False  # nobody will write to it any more

    @property
    def may_be_torn(self) -> bool:
        """Whether the end of a last line without one may be about to come."""
        has_end = not self.data or self.data.endswith(b"\n")
        return not has_end and not (self.is_over and self.is_settled)


def take(reads: Sequence[Read], *, now_ms: int | None) -> list[int]:
    """Return how many bytes of each file are taken; `now_ms` is set to order records by time."""
    lengths = [_whole(read) for read in reads]
    if now_ms is None:
        return lengths
    parts = [read.data[:length] for read, length in zip(reads, lengths, strict=True)]
    limit_ms = now_ms - SETTLE_MS
    # What is still unread of a long file is later than what was read of it.
    known = [last_time_ms(part) for part, read in zip(parts, reads, strict=True) if read.has_more]
    limit_ms = min([limit_ms, *(each for each in known if each)])
    return [until(part, limit_ms) for part in parts]


def _whole(read: Read) -> int:
    """Return the length of the whole records at the beginning of a read."""
    data = read.data
    lines = data.rfind(b"\n") + 1
    if read.has_more:
        return _of_many(data, lines)
    if read.is_over and not read.may_be_torn:
        return len(data)
    tail = data[lines : lines + 1]
    is_torn = tail == CONTINUED or (not tail and read.end % _PAGE_BYTES == 0)
    if is_torn and not read.is_settled:
        return last_record_start(data[:lines])
    return lines


def _of_many(data: bytes, lines: int) -> int:
    """Decide where the file goes on: records that are too long are taken in pieces."""
    if lines:
        return last_record_start(data[:lines]) or lines
    # Not in the middle of a character: its first byte is the last that does not continue one.
    for back in range(1, _LONGEST_CHAR + 1):
        first = data[-back]
        if first >= _FIRST_OF_MANY:
            return len(data) - back
        if first < _CONTINUING:
            break
    return len(data)


_PREFIX = "rank_"
_NAME = re.compile(r"(?P<stem>rank_.*\.msg\.)(?P<time>\d+)", re.DOTALL)
_HEAD_BYTES = 256
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Source:
    """One file: the position of reading, and its size at the last look."""

    def __init__(self, name: str, inode: int) -> None:
        self.inode = inode
        self.offset = 0
        self.after = 0
        self.size = 0
        self.seen_bytes = 0
        self.head = (0, 0)
        self.is_hungry = True
        self.call(name)

    def call(self, name: str) -> None:
        self.name = name
        match = _NAME.fullmatch(name)
        self.stem = match["stem"] if match else name
        self.time = int(match["time"]) if match else 0

    def position(self) -> FilePosition:
        """Return the file's position, from which reading goes on after a crash."""
        return FilePosition(self.inode, self.offset, self.after, *self.head)


class Sources:
    """The files of one directory, whose descriptor stays open."""

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self._by_inode: dict[int, Source] = {}
        self._newest: dict[str, int] = {}
        self._turns = 0

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
        """Look at the whole directory: for new names, and for files that have grown or gone."""
        found = {self._look_at(name) for name in os.listdir(self._directory)}
        for source in self:
            if source.inode not in found:
                self.forget(source)

    def look_at(self, names: Iterable[str]) -> None:
        """Look at these names of the directory, at which something has happened."""
        for name in names:
            source = self._by_inode.get(self._look_at(name))
            if source is not None:
                source.is_hungry = True

    def read(self, source: Source, limit: int | None = None) -> Read:
        with self._opened(source) as fd:
            size = os.fstat(fd).st_size
            if size < source.offset:
                source.offset = source.after = 0  # somebody cut it
                source.head = (0, 0)
            is_settled = limit is not None or size == source.size
            source.size = size
            end = size if limit is None else min(limit, size)
            data = os.pread(fd, max(0, min(CHUNK_BYTES, end - source.offset)), source.offset)
        if source.offset == 0 and data:
            head = data[:_HEAD_BYTES]
            source.head = (len(head), crc32(head))
        read_to = source.offset + len(data)
        has_more = len(data) == CHUNK_BYTES and end > read_to
        return Read(data, read_to, has_more, is_settled, self.is_over(source))

    def reread(self, source: Source) -> bytes:
        """Read again the part of a file that the last batch holds."""
        with self._opened(source) as fd:
            return os.pread(fd, source.after - source.offset, source.offset)

    def is_over(self, source: Source) -> bool:
        """Return whether the file's writer has gone on to another file."""
        return source.time < self._newest.get(source.stem, 0)

    def remove(self, source: Source) -> None:
        """Delete a file that nobody needs any more, and forget it."""
        try:
            found = os.stat(source.name, dir_fd=self._directory, follow_symlinks=False)
            if found.st_ino == source.inode:
                if found.st_size != source.offset:
                    source.is_hungry = True  # it has grown after all
                    return
                os.unlink(source.name, dir_fd=self._directory)
        except FileNotFoundError:
            pass
        self.forget(source)

    def forget(self, source: Source) -> None:
        self._by_inode.pop(source.inode, None)

    def _look_at(self, name: str) -> int:
        """Note a log's size, and the log itself if it is new; return its inode, 0 for no log."""
        if not name.startswith(_PREFIX):
            return 0
        try:
            status = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return 0
        if not stat.S_ISREG(status.st_mode):
            return 0
        source = self._by_inode.get(status.st_ino)
        if source is not None and source.name != name:
            source.call(name)
            if not self._is_same(source, source.position()):
                source = None  # the number was given to another file
        if source is None:
            source = self._by_inode[status.st_ino] = Source(name, status.st_ino)
        if source.time > self._newest.get(source.stem, 0):
            self._newest[source.stem] = source.time
            # What came before it has no writer any more.
            for other in self:
                if other.stem == source.stem:
                    other.is_hungry = True
        source.seen_bytes = status.st_size
        if status.st_size != source.size:
            source.is_hungry = True
        return source.inode

    def _is_same(self, source: Source, before: FilePosition) -> bool:
        try:
            with self._opened(source) as fd:
                return before.is_of(fd)
        except OSError:
            return False

    @contextlib.contextmanager
    def _opened(self, source: Source) -> Iterator[int]:
        fd = os.open(source.name, _FLAGS, dir_fd=self._directory)
        try:
            if os.fstat(fd).st_ino != source.inode:
                raise FileNotFoundError(f"{source.name} is another file now")
            yield fd
        finally:
            os.close(fd)
