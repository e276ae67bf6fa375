# SPDX-License-Identifier: Apache-2.0
"""State, events and effects of one node, as `decide` takes and gives them. Values only.

Some events are effects as well: what another part of this node has to do is what they say.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nvidia_resiliency_ext.fault_tolerance.data import WorkloadAction, WorkloadControlRequest
from nvidia_resiliency_ext.shared_utils.children import ExitStatus

EXIT_OK = 0
EXIT_FAILURE = 1
ATTRIBUTION = "attribution"  # The kind of a cause that the attribution service names.


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a cycle ended: machine-readable, and said to every node."""

    kind: str
    what: str
    rank: int | None = None
    local_rank: int | None = None
    host: str = ""
    exit_code: int | None = None
    signal: int | None = None
    detected_by: str = "launcher"
    detail: Mapping[str, object] = field(default_factory=dict)


class Phase(enum.Enum):
    """Where a node stands in the life of one cycle."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    WAITING = "waiting"
    FINISHED = "finished"


class Outcome(enum.Enum):
    """Next action of a node once its workers are stopped."""

    RESTART = "restart"
    FAIL = "fail"
    NO_RESTART = "no_restart"
    SIGNALLED = "signalled"
    LEAVE = "leave"
    OVER = "over"
    TOLERATED = "tolerated"


@dataclass(frozen=True, slots=True)
class Assignment:
    """This node's rank assignment in a round, as the coordinator decided it."""

    cycle: int
    group_rank: int
    group_world_size: int
    rank_offset: int
    world_size: int
    master_addr: str
    master_port: int
    restart_ages_s: tuple[float, ...] = ()
    clock_off_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of this node's decisions, and its role in the job."""

    max_restarts: int
    stop_grace_s: float
    signal_grace_s: float
    no_restart_exit_code: int
    many_nodes: bool = False
    is_store_host: bool = False
    min_healthy: bool = False
    host: str = ""

    @property
    def serves_others(self) -> bool:
        """Whether the job of other nodes ends with this launcher."""
        return self.many_nodes and self.is_store_host


@dataclass(frozen=True, slots=True)
class Node:
    """The state of this node. `running` holds the local ranks that have not exited."""

    policy: Policy
    phase: Phase = Phase.JOINING
    cycle: int = 0
    running: frozenset[int] = frozenset()
    unclean: frozenset[int] = frozenset()
    outcome: Outcome | None = None
    cause: Cause | None = None
    stop_signal: int | None = None
    requests: tuple[tuple[WorkloadAction, str], ...] = ()
    group_world_size: int = 1
    over: RoundClosed | None = None
    budget: int | None = None
    leaving: Cause | None = None  # Why this round's ranks save and leave.
    must_go: bool = False  # It is this node that leaves: it takes part in no further round.


def restarts_left(node: Node) -> int:
    """Return how many restarts the job still has; the cycle number is global to the job."""
    if node.budget is not None:
        return node.budget
    return max(0, node.policy.max_restarts - node.cycle)


def agreed_call(calls: Iterable[int]) -> int:
    """Return the call at which all ranks save, from how often each has called."""
    return max(calls, default=0) + 1


@dataclass(frozen=True, slots=True)
class _Caused:
    """Events and effects that say nothing but why."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class RoundReady:
    """Rendezvous is complete; as an effect: start the workers with these local ranks."""

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
    """This node cannot reach the others any more, or must not go on beside them."""

    what: str
    stop_within_s: float  # Its workers are killed then.


@dataclass(frozen=True, slots=True)
class JoinTimedOut:
    """The round this node has joined did not close in time."""

    what: str


class NodeUnfit(_Caused):
    """This node failed its health check before it joined a round."""


@dataclass(frozen=True, slots=True)
class BarrierTimedOut:
    """The other nodes did not end in time after this one succeeded."""


class NextRoundOpened(_Caused):
    """Another node saw a fault and opened the next round."""


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker is gone; `cause` says how when it failed."""

    local_rank: int
    status: ExitStatus
    cause: Cause | None = None
    no_progress: bool = False  # The tracker says so.
    is_hopeless: bool = False  # See `StartFailures`.


class WorkerStuck(_Caused):
    """A worker survived SIGKILL: the kernel holds it, and it will not exit."""


@dataclass(frozen=True, slots=True)
class RanksAsked:
    """The job hangs: the coordinator asks for the states of this node's ranks."""


@dataclass(frozen=True, slots=True)
class HangEvaluated:
    """The coordinator has named the culprit of a hang; see `WorkerExited`."""

    cause: Cause
    no_progress: bool = False


class StartFailed(_Caused):
    """The workers could not be started; the machine said why."""


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
    """The job is to end and not to be started again; `reason` goes to the others."""

    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """A rank asked for a change at the next rendezvous."""

    request: WorkloadAction
    description: str


class Preempted(_Caused):
    """This node must go soon; as an effect: tell the other nodes."""


class RoundLeaves(_Caused):
    """The ranks of all nodes are to save and leave; as an effect: ask those of this one."""


@dataclass(frozen=True, slots=True)
class RanksHeld:
    """No rank here gets out of another call, the furthest made `calls`; as an effect: tell it."""

    calls: int


@dataclass(frozen=True, slots=True)
class SaveAgreed:
    """The ranks of all nodes save at their call number `at`; as an effect: tell those here."""

    at: int


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The time is over in which this node's ranks could save and leave."""


Event = (
    RoundReady | RoundClosed | NextRoundOpened | StoreLost | JoinTimedOut | NodeUnfit
    | BarrierTimedOut | WorkerExited | WorkerStuck | RanksAsked | HangEvaluated | StartFailed
    | GroupStopped | Signalled | BudgetChanged | RequestReceived | Preempted | RoundLeaves
    | RanksHeld | SaveAgreed | GraceOver | StopRequested
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Join:
    cycle: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Send `signum` to each worker's group; SIGKILL what is left after `grace_s`."""

    signum: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class KillWorkers:
    """SIGKILL every worker's group now."""


@dataclass(frozen=True, slots=True)
class ReportFault:
    """Write the fault to the log and the record."""

    cause: Cause
    outcome: Outcome
    restarts_left: int


class OpenNextRound(_Caused):
    """Announce to the other nodes that a restart begins, with its cause."""


@dataclass(frozen=True, slots=True)
class CloseRendezvous:
    """Announce to all nodes that there is no further round."""

    reason: str
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class ReportSuccess:
    """Announce that all workers of this node ended well, and wait for those of other nodes."""


@dataclass(frozen=True, slots=True)
class ReportBroken:
    """Report failed workers of this node to the coordinator, which decides on a restart."""

    cause: Cause
    all_gone: bool


class LeaveRendezvous(_Caused):
    """Announce that this node leaves the job."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Leave with this exit code; `no_restart` says why the job must not be started again."""

    exit_code: int
    reason: str
    no_restart: str = ""


Effect = (
    Join | RoundReady | StopWorkers | KillWorkers | ReportFault | OpenNextRound
    | CloseRendezvous | ReportSuccess | ReportBroken | LeaveRendezvous | Finish
    | Preempted | RoundLeaves | RanksHeld | SaveAgreed
)  # fmt: skip
logger = logging.getLogger("nvrx")


def request_event(message: object) -> RequestReceived | None:
    """Return the event of a `(global rank, WorkloadControlRequest)`, or None for nothing to do."""
    if not (isinstance(message, (tuple, list)) and len(message) == 2):  # noqa: PLR2004  # a pair
        logger.warning("a rank sent a message that is no request: %.200r", message)
        return None
    rank, request = message
    if not isinstance(request, WorkloadControlRequest):
        logger.warning("rank %s sent a message that is no request: %.200r", rank, request)
        return None
    logger.info("rank %s asks: %s (%s)", rank, request.action.name, request.description)
    if request.action is WorkloadAction.Continue:
        return None
    return RequestReceived(request.action, f"rank {rank}: {request.description}")
