# SPDX-License-Identifier: Apache-2.0
"""What is taken of a log file and what becomes of it: decisions on bytes, without files."""

import json
import random
import time
from zlib import crc32

import pytest

from nvidia_resiliency_ext.shared_utils._logging.journal import (
    Batch,
    FilePosition,
    Position,
    decode,
    encode,
)
from nvidia_resiliency_ext.shared_utils._logging.reader import (
    CHUNK_BYTES,
    Read,
    last_record_start,
    render,
    take,
    until,
)

_POSITION = Position(
    output_inode=7,
    output_bytes=100,
    files=(FilePosition(11, 5, 9, 5, crc32(b"abcde")),),
    batch=Batch(4, 1234, is_ordered=True),
    boot_id="b",
    monotonic_s=3.5,
)


def _line(second: float, text: str, rank: str = "0") -> bytes:
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_700_000_000 + int(second)))
    millis = f"{round(second % 1 * 1000):03d}"
    return f"{whole},{millis} [INFO] [n1] [workload:{rank}(?) infra:?(?)] a.py:17 {text}\n".encode()


def _json(second: int, text: str) -> bytes:
    utc = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(1_700_000_000 + second))
    return f'{{"ts":"{utc}.000Z","level":"INFO","msg":"{text}"}}\n'.encode()


def test_lines_of_a_record_stay_with_it() -> None:
    """A line that begins no record is marked with a tab, once, and blank lines go."""
    data = _line(1, "a") + b"Traceback\n\n   \n\tFile x\n" + _line(2, "b", "?") + b"tail"
    expected = _line(1, "a") + b"\tTraceback\n\tFile x\n" + _line(2, "b", "?") + b"\ttail\n"
    assert render([data], is_ordered=False) == expected
    assert render([data, b""], is_ordered=True) == expected
    assert render([expected], is_ordered=False) == expected


def test_unknown_ranks_begin_a_record() -> None:
    """A record of a launcher that knows no rank is merged as a record of its own."""
    early, late = _line(1, "launcher", "?"), _line(2, "worker")
    assert render([late, early], is_ordered=True) == early + late


def test_merge_by_time() -> None:
    """Records come by their times with their lines; one writer's order is never changed."""
    first = _line(1, "a") + b"more\n" + _line(5, "c")
    second = _line(3, "b") + _line(2, "late") + _json(6, "d")
    expected = _line(1, "a") + b"\tmore\n" + _line(3, "b") + _line(2, "late") + _line(5, "c")
    assert render([first, second], is_ordered=True) == expected + _json(6, "d")
    assert render([first, second], is_ordered=False).startswith(_line(1, "a"))


def test_any_bytes_are_merged() -> None:
    """Bytes that are no text are replaced, and carriage returns do not end lines."""
    random_bytes = random.Random(3)
    for _ in range(200):
        parts = [
            bytes(random_bytes.choices(b"ab\n\r\t\x00\xff\xc3\xa9 2026-1{", k=40)) for _ in range(3)
        ]
        for is_ordered in (False, True):
            found = render(parts, is_ordered=is_ordered)
            found.decode()
            assert found == render([found], is_ordered=False)
    assert render([_line(1, "a\rb") + b"\xff\n"], is_ordered=True).decode().endswith("\t\ufffd\n")


def test_last_record() -> None:
    """The last record is found with all its lines in front of the end."""
    data = _line(1, "a") + _line(2, "b") + b"\tmore\n"
    assert data[last_record_start(data) :] == _line(2, "b") + b"\tmore\n"
    assert last_record_start(b"\tno\n\trecord\n") == 0
    assert last_record_start(b"") == 0


_TWO = _line(1, "a") + b"\tx\n" + _line(2, "b")


@pytest.mark.parametrize(
    ("read", "taken"),
    [
        (Read(_TWO, end=len(_TWO)), _TWO),
        (Read(_TWO + b"20", end=999), _TWO),
        (Read(b"half", end=4), b""),
        # More of the record is on its way: a write is seen page by page.
        (Read(_TWO + b"\t", end=999), _TWO[: -len(_line(2, "b"))]),
        (Read(_TWO, end=8192), _TWO[: -len(_line(2, "b"))]),
        (Read(_TWO + b"\t", end=999, is_settled=True), _TWO),
        (Read(_TWO, end=8192, is_settled=True), _TWO),
        # The writer is gone: nobody ends the line.
        (Read(_TWO + b"half", end=999, is_over=True), _TWO),
        (Read(_TWO + b"half", end=999, is_over=True, is_settled=True), _TWO + b"half"),
        # There is more to read, so the last record may go on.
        (Read(_TWO + b"\tha", end=999, has_more=True), _TWO[: -len(_line(2, "b"))]),
        (Read(_line(1, "a") + b"\tx\n\tha", end=999, has_more=True), _line(1, "a") + b"\tx\n"),
        (Read(b"endless", end=999, has_more=True), b"endless"),
        (Read("endless\xe9".encode()[:-1], end=999, has_more=True), b"endless"),
    ],
)
def test_what_is_taken(read: Read, taken: bytes) -> None:
    """Whole records only, unless nobody can or will complete them."""
    assert read.data[: take([read], now_ms=None)[0]] == taken


def test_recent_records_wait_for_others() -> None:
    """In the order of times, records of the last moments wait, and nothing passes a long file."""
    now_ms = 1_700_000_010_000
    recent = Read(_line(1, "a") + _line(9.9, "b"), end=1)
    future = Read(_line(1000, "a"), end=1)
    assert take([recent, future], now_ms=now_ms) == [len(_line(1, "a")), len(future.data)]
    long = Read(_line(2, "a") + _line(3, "b") + b"20", end=1, has_more=True)
    other = Read(_line(1, "a") + _line(2.5, "b"), end=1)
    assert take([long, other], now_ms=now_ms) == [len(_line(2, "a")), len(_line(1, "a"))]
    assert until(_line(1, "a"), 0) == len(_line(1, "a"))


def test_taking_always_ends() -> None:
    """Whatever is in a file, it is read to the end of its last line in a finite number of steps."""
    randomly = random.Random(5)
    pieces = [_line(1, "a"), b"\tx\n", b"\n", b"y" * 70, _line(9, "b" * 50), b"\xff\n"]
    for _ in range(50):
        data = b"".join(randomly.choices(pieces, k=30)) + b"\n"
        at = 0
        while at < len(data):
            chunk = data[at : at + 100]
            has_more = at + 100 < len(data)
            (length,) = take(
                [Read(chunk, at + len(chunk), has_more, is_settled=True)], now_ms=1_700_000_100_000
            )
            assert length > 0
            at += length
    assert CHUNK_BYTES % 4096 == 0


def test_position_is_read_back() -> None:
    """A position comes back as it was written, with the number that tells the later one."""
    assert decode(encode(_POSITION, 12) + b"\0" * 100) == (12, _POSITION)


def test_torn_or_foreign_positions_are_none() -> None:
    """Any changed byte, any cut and any other content is recognised."""
    data = encode(_POSITION, 12)
    for at in range(len(data) - 1):
        assert decode(data[:at]) is None
        changed = bytearray(data)
        changed[at] ^= 1
        found = decode(bytes(changed))
        # Hexadecimal digits may be written in another case.
        assert found is None or found == (12, _POSITION)
    randomly = random.Random(1)
    for size in range(200):
        assert decode(randomly.randbytes(size)) is None
    for text in (b"null", b"[]", b"{}", b'{"version":1}', b'{"version":2}', b"[" * 5000):
        assert decode(b"%08x %08x %s\n" % (crc32(text), len(text), text)) is None


def test_freshness() -> None:
    """A position is fresh for a minute after it was written, and never before that."""
    assert _POSITION.is_fresh(3.5)
    assert _POSITION.is_fresh(60.0)
    assert not _POSITION.is_fresh(64.0)
    assert not _POSITION.is_fresh(3.0)


@pytest.mark.parametrize(
    "field",
    [
        {"number": "1"},
        {"output": ["7", 100]},
        {"monotonic_s": "3.5"},
        {"files": [["11", 5, 9, 5, 0]]},
        {"files": [[11, -5, 9, 5, 0]]},
        {"batch": ["4", 1234, True]},
    ],
)
def test_a_position_with_wrong_types_is_none(field: dict[str, object]) -> None:
    """A right checksum over fields that nobody can use must not end the aggregator."""
    fields = json.loads(encode(_POSITION, 1)[18:])
    text = json.dumps({**fields, **field}).encode()
    assert decode(b"%08x %08x %s\n" % (crc32(text), len(text), text)) is None
