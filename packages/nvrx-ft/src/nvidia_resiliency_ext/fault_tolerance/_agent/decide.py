# SPDX-License-Identifier: Apache-2.0
"""What a node does about what happens to it: the launcher's decisions, and no effects.

`decide` is a pure function: the loop in `agent.py` feeds it events and performs the effects. The
tables at the end say which event matters in which phase; the functions stand in their order.
"""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Callable, Mapping
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._core import errors, machine
from nvidia_resiliency_ext.fault_tolerance._core.machine import (
    ATTRIBUTION,
    Cause,
    Effect,
    Finish,
    Node,
    Outcome,
    Phase,
)
from nvidia_resiliency_ext.fault_tolerance.data import WorkloadAction

Decision = tuple[Node, tuple[Effect, ...]]


def decide(node: Node, event: machine.Event) -> Decision:
    """Return the next state and the effects of an event; an outdated event has none."""
    handler = _IN_ANY_PHASE.get(type(event)) or _BY_PHASE[node.phase].get(type(event))
    if handler is None and node.phase is Phase.STOPPING and node.outcome is Outcome.RESTART:
        handler = _BEFORE_A_RESTART.get(type(event))
    return (node, ()) if handler is None else handler(node, event)


def _no_restart(node: Node, event: machine.StopRequested) -> Decision:
    """End the job for everybody, whatever this node does at the moment."""
    ends = machine.CloseRendezvous(event.reason, event.cause)
    if node.phase in (Phase.JOINING, Phase.WAITING, Phase.FINISHED):
        reason = f"no restart: {event.cause.what}"
        finish = Finish(node.policy.no_restart_exit_code, reason, event.reason)
        return _finished(node), (ends, finish)
    if node.phase is Phase.STOPPING and node.outcome is Outcome.RESTART:
        stopping = dataclasses.replace(node, outcome=Outcome.NO_RESTART, cause=event.cause)
        return stopping, (ends,)
    if node.phase is Phase.RUNNING:
        node, stop = _stop(node, event.cause, Outcome.NO_RESTART)
        return node, (machine.ReportFault(event.cause, Outcome.NO_RESTART, 0), ends, *stop)
    return node, ()


def _budget_changed(node: Node, event: machine.BudgetChanged) -> Decision:
    return dataclasses.replace(node, budget=event.left), ()


def _record_request(node: Node, event: machine.RequestReceived) -> Decision:
    if node.phase is Phase.FINISHED:
        return node, ()
    noted = (*node.requests, (event.request, event.description))
    return dataclasses.replace(node, requests=noted), ()


def _pass_on(node: Node, event: machine.RanksHeld | machine.SaveAgreed) -> Decision:
    """Act on ranks that are held in a call: they may not even see that they are to stop."""
    return node, (event,)


def _start(node: Node, event: machine.RoundReady) -> Decision:
    started = dataclasses.replace(
        node,
        phase=Phase.RUNNING,
        cycle=event.assignment.cycle,
        running=frozenset(event.local_ranks),
        unclean=frozenset(),
        outcome=None,
        cause=None,
        group_world_size=event.assignment.group_world_size,
        leaving=node.leaving if node.must_go else None,
    )
    return started, (event,)


def _over_without_workers(node: Node, event: machine.RoundClosed) -> Decision:
    """Finish; a finished node that only serves the store heeds a no-restart end alone."""
    if node.phase is Phase.FINISHED and not event.no_restart:
        return node, ()
    return _finished(node), (_finish_over(node, event),)


def _finish_over(node: Node, over: machine.RoundClosed) -> Finish:
    """Return how this launcher leaves a job that is over for everybody."""
    what = over.cause.what if over.cause is not None else over.reason
    if over.no_restart:
        return Finish(node.policy.no_restart_exit_code, f"no restart: {what}", over.reason)
    is_graceful = over.reason == errors.RDZV_SHUTDOWN_REASON_GRACEFUL
    return Finish(machine.EXIT_OK if is_graceful else machine.EXIT_FAILURE, what)


def _joins_another(node: Node, event: machine.NextRoundOpened) -> Decision:
    """Join the opened round: as a spare, or after own workers ended and a peer failed."""
    if node.must_go and node.phase is Phase.WAITING:
        return _gone(node)
    if node.requests:
        report = machine.ReportFault(event.cause, Outcome.LEAVE, 0)
        return _finished(node), (report, *_as_requested(node))
    if node.phase is Phase.JOINING:
        return node, _joins(node, event.cause)
    joining = dataclasses.replace(node, phase=Phase.JOINING, outcome=None)
    report = machine.ReportFault(event.cause, Outcome.RESTART, machine.restarts_left(node))
    return joining, (report, machine.Join(node.cycle + 1, event.cause))


def _joins(node: Node, cause: Cause | None) -> tuple[Effect, ...]:
    """Return how this node joins the next round, which does not know yet that it must go."""
    return machine.Join(node.cycle + 1, cause), *_tells_again(node)[1]


def _without_others(node: Node, event: machine.StoreLost | machine.JoinTimedOut) -> Decision:
    """Leave, as nobody is there; without its rendezvous host there is no job to come to later."""
    ends: tuple[Effect, ...] = ()
    if isinstance(event, machine.JoinTimedOut) and node.policy.is_store_host:
        cause = Cause("join_timeout", event.what, host=node.policy.host, detected_by="rendezvous")
        ends = (machine.CloseRendezvous(errors.RDZV_SHUTDOWN_REASON_FAILURE, cause),)
    return _finished(node), (*ends, Finish(machine.EXIT_FAILURE, event.what))


def _others_late(node: Node, event: machine.StoreLost | machine.BarrierTimedOut) -> Decision:
    late = "the other nodes did not end in time"
    what = event.what if isinstance(event, machine.StoreLost) else late
    code = machine.EXIT_FAILURE if node.unclean else machine.EXIT_OK
    return _finished(node), (Finish(code, f"all workers of this node ended; {what}"),)


def _unfit(node: Node, event: machine.NodeUnfit) -> Decision:
    cause = event.cause
    report = machine.ReportFault(cause, Outcome.LEAVE, 0)
    finish = Finish(machine.EXIT_FAILURE, cause.what)
    return _finished(node), (report, machine.LeaveRendezvous(cause), finish)


def _ended_without_workers(node: Node, event: machine.Signalled) -> Decision:
    name = signal.Signals(event.signum).name
    finish = Finish(machine.EXIT_FAILURE if node.unclean else machine.EXIT_OK, f"ended by {name}")
    if node.phase is Phase.JOINING:
        finish = Finish(machine.EXIT_FAILURE, name)
    return _finished(node), (*_goes(node, name), finish)


def _goes(node: Node, name: str) -> tuple[Effect, ...]:
    """Return how the others learn that this launcher was asked to end."""
    if not node.policy.many_nodes:
        return (machine.CloseRendezvous(errors.RDZV_SHUTDOWN_REASON_GRACEFUL),)
    what = f"the launcher on host {node.policy.host} was ended by {name}"
    cause = Cause("drained", what, host=node.policy.host)
    if node.leaving is not None and node.must_go:
        cause = node.leaving
    if node.policy.is_store_host:
        return (machine.CloseRendezvous(errors.RDZV_SHUTDOWN_REASON_FAILURE, cause),)
    return (machine.LeaveRendezvous(cause),)


def _preempted(node: Node, event: machine.Preempted) -> Decision:
    if node.must_go:
        return node, ()
    return dataclasses.replace(node, leaving=event.cause, must_go=True), (event,)


def _preempted_without_ranks(node: Node, event: machine.Preempted) -> Decision:
    """Leave at once, with nothing to save here; the host of the store lets the others save."""
    if node.policy.serves_others:
        return _preempted(node, event)
    leaving = dataclasses.replace(node, leaving=event.cause, must_go=True)
    return _out_of_time(leaving) if node.phase is Phase.STOPPING else _gone(leaving)


def _round_leaves(node: Node, event: machine.RoundLeaves) -> Decision:
    return dataclasses.replace(node, leaving=node.leaving or event.cause), (event,)


def _grace_over_without_ranks(node: Node, _event: machine.GraceOver) -> Decision:
    if not node.must_go:
        return node, ()
    return _out_of_time(node) if node.phase is Phase.STOPPING else _gone(node)


def _out_of_time(node: Node, _event: machine.GraceOver | None = None) -> Decision:
    stopping = dataclasses.replace(node, stop_signal=signal.SIGTERM)
    return _stop(stopping, node.cause, Outcome.SIGNALLED)


def _gone(node: Node) -> Decision:
    """Leave, after the last worker: the others hear of it, and may go on without this node."""
    assert node.leaving is not None
    fails = node.unclean or node.policy.serves_others
    code = machine.EXIT_FAILURE if fails else machine.EXIT_OK
    return _finished(node), (*_goes(node, ""), Finish(code, node.leaving.what))


def _exited(node: Node, event: machine.WorkerExited) -> Decision:
    node, _ = _record_exit(node, event)
    cause = event.cause
    if cause is not None and node.must_go:
        node, stop = _out_of_time(dataclasses.replace(node, cause=cause))
        return node, (machine.ReportFault(cause, Outcome.SIGNALLED, 0), *stop)
    if cause is not None and node.policy.min_healthy and node.group_world_size > 1:
        return _tolerated(node, cause)
    if cause is not None and event.is_hopeless:
        node, stop = _stop(node, cause, Outcome.FAIL)
        return node, (machine.ReportFault(cause, Outcome.FAIL, machine.restarts_left(node)), *stop)
    if cause is not None:
        return _fault(node, cause, no_progress=event.no_progress, opens=True)
    if node.running:
        return node, ()
    if node.group_world_size > 1:
        waiting = dataclasses.replace(node, phase=Phase.WAITING)
        if node.unclean and node.cause is not None:
            return waiting, (machine.ReportBroken(node.cause, all_gone=True),)
        return waiting, (machine.ReportSuccess(),)
    why = f", after: {node.leaving.what}" if node.leaving is not None else ""
    return _finished(node), (
        machine.CloseRendezvous(errors.RDZV_SHUTDOWN_REASON_GRACEFUL),
        Finish(machine.EXIT_OK, f"all workers succeeded{why}"),
    )


def _record_exit(node: Node, event: machine.WorkerExited) -> Decision:
    clean = event.status.code == 0 and event.cause is None
    without = dataclasses.replace(
        node,
        running=node.running - {event.local_rank},
        unclean=node.unclean if clean else node.unclean | {event.local_rank},
    )
    return without, ()


def _tolerated(node: Node, cause: Cause) -> Decision:
    """Leave the survivors alone: the rendezvous host decides whether enough nodes are healthy."""
    first = node.cause is None
    node = dataclasses.replace(node, cause=node.cause or cause)
    report: tuple[Effect, ...] = (
        machine.ReportFault(cause, Outcome.TOLERATED, machine.restarts_left(node)),
    )
    if not node.running:
        waiting = dataclasses.replace(node, phase=Phase.WAITING)
        return waiting, (*report, machine.ReportBroken(cause, all_gone=True))
    return node, (*report, machine.ReportBroken(cause, all_gone=False)) if first else report


def _restarts(node: Node, event: machine.NextRoundOpened | machine.HangEvaluated) -> Decision:
    """Stop for a restart that another node has opened, or for a hang, which opens one."""
    if node.must_go:
        return _out_of_time(node)
    if isinstance(event, machine.HangEvaluated):
        return _fault(node, event.cause, no_progress=event.no_progress, opens=True)
    return _fault(node, event.cause, no_progress=False, opens=False)


def _machine_fails(node: Node, event: machine.WorkerStuck | machine.StartFailed) -> Decision:
    if node.policy.many_nodes:  # The others may restart without this one.
        node, stop = _stop(node, event.cause, Outcome.LEAVE)
        report = machine.ReportFault(event.cause, Outcome.LEAVE, 0)
        return node, (report, machine.LeaveRendezvous(event.cause), *stop)
    if isinstance(event, machine.WorkerStuck):
        return _fault(node, event.cause, no_progress=False, opens=True)
    # Starting failed for a reason of this machine; the same start would fail again.
    node, stop = _stop(node, event.cause, Outcome.FAIL)
    return node, (machine.ReportFault(event.cause, Outcome.FAIL, 0), *stop)


def _over(node: Node, event: machine.RoundClosed) -> Decision:
    cause = event.cause or Cause("over", f"the job is over: {event.reason}")
    node, stop = _stop(dataclasses.replace(node, over=event), cause, Outcome.OVER)
    if event.reason == errors.RDZV_SHUTDOWN_REASON_GRACEFUL:
        return node, stop
    return node, (machine.ReportFault(cause, Outcome.OVER, 0), *stop)


def _lost(node: Node, event: machine.StoreLost) -> Decision:
    cause = Cause("store_lost", event.what, host=node.policy.host, detected_by="lease")
    node, stop = _stop(node, cause, Outcome.LEAVE, within_s=event.stop_within_s)
    return node, (machine.ReportFault(cause, Outcome.LEAVE, 0), *stop)


def _fault(node: Node, cause: Cause, *, no_progress: bool, opens: bool) -> Decision:
    left = machine.restarts_left(node)
    if no_progress:
        outcome = Outcome.NO_RESTART
    elif left > 0 or not opens:
        outcome = Outcome.RESTART
    else:
        outcome = Outcome.FAIL
    node, stop = _stop(node, cause, outcome)
    before: tuple[Effect, ...] = (machine.ReportFault(cause, outcome, left),)
    if outcome is Outcome.RESTART and opens:
        before += (machine.OpenNextRound(cause),)
    elif outcome is Outcome.NO_RESTART:
        before += (machine.CloseRendezvous(errors.RDZV_SHUTDOWN_REASON_NO_PROGRESS, cause),)
    elif opens and node.policy.many_nodes:
        before += (machine.CloseRendezvous(errors.RDZV_SHUTDOWN_REASON_FAILURE, cause),)
    return node, before + stop


def _stop(
    node: Node, cause: Cause | None, outcome: Outcome, *, within_s: float = math.inf
) -> Decision:
    stopping = dataclasses.replace(node, phase=Phase.STOPPING, outcome=outcome, cause=cause)
    grace_s = min(within_s, node.policy.stop_grace_s)
    return stopping, (machine.StopWorkers(signal.SIGTERM, grace_s),)


def _signalled(node: Node, event: machine.Signalled) -> Decision:
    if node.stop_signal is not None:
        return node, (machine.KillWorkers(),) if event.signum == signal.SIGINT else ()
    # A stop that was to end the job for good keeps its reason and its exit code.
    final = node.outcome in (Outcome.NO_RESTART, Outcome.FAIL)
    goes: tuple[Effect, ...] = ()
    if node.policy.many_nodes and node.phase is Phase.RUNNING:
        goes = _goes(node, signal.Signals(event.signum).name)
    stopping = dataclasses.replace(
        node,
        phase=Phase.STOPPING,
        outcome=node.outcome if final else Outcome.SIGNALLED,
        stop_signal=event.signum,
    )
    return stopping, (*goes, machine.StopWorkers(event.signum, node.policy.signal_grace_s))


def _over_before_a_restart(node: Node, event: machine.RoundClosed) -> Decision:
    return dataclasses.replace(node, outcome=Outcome.OVER, over=event), ()


def _after_stop(node: Node, event: machine.GroupStopped) -> Decision:
    finished = _finished(node)
    if node.outcome is Outcome.SIGNALLED:
        return finished, _after_signal(node, clean=not node.unclean and not event.unkillable)
    if node.outcome is Outcome.OVER and node.over is not None:
        return finished, (_finish_over(node, node.over),)
    if event.unkillable:
        ranks = ", ".join(str(rank) for rank in event.unkillable)
        reason = f"local rank {ranks} survived SIGKILL: this node is unhealthy"
        return finished, (*_left(node, reason), Finish(machine.EXIT_FAILURE, reason))
    what = node.cause.what if node.cause else "workers failed"
    if node.outcome is Outcome.NO_RESTART:
        why = errors.RDZV_SHUTDOWN_REASON_NO_PROGRESS
        if node.cause is not None and node.cause.kind == ATTRIBUTION:
            why = errors.RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP
        return finished, (Finish(node.policy.no_restart_exit_code, f"no restart: {what}", why),)
    if node.requests:
        return finished, _as_requested(node)
    if node.outcome is Outcome.RESTART:
        joining = dataclasses.replace(node, phase=Phase.JOINING, outcome=None)
        return joining, _joins(node, node.cause)
    if node.outcome is Outcome.LEAVE:
        return finished, (Finish(machine.EXIT_FAILURE, what),)
    closes = machine.CloseRendezvous(errors.RDZV_SHUTDOWN_REASON_FAILURE, node.cause)
    return finished, (closes, Finish(machine.EXIT_FAILURE, what))


def _after_signal(node: Node, *, clean: bool) -> tuple[Effect, ...]:
    name = signal.Signals(node.stop_signal or signal.SIGTERM).name
    reason = f"ended by {name}"
    if node.leaving is not None and node.must_go:
        ends = "the last ranks left with 0" if clean else "not all ranks ended well"
        reason = f"{node.leaving.what}; {ends}"
    return *_goes(node, name), Finish(machine.EXIT_OK if clean else machine.EXIT_FAILURE, reason)


def _as_requested(node: Node) -> tuple[Effect, ...]:
    # Shutting down is asked for all nodes, excluding for this one: the former includes the latter.
    asked = dict(reversed(node.requests))
    if (why := asked.get(WorkloadAction.ShutdownWorkload)) is not None:
        reason = f"a rank asked to shut the workload down: {why}"
        cause = Cause("shutdown", reason, host=node.policy.host)
        closes = machine.CloseRendezvous(errors.RDZV_SHUTDOWN_REASON_FAILURE, cause)
        return closes, Finish(machine.EXIT_FAILURE, reason)
    reason = f"a rank asked to exclude this node: {asked[WorkloadAction.ExcludeThisNode]}"
    return *_left(node, reason), Finish(machine.EXIT_FAILURE, reason)


def _left(node: Node, reason: str) -> tuple[Effect, ...]:
    if not node.policy.many_nodes:
        return ()
    what = f"host {node.policy.host} leaves: {reason}"
    return (machine.LeaveRendezvous(Cause("left", what, host=node.policy.host)),)


def _tells_again(node: Node, _event: machine.NextRoundOpened | None = None) -> Decision:
    """Announce again, to the ranks of this round, that the node with their store must go."""
    if node.leaving is None or not node.must_go:
        return node, ()
    return node, (machine.Preempted(node.leaving),)


def _ends_for_all(node: Node, _event: machine.Signalled | machine.GraceOver) -> Decision:
    what = f"host {node.policy.host}, which serves the job's store, was told to go"
    cause = Cause("drained", what, host=node.policy.host)
    if node.leaving is not None and node.must_go:
        cause = node.leaving
    return node, (machine.CloseRendezvous(errors.RDZV_SHUTDOWN_REASON_FAILURE, cause),)


def _finished(node: Node) -> Node:
    return dataclasses.replace(node, phase=Phase.FINISHED)


# The handlers of events. What a table does not name changes nothing in its phase.
_Handlers = Mapping[type, Callable[[Node, Any], Decision]]

_IN_ANY_PHASE: _Handlers = {
    machine.StopRequested: _no_restart,
    machine.BudgetChanged: _budget_changed,
    machine.RequestReceived: _record_request,
}
_BY_PHASE: Mapping[Phase, _Handlers] = {
    Phase.JOINING: {
        machine.RoundReady: _start,
        machine.RoundClosed: _over_without_workers,
        machine.NextRoundOpened: _joins_another,
        machine.StoreLost: _without_others,
        machine.JoinTimedOut: _without_others,
        machine.NodeUnfit: _unfit,
        machine.Signalled: _ended_without_workers,
        machine.Preempted: _preempted_without_ranks,
        machine.GraceOver: _grace_over_without_ranks,
    },
    Phase.RUNNING: {
        machine.WorkerExited: _exited,
        machine.WorkerStuck: _machine_fails,
        machine.StartFailed: _machine_fails,
        machine.NextRoundOpened: _restarts,
        machine.HangEvaluated: _restarts,
        machine.RoundClosed: _over,
        machine.StoreLost: _lost,
        machine.Signalled: _signalled,
        machine.Preempted: _preempted,
        machine.RoundLeaves: _round_leaves,
        machine.RanksHeld: _pass_on,
        machine.SaveAgreed: _pass_on,
        machine.GraceOver: _out_of_time,
    },
    Phase.STOPPING: {
        machine.WorkerExited: _record_exit,
        machine.Signalled: _signalled,
        machine.RanksHeld: _pass_on,
        machine.SaveAgreed: _pass_on,
        machine.GroupStopped: _after_stop,
    },
    Phase.WAITING: {
        machine.RoundClosed: _over_without_workers,
        machine.NextRoundOpened: _joins_another,
        machine.StoreLost: _others_late,
        machine.BarrierTimedOut: _others_late,
        machine.Signalled: _ended_without_workers,
        machine.Preempted: _preempted,
        machine.GraceOver: _grace_over_without_ranks,
    },
    # Its own part is over, but it may serve the others' store until theirs is.
    Phase.FINISHED: {
        machine.RoundClosed: _over_without_workers,
        machine.NextRoundOpened: _tells_again,
        machine.Signalled: _ends_for_all,
        machine.Preempted: _preempted,
        machine.GraceOver: _ends_for_all,
    },
}
# While workers are being stopped, and only for a restart.
_BEFORE_A_RESTART: _Handlers = {
    machine.StoreLost: _lost,
    machine.RoundClosed: _over_before_a_restart,
    machine.Preempted: _preempted_without_ranks,
    machine.GraceOver: _grace_over_without_ranks,
}
