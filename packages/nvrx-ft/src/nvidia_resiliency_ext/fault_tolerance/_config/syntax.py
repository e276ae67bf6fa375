# SPDX-License-Identifier: Apache-2.0
"""The small languages of the command line: node ranges, streams, rank lists, key=value lists.

Pure: text in, values out. Which flag speaks which language is said in `flags.py`.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._core.local_world import MOST_WORKERS

from .values import Kind, that

NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
_HIGHEST_PORT = 65535


class Std(enum.IntFlag):
    """Which of a worker's streams something applies to."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Return the least and the largest number of nodes in `nnodes`, `N` or `MIN:MAX`.

    Raises:
        RuntimeError: The text has another form.
    """
    parts = nnodes.split(":")
    if len(parts) not in (1, 2) or not all(part.strip().isdecimal() for part in parts):
        raise RuntimeError(f'nnodes={nnodes!r} is neither "N" nor "MIN:MAX"')
    return int(parts[0]), int(parts[-1])


def _nodes(raw: Any) -> str:
    try:
        least, largest = parse_min_max_nnodes(raw)
    except RuntimeError:
        raise ValueError from None
    if not 0 < least <= largest:
        raise ValueError
    return str(raw)


def streams_by_rank(text: str, nproc: int = 0) -> dict[int, Std]:
    """Return the streams of each local rank from `3` (all ranks) or `0:1,1:3` (some ranks)."""
    if text in ("0", "1", "2", "3"):
        return dict.fromkeys(range(nproc), Std(int(text)))
    streams = dict.fromkeys(range(nproc), Std.NONE)
    named: set[int] = set()
    for part in text.split(","):
        rank, _, value = part.partition(":")
        if not rank.isdecimal() or value not in ("0", "1", "2", "3") or int(rank) in named:
            raise ValueError(f"{text!r} is neither 0, 1, 2, 3 nor a list like 0:1,1:3")
        named.add(int(rank))
        if int(rank) in streams:
            streams[int(rank)] = Std(int(value))
    return streams


def parse_ranks(text: str) -> frozenset[int] | None:
    """Return the ranks in `0,2,3`; none in an empty text stands for all."""
    if not text:
        return None
    ranks = [int(part) for part in text.split(",")]
    if min(ranks) < 0:
        raise ValueError(f"{text!r} holds a negative rank")
    return frozenset(ranks)


def parse_configuration(text: str) -> dict[str, str]:
    """Return the pairs of `key=value,key=value`."""
    pairs: dict[str, str] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        key, equals, value = (item.strip() for item in part.partition("="))
        if not key or not equals or not value or key in pairs:
            raise ValueError(f"{text!r} is no list like key=value,key=value")
        pairs[key] = value
    return pairs


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """Return host and port of `HOST`, `HOST:PORT` or `[IPV6]:PORT`."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        separator, port = rest[:1], rest[1:]
        if not bracket or separator not in ("", ":"):
            raise ValueError(f"{text!r} is no [IPV6]:PORT")
    else:
        host, separator, port = text.partition(":")
    if not host or host != host.strip() or (separator and not port.isdecimal()):
        raise ValueError(f"{text!r} is no HOST:PORT")
    if separator and int(port) > _HIGHEST_PORT:
        raise ValueError(f"{text!r} has a port above {_HIGHEST_PORT}")
    return host, int(port) if separator else None


def _text_for(parse: Callable[[str], object]) -> Callable[[Any], str]:
    """Return a parser that checks a text by `parse` and returns it unchanged."""

    def check(raw: Any) -> str:
        parse(raw)
        return str(raw)

    return check


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Return the signals in `SIGTERM,SIGINT`."""
    numbers = []
    for part in text.split(","):
        number = signal.Signals.__members__.get(part.strip().upper())
        if number is None:
            raise ValueError(f"{part!r} is no signal")
        numbers.append(number)
    if {signal.SIGKILL, signal.SIGSTOP} & set(numbers):
        raise ValueError("SIGKILL and SIGSTOP cannot be handled")
    return tuple(numbers)


def _filters(raw: Any) -> list[str]:
    # A doubled comma stands for one inside a filter.
    parts = str(raw).replace(",,", "\0").split(",")
    return [part.replace("\0", ",") for part in parts if part]


NODES = Kind("a number of nodes or MIN:MAX with 0 < MIN <= MAX", "N|MIN:MAX", _nodes)
PROCESSES = Kind(
    f"a number of workers from 1 to {MOST_WORKERS}, cpu, gpu or auto",
    "N|cpu|gpu|auto",
    that(str, lambda text: text in ("auto", "cpu", "gpu") or 0 < int(text) <= MOST_WORKERS),
)
STREAMS = Kind(
    "0, 1 (stdout), 2 (stderr), 3 (both) or a list like 0:1,1:3", "STD", _text_for(streams_by_rank)
)
RANKS = Kind("a comma separated list of local ranks", "RANK,...", _text_for(parse_ranks))
CONFIGURATION = Kind(
    "a list like key=value,key=value", "KEY=VALUE,...", _text_for(parse_configuration)
)
ADDRESS = Kind(
    f"HOST or HOST:PORT with a port up to {_HIGHEST_PORT}", "HOST[:PORT]", _text_for(parse_endpoint)
)
ENDPOINT = Kind(
    f"HOST:PORT with a port up to {_HIGHEST_PORT}",
    "HOST:PORT",
    lambda raw: ADDRESS.parse(raw) if raw else "",
)
SIGNALS = Kind(
    "a comma separated list of signals that can be handled", "SIGNAL,...", _text_for(parse_signals)
)
FILTERS = Kind("a comma separated list of texts", "TEXT,...", _filters)
