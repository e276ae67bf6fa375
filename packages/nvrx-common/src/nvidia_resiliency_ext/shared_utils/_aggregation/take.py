# SPDX-License-Identifier: Apache-2.0
"""Owns the decision how much of what was read is taken now, and what waits; reads nothing.

A line waits for its line break. The last record waits where more of it may be on its way: a reader
sees a write page by page. When records are ordered by time, those of the last moments wait for
what other processes are about to write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .records import CONTINUED, last_record_start, last_time_ms, until

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CHUNK_BYTES", "SETTLE_MS", "Read", "take"]

CHUNK_BYTES = 1 << 20
SETTLE_MS = 250
_PAGE_BYTES = 4096
_LONGEST_CHAR = 4
_CONTINUING = 0x80
_FIRST_OF_MANY = 0xC0


@dataclass(frozen=True, slots=True)
class Read:
    """What was read of one file.

    Attributes:
        data: At most ``CHUNK_BYTES``.
        end: Offset of the end of the data in the file.
        has_more: The file was longer than that.
        is_settled: Nothing came since the look before.
        is_over: Nobody will write to it any more.
    """

    data: bytes
    end: int
    has_more: bool = False
    is_settled: bool = False
    is_over: bool = False

    @property
    def may_be_torn(self) -> bool:
        """Whether the end of a last line without one may be about to come."""
        has_end = not self.data or self.data.endswith(b"\n")
        return not has_end and not (self.is_over and self.is_settled)


def take(reads: Sequence[Read], *, now_ms: int | None) -> list[int]:
    """Return for each file how many bytes are taken.

    Args:
        reads: One per file.
        now_ms: The time, when records are to be ordered by theirs and may wait; else None.
    """
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
    """Return the length of the whole records at the begin of what was read."""
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
