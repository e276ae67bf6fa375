# SPDX-License-Identifier: Apache-2.0
"""Reading events: torn, mixed, foreign and hostile files."""

import json
import os
import random
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils.events import EventFileError, read_events

_HEADER = {
    "kind": "header", "schema": "nvrx_events.v1", "host": "n1", "launch_id": "l", "job_id": "j",
    "boot_id": "b", "clock": {"wall": 1000.0, "mono": 10.0}, "versions": {},
}  # fmt: skip
_EVENT = {
    "t": 1001.0, "m": 11.0, "kind": "fault", "src": "launcher", "cycle": 0, "rank": 3, "pid": 9,
    "cause": "killed",
}  # fmt: skip


def _write(path: Path, *lines: object) -> Path:
    path.write_bytes(
        b"".join(
            line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines
        )
    )
    return path


def test_unknown_things_are_kept(tmp_path: Path) -> None:
    """Kinds and fields that this version does not know come back as they are."""
    new = {**_EVENT, "kind": "novelty", "shape": [1, {"a": None}]}
    found = read_events(_write(tmp_path / "e", _HEADER, _EVENT, new))
    assert found.host == "n1"
    assert [event.kind for event in found.events] == ["fault", "novelty"]
    assert found.events[1].fields["shape"] == [1, {"a": None}]
    assert found.events[0].fields == {"cause": "killed"}


def test_torn_last_line(tmp_path: Path) -> None:
    """What a process that died left of its last line is counted, and costs no other event."""
    found = read_events(_write(tmp_path / "e", _HEADER, _EVENT, json.dumps(_EVENT).encode()[:30]))
    assert (len(found.events), found.bad_lines) == (1, 1)


def test_event_behind_a_torn_one(tmp_path: Path) -> None:
    """An event that another process wrote behind a torn line is found."""
    torn = json.dumps(_EVENT).encode()[:30]
    found = read_events(_write(tmp_path / "e", _HEADER, torn, _EVENT, _EVENT))
    assert len(found.events) == 2


def test_header_need_not_be_first(tmp_path: Path) -> None:
    """A header behind an event, as two processes that open at once may leave it, still counts."""
    found = read_events(_write(tmp_path / "e", _EVENT, _HEADER))
    assert found.header["job_id"] == "j"
    assert len(found.events) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n\n\n", "is empty"),
        (b"hello\nworld\n", "is not an event file"),
        (b"\x7fELF" + bytes(5000), "is not an event file"),
        (b'{"a": 1}\n', "is not an event file"),
        (json.dumps({**_HEADER, "schema": "nvrx_events.v9"}).encode(), "nvrx_events.v9"),
    ],
)
def test_other_files_are_refused(content: bytes, says: str, tmp_path: Path) -> None:
    """A file without any event says so in one line."""
    path = tmp_path / "e"
    path.write_bytes(content)
    with pytest.raises(EventFileError, match=says) as caught:
        read_events(path)
    assert "\n" not in str(caught.value)


def test_missing_and_unreadable(tmp_path: Path) -> None:
    """A missing file, a directory and a fifo are errors of the same kind, at once."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "none", tmp_path, tmp_path / "fifo"):
        with pytest.raises(EventFileError):
            read_events(path)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 60_000 + b"\n",
        b'{"a":' * 10_000 + b"\n",
        b"x" * 1_000_000 + b"\n",
        b'{"t": NaN, "kind": "fault"}\n',
        b'{"t": 1e999, "kind": "fault"}\n',
        b'{"t": ' + b"9" * 5000 + b', "kind": "fault"}\n',
        b'{"t": true, "kind": "fault"}\n',
        b'{"t": 1, "kind": ["fault"]}\n',
        b'{"t": "1", "kind": "fault"}\n',
        b'"fault"\n',
        b"\xff\xfe\x00\n",
    ],
)
def test_hostile_lines(line: bytes, tmp_path: Path) -> None:
    """A line that is no event is one bad line, whatever is in it."""
    found = read_events(_write(tmp_path / "e", _HEADER, _EVENT, line, _EVENT))
    assert (len(found.events), found.bad_lines) == (2, 1)


def test_wrong_types_in_common_fields(tmp_path: Path) -> None:
    """A common field of the wrong type is no value."""
    odd = {**_EVENT, "m": "x", "cycle": "1", "rank": 2**70, "pid": 1.5, "src": None}
    (event,) = read_events(_write(tmp_path / "e", _HEADER, odd)).events
    assert (event.m, event.cycle, event.rank, event.pid, event.src) == (None, None, None, None, "")


def test_damaged_files(tmp_path: Path) -> None:
    """Random damage gives fewer events or one error, never another exception."""
    whole = b"".join(json.dumps(line).encode() + b"\n" for line in [_HEADER, *([_EVENT] * 20)])
    chance = random.Random(1)
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 40)):
            place = chance.randrange(len(data))
            if chance.random() < 0.3:
                del data[place : place + chance.randrange(60)]
            else:
                data[place] = chance.choice(b'\n\x00\xff{}[]":,0e-\\u') if data else 0
            if not data:
                data = bytearray(b"\n")
        path = tmp_path / "e"
        path.write_bytes(data)
        try:
            found = read_events(path)
        except EventFileError:
            continue
        assert len(found.events) <= 25
