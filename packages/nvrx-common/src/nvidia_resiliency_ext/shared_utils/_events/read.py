# SPDX-License-Identifier: Apache-2.0
"""Owns the reading of event files; what the events mean is the report's business.

A file may be torn (a process died while it wrote), mixed (many processes append to it) or hostile.
A line that is not an event is counted and skipped, kinds and fields that this version does not
know are kept, and every size is limited.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from .log import SCHEMA

_LINE_LIMIT = 64 * 1024
_FILE_LIMIT = 256 * 1024 * 1024
_LATEST_TIME = 1e12
_LARGEST_INTEGER = 2**53
_COMMON_NAMES = ("t", "m", "kind", "src", "cycle", "rank", "pid")


class EventFileError(NvrxError, ValueError):
    """File `path` is not a file of events, or cannot be read; `why` says what is wrong."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One line of an event file.

    Args:
        t: Wall time in seconds since 1970.
        m: Monotonic time of the node in seconds; None if unknown.
        kind: Kind of the event.
        src: The program that wrote it.
        cycle: The cycle; None outside any.
        rank: The global rank that it concerns; None: no rank.
        pid: The process that wrote it.
        fields: The fields of its kind.
    """

    t: float
    m: float | None
    kind: str
    src: str
    cycle: int | None
    rank: int | None
    pid: int | None
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class EventFile:
    """The content of one event file.

    Args:
        path: The file.
        header: Its header; empty without one.
        events: Its events, in file order.
        bad_lines: Lines that could not be parsed.
        problem: Why the file could not be read, when other files could.
    """

    path: str
    header: Mapping[str, object]
    events: tuple[EventRecord, ...]
    bad_lines: int
    problem: str = ""

    @property
    def host(self) -> str:
        """Name of the node."""
        host = self.header.get("host")
        return host if isinstance(host, str) else os.path.basename(self.path)


def read_events(path: str | os.PathLike[str]) -> EventFile:
    """Read the event file `path`.

    Raises:
        EventFileError: The file cannot be read, is empty, or holds no event of a known schema.
    """
    name = os.fspath(path)
    header: Mapping[str, object] = {}
    events: list[EventRecord] = []
    bad_lines = 0
    try:
        # A fifo or a device must not block the reader.
        with open(
            name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
        ) as file:
            for line in _lines(file):
                found = _parse(line)
                if isinstance(found, EventRecord):
                    events.append(found)
                elif found is None:
                    bad_lines += 1
                elif not header:
                    header = found
    except OSError as error:
        raise EventFileError(name, error.strerror or "cannot be read") from error
    schema = header.get("schema")
    if header and schema != SCHEMA:
        raise EventFileError(name, f"has schema {schema!r:.60}, this version reads {SCHEMA}")
    if not header and not events:
        raise EventFileError(name, "is not an event file" if bad_lines else "is empty")
    return EventFile(path=name, header=header, events=tuple(events), bad_lines=bad_lines)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; one longer than the limit comes as an empty, hence bad, line."""
    left = _FILE_LIMIT
    while left > 0:
        line = file.readline(_LINE_LIMIT)
        if not line:
            return
        left -= len(line)
        if len(line) == _LINE_LIMIT and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = file.readline(_LINE_LIMIT)
                left -= len(line)
            yield b""
        elif line.strip():
            yield line


def _parse(line: bytes) -> EventRecord | Mapping[str, object] | None:
    """Return the event or header in a line, also behind an unfinished event; else None."""
    found = _parse_object(line)
    if found is None:
        start = line.rfind(b'{"t":')
        found = _parse_object(line[start:]) if start > 0 else None
    if found is None:
        return None
    t, kind, given = _time(found.get("t")), found.get("kind"), found.get("src")
    if kind == "header":
        return found
    if t is None or not isinstance(kind, str) or not kind:
        return None
    src = given if isinstance(given, str) else ""
    cycle, rank, pid = (_integer(found.get(name)) for name in ("cycle", "rank", "pid"))
    fields = {name: value for name, value in found.items() if name not in _COMMON_NAMES}
    return EventRecord(t, _time(found.get("m")), kind, src, cycle, rank, pid, fields)


def _parse_object(line: bytes) -> dict[str, object] | None:
    try:
        value = _DECODER.decode(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


# One for all lines: `json.loads` makes a decoder per call where it is given a parameter.
_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _time(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < _LATEST_TIME else None


def _integer(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if abs(value) <= _LARGEST_INTEGER else None
