# SPDX-License-Identifier: Apache-2.0
"""What a node does about what happens to it: the launcher's decisions, and no effects.

`decide(node, event) -> (node, effects)` is a pure function. The loop in `agent.py` feeds it
events and performs the effects; nothing here reads a clock, a file or a process.

    phase      event                     next       effects
    JOINING    RoundReady                RUNNING    StartWorkers
    JOINING    RoundClosed               FINISHED   Finish
    JOINING    Signalled                 FINISHED   CloseRendezvous, Finish
    RUNNING    WorkerExited (0, last)    FINISHED   CloseRendezvous, Finish(0)
    RUNNING    WorkerExited (failed)     STOPPING   ReportFault, [OpenNextRound], StopWorkers
    RUNNING    NextRoundOpened           STOPPING   StopWorkers
    RUNNING    StartFailed               STOPPING   ReportFault, StopWorkers
    RUNNING    Signalled                 STOPPING   StopWorkers (the same signal)
    RUNNING    WorkerStuck               STOPPING   ReportFault, [OpenNextRound], StopWorkers
    STOPPING   Signalled (SIGINT again)  STOPPING   KillWorkers
    STOPPING   Signalled (first)         STOPPING   StopWorkers; no restart follows
    STOPPING   GroupStopped              JOINING    Join          (a restart was decided)
    STOPPING   GroupStopped              FINISHED   Finish        (otherwise)
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from nvidia_resiliency_ext.fault_tolerance._infra.rdzv_reasons import (
    RDZV_SHUTDOWN_REASON_FAILURE,
    RDZV_SHUTDOWN_REASON_GRACEFUL,
    RDZV_SHUTDOWN_REASON_NO_PROGRESS,
)
from nvidia_resiliency_ext.shared_utils.children import ExitStatus

EXIT_OK = 0
EXIT_FAILURE = 1


class Phase(enum.Enum):
    """Where a node stands in the life of one cycle."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


class Outcome(enum.Enum):
    """What follows once the workers are stopped."""

    RESTART = "restart"
    FAIL = "fail"
    NO_RESTART = "no_restart"
    SIGNALLED = "signalled"


class Request(enum.Enum):
    """What a rank asked the launcher to do at the next rendezvous."""

    EXCLUDE_NODE = "exclude_node"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Assignment:
    """This node's place in a round: what rendezvous decided."""

    cycle: int
    group_rank: int
    group_world_size: int
    rank_offset: int
    world_size: int
    master_addr: str
    master_port: int


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


@dataclass(frozen=True, slots=True)
class Policy:
    """The numbers a decision needs."""

    max_restarts: int
    stop_grace_s: float
    signal_grace_s: float
    no_restart_exit_code: int


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
    requests: tuple[tuple[Request, str], ...] = ()


# Events ---------------------------------------------------------------------------------------


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
class RequestReceived:
    """A rank asked for a change at the next rendezvous."""

    request: Request
    description: str


Event = (
    RoundReady
    | RoundClosed
    | NextRoundOpened
    | WorkerExited
    | WorkerStuck
    | StartFailed
    | GroupStopped
    | Signalled
    | RequestReceived
)


# Effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """Join the rendezvous of `cycle`."""

    cycle: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start the workers of this round."""

    assignment: Assignment


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


@dataclass(frozen=True, slots=True)
class OpenNextRound:
    """Tell the other nodes that a restart begins, and why."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class CloseRendezvous:
    """Tell everybody that there is no further round."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Leave with this exit code."""

    exit_code: int
    reason: str


Effect = (
    Join
    | StartWorkers
    | StopWorkers
    | KillWorkers
    | ReportFault
    | OpenNextRound
    | CloseRendezvous
    | Finish
)
Decision = tuple[Node, tuple[Effect, ...]]


def restarts_left(node: Node) -> int:
    """Return how many restarts the job still has; the cycle number is global to the job."""
    return max(0, node.policy.max_restarts - node.cycle)


def decide(node: Node, event: Event) -> Decision:
    """Return the next state and what is to be done; events that no longer matter do nothing."""
    if isinstance(event, RequestReceived):
        return _note_request(node, event)
    if node.phase is Phase.JOINING:
        return _while_joining(node, event)
    if node.phase is Phase.RUNNING:
        return _while_running(node, event)
    if node.phase is Phase.STOPPING:
        return _while_stopping(node, event)
    return node, ()


def _note_request(node: Node, event: RequestReceived) -> Decision:
    if node.phase is Phase.FINISHED:
        return node, ()
    noted = (*node.requests, (event.request, event.description))
    return dataclasses.replace(node, requests=noted), ()


def _while_joining(node: Node, event: Event) -> Decision:
    if isinstance(event, RoundReady):
        started = dataclasses.replace(
            node,
            phase=Phase.RUNNING,
            cycle=event.assignment.cycle,
            running=frozenset(event.local_ranks),
            unclean=frozenset(),
            outcome=None,
            cause=None,
        )
        return started, (StartWorkers(event.assignment),)
    if isinstance(event, RoundClosed):
        code = node.policy.no_restart_exit_code if event.no_restart else EXIT_FAILURE
        return _finished(node), (Finish(code, event.reason),)
    if isinstance(event, Signalled):
        name = signal.Signals(event.signum).name
        return _finished(node), (
            CloseRendezvous(RDZV_SHUTDOWN_REASON_GRACEFUL),
            Finish(EXIT_FAILURE, name),
        )
    return node, ()


def _while_running(node: Node, event: Event) -> Decision:
    if isinstance(event, WorkerExited):
        return _exited(node, event)
    if isinstance(event, WorkerStuck):
        return _fault(node, event.cause, no_progress=False, opens=True)
    if isinstance(event, StartFailed):
        # Starting failed for a reason of this machine; the same start would fail again.
        stop = StopWorkers(signal.SIGTERM, node.policy.stop_grace_s)
        failed = dataclasses.replace(
            node, phase=Phase.STOPPING, outcome=Outcome.FAIL, cause=event.cause
        )
        return failed, (ReportFault(event.cause, Outcome.FAIL, 0), stop)
    if isinstance(event, NextRoundOpened):
        if event.no_restart:
            return _stop(node, event.cause, Outcome.NO_RESTART)
        return _fault(node, event.cause, no_progress=event.no_progress, opens=False)
    if isinstance(event, Signalled):
        return _signalled(node, event.signum)
    return node, ()


def _exited(node: Node, event: WorkerExited) -> Decision:
    node = _without(node, event)
    if event.cause is not None:
        return _fault(node, event.cause, no_progress=event.no_progress, opens=True)
    if node.running:
        return node, ()
    done = _finished(node)
    return done, (
        CloseRendezvous(RDZV_SHUTDOWN_REASON_GRACEFUL),
        Finish(EXIT_OK, "all workers succeeded"),
    )


def _while_stopping(node: Node, event: Event) -> Decision:
    if isinstance(event, WorkerExited):
        return _without(node, event), ()
    if isinstance(event, Signalled):
        if node.stop_signal is not None:
            again = event.signum == signal.SIGINT
            return node, (KillWorkers(),) if again else ()
        return _signalled(node, event.signum)
    if isinstance(event, GroupStopped):
        return _after_stop(node, event)
    return node, ()


def _without(node: Node, event: WorkerExited) -> Node:
    clean = event.status.code == 0 and event.cause is None
    return dataclasses.replace(
        node,
        running=node.running - {event.local_rank},
        unclean=node.unclean if clean else node.unclean | {event.local_rank},
    )


def _fault(node: Node, cause: Cause, *, no_progress: bool, opens: bool) -> Decision:
    left = restarts_left(node)
    if no_progress:
        outcome = Outcome.NO_RESTART
    elif left > 0:
        outcome = Outcome.RESTART
    else:
        outcome = Outcome.FAIL
    node, stop = _stop(node, cause, outcome)
    before: tuple[Effect, ...] = (ReportFault(cause, outcome, left),)
    if outcome is Outcome.RESTART and opens:
        before += (OpenNextRound(cause),)
    elif outcome is Outcome.NO_RESTART and opens:
        before += (CloseRendezvous(RDZV_SHUTDOWN_REASON_NO_PROGRESS),)
    return node, before + stop


def _stop(node: Node, cause: Cause, outcome: Outcome) -> Decision:
    stopping = dataclasses.replace(node, phase=Phase.STOPPING, outcome=outcome, cause=cause)
    return stopping, (StopWorkers(signal.SIGTERM, node.policy.stop_grace_s),)


def _signalled(node: Node, signum: int) -> Decision:
    # A stop that was to end the job for good keeps its reason and its exit code.
    final = node.outcome in (Outcome.NO_RESTART, Outcome.FAIL)
    stopping = dataclasses.replace(
        node,
        phase=Phase.STOPPING,
        outcome=node.outcome if final else Outcome.SIGNALLED,
        stop_signal=signum,
    )
    return stopping, (StopWorkers(signum, node.policy.signal_grace_s),)


def _after_stop(node: Node, event: GroupStopped) -> Decision:
    finished = _finished(node)
    if node.outcome is Outcome.SIGNALLED:
        clean = not node.unclean and not event.unkillable
        name = signal.Signals(node.stop_signal or signal.SIGTERM).name
        code = EXIT_OK if clean else EXIT_FAILURE
        return finished, (
            CloseRendezvous(RDZV_SHUTDOWN_REASON_GRACEFUL),
            Finish(code, f"ended by {name}"),
        )
    if event.unkillable:
        ranks = ", ".join(str(rank) for rank in event.unkillable)
        reason = f"local rank {ranks} survived SIGKILL: this node is unhealthy"
        return finished, (Finish(EXIT_FAILURE, reason),)
    if node.outcome is Outcome.NO_RESTART:
        what = node.cause.what if node.cause else "no restart requested"
        return finished, (Finish(node.policy.no_restart_exit_code, f"no restart: {what}"),)
    # Shutting down is asked for all nodes, excluding for this one: the former includes the latter.
    asked = dict(reversed(node.requests))
    if (why := asked.get(Request.SHUTDOWN)) is not None:
        reason = f"a rank asked to shut the workload down: {why}"
        return finished, (
            CloseRendezvous(RDZV_SHUTDOWN_REASON_FAILURE),
            Finish(EXIT_FAILURE, reason),
        )
    if (why := asked.get(Request.EXCLUDE_NODE)) is not None:
        return finished, (Finish(EXIT_FAILURE, f"a rank asked to exclude this node: {why}"),)
    if node.outcome is Outcome.RESTART:
        joining = dataclasses.replace(node, phase=Phase.JOINING, outcome=None)
        return joining, (Join(node.cycle + 1, node.cause),)
    what = node.cause.what if node.cause else "workers failed"
    return finished, (CloseRendezvous(RDZV_SHUTDOWN_REASON_FAILURE), Finish(EXIT_FAILURE, what))


def _finished(node: Node) -> Node:
    return dataclasses.replace(node, phase=Phase.FINISHED)
