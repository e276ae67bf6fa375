# SPDX-License-Identifier: Apache-2.0
"""What nodes and the rendezvous host tell each other through the store. Pure.

Whoever reaches the store's port can write to it: values are untrusted until `decode` takes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.shared_utils.errors import FrameTooLargeError, NvrxError, WireError
from nvidia_resiliency_ext.shared_utils.hang_culprit import RankState
from nvidia_resiliency_ext.shared_utils.rank_activity import Activity
from nvidia_resiliency_ext.shared_utils.wire import MessageSet

MAX_VALUE_BYTES = 64 * 1024
MAX_LINE_BYTES = MAX_VALUE_BYTES - 1024
MAX_TEXT = 4096
_TEXT_LIMITS = (MAX_TEXT, MAX_TEXT // 8, MAX_TEXT // 64)
_MAX_WHOLE = 1 << 62
_MAX_PORT = 65535
_MAX_COMPLAINT = 200
_MAX_WORKERS = 4096


class ForeignValueError(NvrxError):
    """A value in the store was not written by this job's launchers."""


class Phase(enum.Enum):
    """Where the job stands between two entries of the log."""

    OPEN = "open"
    CLOSED = "closed"
    OVER = "over"


class WorkerState(enum.Enum):
    """State of a node's workers as the node reports it; UNKNOWN stands for a lost node."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Kind(enum.Enum):
    """Subject of a message to the coordinator."""

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
    """A node that offers itself for a round, with the facts that its rank depends on."""

    node: str
    addr: str
    host: str = ""
    infra_rank: int = -1
    domain: str = "none"
    group: str | None = None
    nproc: int = 1
    master_port: int = 0
    previous_rank: int | None = None
    clock: float | None = None  # Its wall clock (unix s), compared with others'.

    def __post_init__(self) -> None:
        _check_range("nproc", self.nproc, 1, _MAX_WORKERS)
        _check_range("master_port", self.master_port, 0, _MAX_PORT)


@dataclass(frozen=True, slots=True)
class Entry:
    """A decision that holds for everybody, with all that a node that joins must know."""

    seq: int  # Its number; each is created once, by compare-and-set.
    phase: Phase  # What the job is in from here on.
    round: int  # The round that is open or closed.
    epoch: str = ""  # Which life of the store this is.
    by: str = ""  # The node that decided.
    cause: Cause | None = None  # Why a round was opened or the job ended; what a hang is due to.
    reason: str = ""  # The word for the end of a job.
    notify_from: int = 1  # How many must have arrived before a further one wakes the host.
    active: int = 0  # Nodes with a place, when closed.
    world_size: int = 0  # Ranks in the job, when closed.
    master_addr: str = ""  # Address of rank 0, when closed.
    master_port: int = 0  # Port of rank 0, when closed.
    restart_ages_s: tuple[float, ...] = ()  # How long ago each was, for a budget with a window.
    is_controlled: bool = False  # Whether the store outlives the nodes: it is not in a launcher.
    is_leaving: bool = False  # Whether the ranks of the closed round are to save and leave.
    save_at: int = 0  # At which call of `should_checkpoint` they do, once that is agreed.
    clocks: str = ""  # Whose clock is off, in words for everybody's log.
    hang: HangStage = HangStage.NONE  # How far the nodes are in finding the culprit of a hang.

    def __post_init__(self) -> None:
        for name in ("seq", "round", "active", "world_size"):
            _check_range(name, getattr(self, name), 0)
        _check_range("master_port", self.master_port, 0, _MAX_PORT)

    def again(self, by: str, **fields: Any) -> Entry:
        """Return the decision after this one that says the same but for `fields`."""
        return dataclasses.replace(self, **{"seq": self.seq + 1, "by": by, **fields})

    def next(self, by: str, phase: Phase, round_: int, **fields: Any) -> Entry:
        """Return the decision after this one, with those of its fields that hold for the job."""
        kept = {name: getattr(self, name) for name in _OF_THE_JOB}
        return Entry(self.seq + 1, phase, round_, by=by, **kept, **fields)

    def opened(self, by: str, cause: Cause) -> Entry:
        return self.next(by, Phase.OPEN, self.round + 1, cause=cause)

    def over(self, by: str, reason: str, cause: Cause | None = None) -> Entry:
        return self.next(by, Phase.OVER, self.round, reason=reason, cause=cause)

    def follows(self, before: Entry) -> bool:
        """Return whether this entry decides more than `before`; that of a resumed round may not."""
        return self._says() != before._says()

    def _says(self) -> tuple[object, ...]:
        return self.phase, self.round, self.is_leaving, self.save_at, self.hang


_OF_THE_JOB = ("epoch", "notify_from", "restart_ages_s", "is_controlled")


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """A node's part in a closed round; spares have none."""

    round: int
    group_rank: int
    rank_offset: int = 0
    clock_off_s: float = 0.0  # How far its clock is ahead of the others'; 0: it agrees.

    def __post_init__(self) -> None:
        for name in ("round", "group_rank", "rank_offset"):
            _check_range(name, getattr(self, name), 0)


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """A message to the coordinator."""

    kind: Kind
    node: str
    arrival: Arrival | None = None
    state: WorkerState | None = None
    cause: Cause | None = None
    text: str = ""
    entry: Entry | None = None  # Of a lost store, as `assignment`.
    assignment: RankAssignment | None = None
    calls: int = 0
    ranks: tuple[RankState, ...] = ()  # In a hang; with `cause` a limit was broken here.

    def __post_init__(self) -> None:
        for state in self.ranks:
            for number in (state.rank, *(state.progress or ())):
                _check_range("rank or progress", number, 0)


_MESSAGES = MessageSet(
    Activity, Arrival, Cause, Entry, HangStage, Kind, NodeMessage, Phase,
    RankAssignment, RankState, WorkerState,
)  # fmt: skip
_Record = TypeVar("_Record", Arrival, NodeMessage, Entry, RankAssignment)


def encode(record: Arrival | NodeMessage | Entry | RankAssignment) -> str:
    """Return one line of ASCII without a newline; texts that are too long are cut."""
    for limit in _TEXT_LIMITS[:-1]:
        with contextlib.suppress(FrameTooLargeError):
            line = _MESSAGES.encode_payload(_cut(record, limit)).decode("ascii")
            # Beyond ASCII a character takes up to twelve bytes here.
            if len(line) <= MAX_LINE_BYTES:
                return line
    return _MESSAGES.encode_payload(_cut(record, _TEXT_LIMITS[-1])).decode("ascii")


def decode(kind: type[_Record], text: str | bytes) -> _Record:
    """Return the record of `kind` in `text`. Raises ForeignValueError: it is anything else."""
    name = f"{'an' if kind.__name__[0] in 'AE' else 'a'} {kind.__name__}"
    try:
        record = _MESSAGES.decode(text.encode() if isinstance(text, str) else text)
        if _cut(record, MAX_TEXT) != record:
            raise ForeignValueError(f"not {name}: texts or details that nobody writes")
    except (ValueError, WireError) as error:
        raise ForeignValueError(f"not {name}: {_printable(error)}") from None
    if not isinstance(record, kind):
        raise ForeignValueError(f"not {name}, but {_printable(record)}")
    return record


def _printable(value: object) -> str:
    """Return a foreign value for the log, short and in one line."""
    return repr(str(value)[:_MAX_COMPLAINT])[1:-1][:_MAX_COMPLAINT]


def _cut(value: Any, limit: int) -> Any:
    """Return a value with its texts cut, and with only the plain, small details of a cause."""
    if isinstance(value, str):
        return value[:limit].encode("utf-8", "replace").decode()
    if isinstance(value, (int, float)) and not _is_plain(value):
        raise ValueError("a number is too large, or none")
    if isinstance(value, tuple):
        return tuple(_cut(item, limit) for item in value)
    if isinstance(value, Mapping):
        return _cut_detail(value, limit)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return type(value)(**{f.name: _cut(getattr(value, f.name), limit) for f in fields})
    return value


def _cut_detail(detail: Mapping[str, object], limit: int) -> dict[str, object]:
    kept: dict[str, object] = {}
    left = 2 * limit
    for key, value in detail.items():
        if _is_plain(value):
            short = _cut(value, limit)
            left -= len(str(key)) + len(str(short))
            if left < 0:
                break
            kept[_cut(str(key), limit)] = short
    return kept


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value) and abs(value) < _MAX_WHOLE
    if isinstance(value, int):
        return abs(value) < _MAX_WHOLE
    return isinstance(value, str)


def _check_range(name: str, value: int, least: int, most: int = _MAX_WHOLE) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}={value} is not from {least} to {most}")
