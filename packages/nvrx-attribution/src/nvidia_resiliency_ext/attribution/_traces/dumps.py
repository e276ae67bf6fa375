# SPDX-License-Identifier: Apache-2.0
"""One rank's dump of the flight recorder: from decoded JSON or pickle to the fields in use.

Values are foreign: whatever does not fit is left out, and a dump that is none raises ValueError.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

__all__ = ["ENTRY_LIMIT", "Dump", "Frame", "Group", "Op", "Status", "decode_dump", "parse_members"]

ENTRY_LIMIT = 20_000
_TEXT_LENGTH = 300
_FRAMES = 3
_MOST_MEMBERS = 1 << 20
_MEMBERS_CHARS = 16 * _MOST_MEMBERS
# Frames of torch's own wrappers say nothing about the program.
_LIBRARY = re.compile(
    r"/torch/(distributed|nn|utils|_|autograd)|/multiprocessing/|<frozen|<string>"
)
_LONGEST_NUMBER = 20
_MOST_NUMBER = 1 << 63
_PEER = re.compile(r"(send|recv)\s+(\d{1,7})\s*(->|<-)\s*(\d{1,7})")

Frame = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Status:
    """Last sequence numbers of one process group on one rank; -1: none or unknown."""

    enqueued: int = -1
    started: int = -1
    completed: int = -1


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as one rank configured it; `members_text` as in the dump."""

    name: str
    desc: str
    members_text: str


@dataclass(slots=True)
class Op:
    """One recorded operation.

    Attributes:
        record_id: Position in the record of its rank.
        pg_id: Number of the group on this rank; the key of its status.
        pg_name: Name of the group.
        pg_desc: Description of the group.
        seq: Sequence number of collectives in the group.
        p2p_seq: Sequence number of point-to-point operations in the group.
        name: Such as `all_reduce`, without the backend.
        full_name: Such as `nccl:all_reduce`.
        state: `scheduled`, `started` or `completed`.
        is_done: It ended on this rank.
        is_p2p: It is a send or a receive.
        peers: (source, destination), numbers within the group, of a point-to-point operation.
        created_ns: Wall time of its enqueueing.
        sizes: Input and output shapes.
        dtypes: Input and output types.
        frames: Innermost frames of the program: (function, file, line).
        started_ns: Wall time when it was seen started; 0: never.
        completed_ns: Wall time when it was seen completed; 0: never.
    """

    record_id: int
    pg_id: int
    pg_name: str
    pg_desc: str
    seq: int
    p2p_seq: int
    name: str
    full_name: str
    state: str
    is_done: bool
    is_p2p: bool
    peers: tuple[int, int] | None
    created_ns: int
    sizes: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    dtypes: tuple[tuple[str, ...], tuple[str, ...]]
    frames: tuple[Frame, ...] = ()
    started_ns: int = 0
    completed_ns: int = 0
    op_id: int = 0

    @property
    def counts(self) -> tuple[int, int]:
        """Elements that go in and come out."""
        return sum(map(prod, self.sizes[0])), sum(map(prod, self.sizes[1]))


@dataclass(slots=True)
class Dump:
    """Content of one rank's recorder."""

    rank: int
    file: str
    host: str | None = None
    version: str = ""
    groups: list[Group] = field(default_factory=list)
    status: dict[int, Status] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    health: dict[str, dict[str, str]] = field(default_factory=dict)
    dropped_entries: int = 0


def decode_dump(value: object, rank: int, file: str) -> Dump:
    """Return the dump in a decoded JSON or pickle value.

    Args:
        value: The decoded value.
        rank: Rank of the dump, as its file is named.
        file: Name of the file, for messages.

    Raises:
        ValueError: It is no dump.
    """
    if not isinstance(value, dict):
        raise ValueError(f"not a flight-recorder dump: a {type(value).__name__}")  # noqa: TRY004
    entries = value.get("entries", [])
    if not isinstance(entries, list | tuple) or not {"entries", "pg_status", "version"} & set(
        value
    ):
        raise ValueError("not a flight-recorder dump: it has no list of entries")
    dump = Dump(rank, file, _text(value.get("host_name")) or None, _text(value.get("version")))
    dump.dropped_entries = max(0, len(entries) - ENTRY_LIMIT)
    dump.groups = _groups(value.get("pg_config"))
    dump.status = _statuses(value.get("pg_status"))
    dump.health = _health(value.get("health_check_results"))
    shared: dict[Any, Any] = {}
    kept = entries[-ENTRY_LIMIT:]
    for position, entry in enumerate(kept):
        if isinstance(entry, dict):
            dump.ops.append(_op(entry, position, shared))
    return dump


def parse_members(text: str) -> tuple[int, ...]:
    """Return the sorted ranks of a text such as `[0, 1]`; empty when it names none."""
    if len(text) > _MEMBERS_CHARS:
        return ()
    try:
        found = {int(part) for part in text.strip().strip("[](){}").split(",") if part.strip()}
    except ValueError:
        return ()
    return tuple(sorted(rank for rank in found if 0 <= rank < _MOST_MEMBERS))


def _groups(value: object) -> list[Group]:
    if not isinstance(value, dict):
        return []
    found = []
    for key, config in value.items():
        if not isinstance(config, dict):
            continue
        members = config.get("ranks")
        if isinstance(members, list | tuple):
            members = str(list(members))
        found.append(
            Group(
                _text(config.get("name")) or _text(key),
                _text(config.get("desc")),
                # One more than can be parsed: what is cut must not pass for the whole.
                members[: _MEMBERS_CHARS + 1] if isinstance(members, str) else "",
            )
        )
    return found


def _statuses(value: object) -> dict[int, Status]:
    if not isinstance(value, dict):
        return {}
    found = {}
    for key, status in value.items():
        if isinstance(status, dict) and _number(key, -1) >= 0:
            found[_number(key)] = Status(
                _number(status.get("last_enqueued_collective"), -1),
                _number(status.get("last_started_collective"), -1),
                _number(status.get("last_completed_collective"), -1),
            )
    return found


def _health(value: object) -> dict[str, dict[str, str]]:
    if not isinstance(value, dict):
        return {}
    return {
        _text(name): {"status": _text(result.get("status")), "output": _text(result.get("output"))}
        for name, result in list(value.items())[:16]
        if isinstance(result, dict)
    }


def _op(entry: dict[Any, Any], position: int, shared: dict[Any, Any]) -> Op:
    full_name = _text(entry.get("profiling_name"))
    group = entry.get("process_group")
    if not isinstance(group, list | tuple) or not group:
        group = ("", "")
    state = _text(entry.get("state"))
    name, peers = _name_and_peers(full_name)
    sizes = (_shapes(entry.get("input_sizes")), _shapes(entry.get("output_sizes")))
    dtypes = (_texts(entry.get("input_dtypes")), _texts(entry.get("output_dtypes")))
    return Op(
        _number(entry.get("record_id"), position),
        _number(entry.get("pg_id"), -1),
        _text(group[0]),
        _text(group[1]) if len(group) > 1 else "",
        _number(entry.get("collective_seq_id")),
        _number(entry.get("p2p_seq_id")),
        name,
        full_name,
        state,
        # gloo's recorder leaves the state at "scheduled" and marks the entry as retired.
        state == "completed" or entry.get("retired") is True,
        bool(entry.get("is_p2p")) or peers is not None,
        peers,
        _number(entry.get("time_created_ns")),
        # A training step repeats the same few shapes; each is kept once.
        shared.setdefault(sizes, sizes),
        shared.setdefault(dtypes, dtypes),
        _frames(entry.get("frames")),
        _number(entry.get("time_discovered_started_ns")),
        _number(entry.get("time_discovered_completed_ns")),
        _number(entry.get("op_id")),
    )


@functools.lru_cache(maxsize=4096)
def _name_and_peers(full_name: str) -> tuple[str, tuple[int, int] | None]:
    peer = _PEER.search(full_name)
    if peer is None:
        return full_name.partition(":")[2] or full_name, None
    mine, other = int(peer[2]), int(peer[4])
    return peer[1], (mine, other) if peer[1] == "send" else (other, mine)


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    return _LIBRARY.search(file) is not None


def _frames(value: object) -> tuple[Frame, ...]:
    if not isinstance(value, list | tuple):
        return ()
    found: list[Frame] = []
    for frame in value:
        if not isinstance(frame, dict):
            continue
        file = _text(frame.get("filename"))
        if not _is_library(file):
            found.append((_text(frame.get("name")), file, _number(frame.get("line"))))
            if len(found) == _FRAMES:
                break
    return tuple(found)


def _shapes(value: object) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value[:4096])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return ()
    if not isinstance(value, list | tuple):
        return ()
    return tuple(
        [
            tuple([_number(size) for size in shape[:16]])
            for shape in value[:256]
            if isinstance(shape, list | tuple)
        ]
    )


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        return ()
    return tuple([_text(item) for item in value[:256]])


def _text(value: object) -> str:
    if isinstance(value, str):
        return value[:_TEXT_LENGTH]
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else ""


def _number(value: object, default: int = 0) -> int:
    if type(value) is int and -_MOST_NUMBER < value < _MOST_NUMBER:
        return value  # nearly all of them
    if isinstance(value, int):
        return int(value) if abs(value) < _MOST_NUMBER else default
    if isinstance(value, str) and 0 < len(value) <= _LONGEST_NUMBER and value.lstrip("-").isdigit():
        return int(value)
    return default
