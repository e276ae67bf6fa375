# SPDX-License-Identifier: Apache-2.0
"""What nodes and the store host tell each other through the store. Pure.

Every value is JSON of a closed set of fields with plain types and bounded sizes: who can reach the
store's port can write to it, so what is read is untrusted until it has passed `decode`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from nvidia_resiliency_ext.fault_tolerance._core.cause import Cause
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.hang_culprit import RankState
from nvidia_resiliency_ext.shared_utils.rank_activity import Activity

MAX_VALUE_BYTES = 64 * 1024
MAX_LINE_BYTES = MAX_VALUE_BYTES - 1024
MAX_TEXT = 4096
_MAX_WHOLE = 1 << 62
_MAX_PORT = 65535
_MAX_COMPLAINT = 200
_MAX_WORKERS = 4096
_PAIR = 2


class ForeignValueError(NvrxError):
    """A value in the store was not written by this job's launchers."""


class Phase(enum.Enum):
    """Where the job stands between two entries of the log."""

    OPEN = "open"
    CLOSED = "closed"
    OVER = "over"


class WorkerState(enum.Enum):
    """What a node says of its workers; UNKNOWN is said of a node that is lost."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Kind(enum.Enum):
    """What a message to the store host is about."""

    ARRIVED = "arrived"
    STATE = "state"
    LEFT = "left"
    UNHEALTHY = "unhealthy"
    PREEMPTED = "preempted"
    HELD = "held"
    MISMATCH = "mismatch"
    GOODBYE = "goodbye"
    RESUMED = "resumed"
    ACKNOWLEDGED = "acknowledged"
    HUNG = "hung"


class HangStage(enum.IntEnum):
    """How far the nodes are in finding the culprit of a hang."""

    NONE = 0
    ASKED = 1
    EVALUATED = 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """A node that offers itself for a round, and what its place depends on.

    `clock` is the time by its wall clock (unix s); only its difference from others' is of interest.
    """

    node: str
    addr: str
    host: str = ""
    infra_rank: int = -1
    domain: str = "none"
    group: str | None = None
    nproc: int = 1
    master_port: int = 0
    previous_rank: int | None = None
    clock: float | None = None


@dataclass(frozen=True, slots=True)
class HostReputation:
    """What is held against hosts and nodes.

    Attributes:
        failures: Hosts that caused restarts, and how long ago (s) each was, the oldest first.
        named: Hosts that somebody outside the job named, and why.
        unhealthy: Nodes that said that they are.
    """

    failures: tuple[tuple[str, tuple[float, ...]], ...] = ()
    named: tuple[tuple[str, str], ...] = ()
    unhealthy: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A decision that holds for everybody, with all that a node that joins must know.

    Attributes:
        seq: Its number; each is created once, by compare-and-set.
        phase: What the job is in from here on.
        round: The round that is open or closed.
        epoch: Which life of the store this is.
        by: The node that decided.
        cause: Why a round was opened or the job ended.
        reason: The word for the end of a job.
        notify_from: How many must have arrived before a further one wakes the host.
        active: Nodes with a place, when closed.
        world_size: Ranks in the job, when closed.
        master_addr: Address of rank 0, when closed.
        master_port: Port of rank 0, when closed.
        restart_ages_s: How long ago each restart was, for a budget with a window.
        is_leaving: Whether the ranks of the closed round are to save and leave.
        save_at: At which call of `should_checkpoint` they do, once that is agreed.
        is_controlled: Whether the store outlives the nodes: it is not in a launcher.
        clocks: Whose clock is off, in words for everybody's log.
        reputation: What another host of the job has to know of hosts and nodes.
        hang: How far the nodes are in finding the culprit of a hang (`HangStage`); `cause` says it
            once that is judged.
    """

    seq: int
    phase: Phase
    round: int
    epoch: str = ""
    by: str = ""
    cause: Cause | None = None
    reason: str = ""
    notify_from: int = 1
    active: int = 0
    world_size: int = 0
    master_addr: str = ""
    master_port: int = 0
    restart_ages_s: tuple[float, ...] = ()
    is_controlled: bool = False
    is_leaving: bool = False
    save_at: int = 0
    clocks: str = ""
    reputation: HostReputation | None = None
    hang: int = 0

    def again(self, by: str, **fields: Any) -> Entry:
        """Return the decision after this one that says the same but for `fields`."""
        return dataclasses.replace(self, **{"seq": self.seq + 1, "by": by, **fields})

    def next(self, by: str, **fields: Any) -> Entry:
        """Return the decision after this one, without what holds for this one only."""
        return self.again(by, **{**_OF_ONE_DECISION, **fields})

    def follows(self, before: Entry) -> bool:
        """Whether it says anything new; one that says the same again only fills its place."""
        return self._says() != before._says()

    def _says(self) -> tuple[object, ...]:
        return self.phase, self.round, self.is_leaving, self.save_at, self.hang


_OF_ONE_DECISION: Mapping[str, Any] = {
    "cause": None,
    "reason": "",
    "active": 0,
    "world_size": 0,
    "master_addr": "",
    "master_port": 0,
    "is_leaving": False,
    "save_at": 0,
    "hang": 0,
    "clocks": "",
}


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """A node's part in a closed round; spares have none.

    `clock_off_s` is how far its clock is ahead of the others', 0 where that is not worth a word.
    """

    round: int
    group_rank: int
    rank_offset: int = 0
    clock_off_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """A message to the coordinator; `entry` and `assignment` are those of a lost store.

    `ranks` is what the node's ranks do in a hang; with `cause` a limit was broken there.
    """

    kind: Kind
    node: str
    arrival: Arrival | None = None
    state: WorkerState | None = None
    cause: Cause | None = None
    text: str = ""
    entry: Entry | None = None
    assignment: RankAssignment | None = None
    calls: int = 0
    ranks: tuple[RankState, ...] = ()


_Record = TypeVar(
    "_Record", Arrival, NodeMessage, Entry, RankAssignment, Cause, HostReputation, RankState
)


def encode(record: Arrival | NodeMessage | Entry | RankAssignment) -> str:
    """Return one line of ASCII without a newline; texts that are too long are cut."""
    line = ""
    for limit in (MAX_TEXT, MAX_TEXT // 8, MAX_TEXT // 64):
        line = json.dumps(_plain(record, limit), separators=(",", ":"), allow_nan=False)
        # Beyond ASCII a character takes up to twelve bytes here.
        if len(line) <= MAX_LINE_BYTES:
            break
    return line


def decode(kind: type[_Record], text: str | bytes) -> _Record:
    """Return the record of `kind` in `text`.

    Raises:
        ForeignValueError: it is anything else.
    """
    if len(text) > MAX_VALUE_BYTES:
        raise ForeignValueError(f"a value of {len(text)} bytes; at most {MAX_VALUE_BYTES} are read")
    try:
        document = json.loads(text)
        return _record(kind, document)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        name = f"{'an' if kind.__name__[0] in 'AE' else 'a'} {kind.__name__}"
        raise ForeignValueError(f"not {name}: {str(error)[:_MAX_COMPLAINT]}") from None


def _plain(value: Any, limit: int) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _plain(getattr(value, f.name), limit)
            for f in dataclasses.fields(value)
            if getattr(value, f.name) not in (None, "", ())
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str):
        return value[:limit]
    if isinstance(value, Mapping):
        return _plain_detail(value, limit)
    if isinstance(value, (tuple, list)):
        return [_plain(item, limit) for item in value]
    return value


def _plain_detail(detail: Mapping[str, object], limit: int) -> dict[str, object]:
    """Return what of a cause's details is plain and small: the record of the node has them all."""
    kept: dict[str, object] = {}
    left = 2 * limit
    for key, value in detail.items():
        if _is_plain(value):
            short = value[:limit] if isinstance(value, str) else value
            left -= len(str(key)) + len(str(short))
            if left < 0:
                break
            kept[str(key)] = short
    return kept


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) < _MAX_WHOLE
    return isinstance(value, str)


def _record(kind: type[_Record], document: Any) -> _Record:
    if not isinstance(document, dict):
        raise TypeError("not an object")
    readers = _READERS[kind]
    unknown = document.keys() - readers.keys()
    if unknown:
        raise ValueError(f"unknown field {min(unknown)!r}")
    return kind(**{name: readers[name](value) for name, value in document.items()})


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise TypeError("not a short text")
    # A surrogate without its other half could not be printed.
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= _MAX_WHOLE:
        raise TypeError("not a whole number")
    return value


def _natural(value: Any) -> int:
    if _whole(value) < 0:
        raise ValueError("a number is below 0")
    return int(value)


def _port(value: Any) -> int:
    if _natural(value) > _MAX_PORT:
        raise ValueError(f"{value} is no port")
    return int(value)


def _workers(value: Any) -> int:
    if not 1 <= _whole(value) <= _MAX_WORKERS:
        raise ValueError(f"{value} is no number of workers of a node")
    return int(value)


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError("not a time")
    return float(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError("not true or false")
    return value


def _ages(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(type(age) in (int, float) for age in value):
        raise TypeError("not a list of numbers")
    ages = tuple(float(age) for age in value)
    if not all(map(math.isfinite, ages)):
        raise ValueError("a number is not finite")
    return ages


def _pairs(value: Any, second: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == _PAIR for pair in value
    ):
        raise TypeError("not a list of pairs")
    return tuple((_text(name), second(item)) for name, item in value)


def _failures(value: Any) -> tuple[tuple[str, tuple[float, ...]], ...]:
    return _pairs(value, _ages)


def _named(value: Any) -> tuple[tuple[str, str], ...]:
    return _pairs(value, _text)


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return tuple(map(_text, value))


def _detail(value: Any) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError("not an object")
    if not all(map(_is_plain, value.values())):
        raise TypeError("not plain values")
    return {
        _text(key): _text(item) if isinstance(item, str) else item for key, item in value.items()
    }


def _ranks(value: Any) -> tuple[RankState, ...]:
    if not isinstance(value, list) or len(value) > _MAX_WORKERS:
        raise TypeError("not a list of ranks")
    return tuple(_record(RankState, rank) for rank in value)


def _progress(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != _PAIR:
        raise TypeError("not a pair")
    return _natural(value[0]), _natural(value[1])


_cause, _arrival, _entry = (
    partial(_record, Cause),
    partial(_record, Arrival),
    partial(_record, Entry),
)
_assignment = partial(_record, RankAssignment)
_reputation = partial(_record, HostReputation)
_READERS: Mapping[type, Mapping[str, Any]] = {
    Arrival: {
        "node": _text, "addr": _text, "host": _text, "infra_rank": _whole, "domain": _text,
        "group": _text, "nproc": _workers, "master_port": _port, "previous_rank": _whole,
        "clock": _seconds,
    },
    NodeMessage: {
        "kind": Kind, "node": _text, "arrival": _arrival, "state": WorkerState, "cause": _cause,
        "text": _text, "entry": _entry, "assignment": _assignment, "calls": _whole, "ranks": _ranks,
    },
    Entry: {
        "seq": _natural, "phase": Phase, "round": _natural, "epoch": _text, "by": _text,
        "cause": _cause, "reason": _text, "notify_from": _whole, "active": _natural,
        "world_size": _natural, "master_addr": _text, "master_port": _port,
        "restart_ages_s": _ages, "is_controlled": _flag, "is_leaving": _flag,
        "save_at": _whole, "hang": _natural, "clocks": _text, "reputation": _reputation,
    },
    HostReputation: {"failures": _failures, "named": _named, "unhealthy": _texts},
    RankAssignment: {
        "round": _natural, "group_rank": _natural, "rank_offset": _natural,
        "clock_off_s": _seconds,
    },
    RankState: {
        "rank": _natural, "activity": Activity, "host": _text, "words": _text, "place": _text,
        "is_late": _flag, "has_moved": _flag, "progress": _progress,
    },
    Cause: {
        "kind": _text, "what": _text, "rank": _whole, "local_rank": _whole, "host": _text,
        "exit_code": _whole, "signal": _whole, "detected_by": _text, "detail": _detail,
    },
}  # fmt: skip
