# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks and their monitor; values only.

Each direction has its own closed set. A rank begins with `Hello`, its page attached; every message
may come twice, after a monitor was replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvidia_resiliency_ext.inprocess._protocol.decision import Decision
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.shared_utils.wire import MessageSet

START_LIMIT_S = 10.0
"""How long a rank waits for its monitor."""


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """Times and names of one call of a wrapped function; equal on all ranks.

    Attributes:
        prefix: What stands before every key of the call.
        store_factory: `module:qualname` of what makes the store.
        store_file: Source file of that module, for one that cannot be imported by name.
        store_kwargs: Arguments of the factory, as text (`factory.dump_kwargs`).
        log_file: Absolute path of the rank's log file, "" for none; `{rank}` is filled in.
        pid_file: Absolute path of the rank's pid file, "" for none; `{rank}` is filled in.
        heartbeat_timeout_s: Age of a lease at which a node counts as lost.
        soft_timeout_s: Age of a stamp at which a restart is asked for.
        hard_timeout_s: Age of a stamp at which the process is killed.
        barrier_timeout_s: How long ranks wait for each other.
        last_call_wait_s: How long faults are collected after the first one.
        termination_grace_s: From SIGTERM to SIGKILL.
    """

    prefix: str
    store_factory: str
    store_file: str = ""
    store_kwargs: str = "{}"
    log_file: str = ""
    pid_file: str = ""
    interval_s: float = 1.0
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 30.0
    soft_timeout_s: float = 60.0
    hard_timeout_s: float = 90.0
    barrier_timeout_s: float = 120.0
    last_call_wait_s: float = 1.0
    termination_grace_s: float = 5.0


VERSION = 5
WAITED = "waited"
"""In `Arrived`: the rank waited for its peers, or a collective that failed sent it here."""
_PART_CHARACTERS = 400_000


@dataclass(frozen=True, slots=True)
class Begun:
    """The rank begins an iteration; `participants` are initial ranks, packed."""

    iteration: int
    rank: int
    world_size: int
    participants: str


@dataclass(frozen=True, slots=True)
class Hello:
    """Connect, for the first time or again; the page and any stack file are attached."""

    version: int
    settings: MonitorSettings
    initial_rank: int
    world_size: int
    begun: Begun | None
    dump_signal: int = 0


@dataclass(frozen=True, slots=True)
class Reported:
    """Something went wrong on the rank."""

    iteration: int
    interruption: Interruption


@dataclass(frozen=True, slots=True)
class Done:
    """The rank's function has returned."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """The rank is ready for the next iteration, and was in this `call` at this `place`."""

    iteration: int
    call: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """The rank leaves the call: lost, discarded by rank assignment, or because it is over."""

    is_lost: bool
    is_discarded: bool


@dataclass(frozen=True, slots=True)
class AreYouThere:
    """The rank has heard nothing for a while."""


@dataclass(frozen=True, slots=True)
class Here:
    """The monitor is there."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The monitor serves the rank."""

    pid: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The monitor will not serve the rank."""

    text: str


@dataclass(frozen=True, slots=True)
class LeaveAcknowledged:
    """The monitor knows that the rank leaves, and speaks for it from now on."""


@dataclass(frozen=True, slots=True)
class DecisionPart:
    """A piece of a decision's text."""

    iteration: int
    number: int
    count: int
    text: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Event: the iteration is interrupted, and the last call for faults, of so long, is over."""

    iteration: int
    records: tuple[InterruptionRecord, ...]
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Completed:
    """Event: all ranks have completed; the call is over."""

    iteration: int


@dataclass(frozen=True, slots=True)
class StoreLost:
    """Event: the store is lost, so that no iteration can be decided."""

    text: str


@dataclass(frozen=True, slots=True)
class Decided:
    """Event: the decision, with the ranks that continue."""

    iteration: int
    decision: Decision


Event = Interrupted | Completed | Decided | StoreLost
FROM_RANK = MessageSet(
    Hello, MonitorSettings, Begun, Reported, Interruption, Done, Arrived, Left, AreYouThere
)
TO_RANK = MessageSet(
    Welcome,
    Refused,
    Here,
    LeaveAcknowledged,
    DecisionPart,
    Interrupted,
    InterruptionRecord,
    Interruption,
    Completed,
    StoreLost,
)


def split_decision(iteration: int, text: str) -> list[DecisionPart]:
    """Return a decision's text in pieces that fit a frame."""
    starts = range(0, max(len(text), 1), _PART_CHARACTERS)
    return [
        DecisionPart(iteration, number, len(starts), text[start : start + _PART_CHARACTERS])
        for number, start in enumerate(starts)
    ]
