# SPDX-License-Identifier: Apache-2.0
"""What can happen to a node, as `decide` takes it. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils.children import ExitStatus

from .cause import Cause
from .leaving import GraceOver, Preempted, RanksHeld, RoundLeaves, SaveAgreed
from .node_state import Assignment, Request


@dataclass(frozen=True, slots=True)
class RoundReady:
    """Rendezvous is complete; `local_ranks` are to be started here."""

    assignment: Assignment
    local_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """Rendezvous was closed for everybody."""

    reason: str
    no_restart: bool = False
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class StoreLost:
    """This node cannot reach the others any more, or must not go on beside them.

    `stop_within_s` is how long its workers may take to end before they are killed.
    """

    what: str
    stop_within_s: float


@dataclass(frozen=True, slots=True)
class JoinTimedOut:
    """The round this node has joined did not close in time."""

    what: str


@dataclass(frozen=True, slots=True)
class NodeUnfit:
    """This node failed its health check before it joined a round."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class BarrierTimedOut:
    """The other nodes did not end in time after this one succeeded."""


@dataclass(frozen=True, slots=True)
class NextRoundOpened:
    """Another node saw a fault and opened the next round."""

    cause: Cause
    no_restart: bool = False
    no_progress: bool = False


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker is gone. `cause` says how when it failed; `no_progress` comes from the tracker."""

    local_rank: int
    status: ExitStatus
    cause: Cause | None = None
    no_progress: bool = False


@dataclass(frozen=True, slots=True)
class WorkerStuck:
    """A worker survived SIGKILL: the kernel holds it, and it will not exit."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class RanksAsked:
    """The job hangs: the others want to know what the ranks of this node do."""


@dataclass(frozen=True, slots=True)
class HangJudged:
    """All nodes together have found whom a hang is to be blamed on; see `WorkerExited`."""

    cause: Cause
    no_progress: bool = False


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The workers could not be started; the machine said why."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class GroupStopped:
    """No worker of the cycle is left, or those in `unkillable` were given up."""

    unkillable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher got a signal that asks it to end."""

    signum: int


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """So many restarts are left now, for a budget that refills; else the cycle's number tells."""

    left: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The job is to end and not to be started again; `reason` is what the others are told."""

    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """A rank asked for a change at the next rendezvous."""

    request: Request
    description: str


Event = (
    RoundReady
    | RoundClosed
    | NextRoundOpened
    | StoreLost
    | JoinTimedOut
    | NodeUnfit
    | BarrierTimedOut
    | WorkerExited
    | WorkerStuck
    | RanksAsked
    | HangJudged
    | StartFailed
    | GroupStopped
    | Signalled
    | BudgetChanged
    | RequestReceived
    | Preempted
    | RoundLeaves
    | RanksHeld
    | SaveAgreed
    | GraceOver
    | StopRequested
)
