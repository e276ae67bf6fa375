# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks and their monitor; values only.

Each direction has its own closed set. A rank begins with `Hello`, its page attached; every message
may come twice, after a monitor was replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvidia_resiliency_ext.inprocess._protocol.decision import Decision, decode_decision
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.shared_utils.wire import MessageSet

START_LIMIT_S = 10.0
"""How long a rank waits for its monitor."""


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """Times and names of one call of a wrapped function; equal on all ranks.

    `store_factory` is a `module:qualname`, `store_file` its source file, `store_kwargs` the text of
    `factory.dump_kwargs`. `{rank}` is filled in in the absolute paths `log_file` and `pid_file`.
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


VERSION = 7
WAITED = "waited"
"""In `Arrived`: the rank waited for its peers, or a collective that failed sent it here."""


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
class Arrived:
    """The rank is ready for the next iteration, and was in this `call` at this `place`."""

    iteration: int
    call: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """The rank leaves the call: lost, discarded by rank assignment, or because it is over.

    The monitor sends it back once it speaks for the rank.
    """

    is_lost: bool
    is_discarded: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the monitor to send this back: the rank has received nothing for a while."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The monitor serves the rank."""

    pid: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The monitor will not serve the rank."""

    text: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Event: the iteration is interrupted, and the last call for faults, of so long, is over."""

    iteration: int
    records: tuple[InterruptionRecord, ...]
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Completed:
    """The rank's function has returned; as an event: all ranks have completed the call."""

    iteration: int


@dataclass(frozen=True, slots=True)
class StoreLost:
    """Event: the store is lost, so that no iteration can be decided."""

    text: str


@dataclass(frozen=True, slots=True)
class Decided:
    """Event: the iteration is decided; `text` is the decision's."""

    iteration: int
    text: str

    @property
    def decision(self) -> Decision:
        return decode_decision(self.text)


Event = Interrupted | Completed | Decided | StoreLost
FROM_RANK = MessageSet(
    Hello, MonitorSettings, Begun, Reported, Interruption, Completed, Arrived, Left, Probe
)
TO_RANK = MessageSet(
    Welcome,
    Refused,
    Probe,
    Left,
    Decided,
    Interrupted,
    InterruptionRecord,
    Interruption,
    Completed,
    StoreLost,
)
