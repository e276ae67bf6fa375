# SPDX-License-Identifier: Apache-2.0
"""Owns what a record is among bytes of a log: where it begins, its time, its place in a merge.

All of it is pure, and depends on the bytes alone: what was written before a crash can be made
again afterwards, byte for byte.
"""

from __future__ import annotations

import re
import time
from calendar import timegm
from functools import lru_cache
from heapq import merge
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils._logging.message import LINE_HEAD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CONTINUED", "last_record_start", "last_time_ms", "render", "until"]

CONTINUED = b"\t"
_JSON_HEAD = r'\{"ts":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"'
# Groups cost time in a pattern that is tried at every line.
_HEAD = (re.sub(r"\(\?P<\w+>", "(?:", LINE_HEAD) + "|" + _JSON_HEAD).encode()
_START = re.compile(_HEAD)
_NEXT_START = re.compile(rb"\n(?=" + _HEAD + rb")")
_OTHER_LINE = re.compile(rb"\n(?!" + _HEAD + rb")")
_TIME = re.compile(rb'(?: *(?:\d+|\?): |\{"ts":")?(?P<time>.{23})(?P<utc>Z?)')
_SECOND_CHARS = 19
# A record that claims to be later than this is from a wrong clock and is not waited for.
_CLOCK_ERROR_MS = 60_000

_Timed = tuple[int, bytes]


def render(parts: Sequence[bytes], *, is_ordered: bool) -> bytes:
    """Return the bytes that stand for these parts in the merged file.

    Blank lines go, a line that begins no record is marked with a tab, bytes that are no UTF-8
    are replaced.

    Args:
        parts: Bytes of one file each, in lines; a missing line break at the end is added.
        is_ordered: Whether records of different parts are merged by their times. Those of one
            part keep their order.
    """
    whole = [part if part.endswith(b"\n") else part + b"\n" for part in parts if part]
    if is_ordered and len(whole) > 1:
        timed = merge(*map(_timed_records, whole), key=_time_of)
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
    """Yield time, start and end of each record; the time is the latest so far in these bytes.

    So a file keeps its order. Lines before the first record are taken for one without a time.
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


def _time_of(timed: _Timed) -> int:
    return timed[0]


def _milliseconds(data: bytes, start: int) -> int:
    match = _TIME.match(data, start)
    if match is None:
        return 0
    text = match["time"]
    return _seconds(text[:_SECOND_CHARS], bool(match["utc"])) * 1000 + int(text[-3:])


@lru_cache(maxsize=4096)
def _seconds(text: bytes, is_utc: bool) -> int:
    """Return a time to the second as seconds since the epoch, 0 where there is no such time."""
    numbers = [int(number) for number in re.findall(rb"\d+", text)]
    try:
        if is_utc:
            return timegm((*numbers, 0, 0, 0))
        return int(time.mktime((*numbers, 0, 0, -1)))  # type: ignore[arg-type]
    except (OverflowError, ValueError):
        return 0


def _decodable(data: bytes) -> bytes:
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace").encode()
    return data
