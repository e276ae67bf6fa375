# SPDX-License-Identifier: Apache-2.0
"""What a node does about what happens to it: the launcher's decisions, and no effects.

`decide(node, event) -> (node, effects)` is a pure function. The loop in `agent.py` feeds it
events and performs the effects; nothing here reads a clock, a file or a process.

    phase      event                     next       effects
    JOINING    RoundReady                RUNNING    StartWorkers
    JOINING    RoundClosed               FINISHED   Finish
    JOINING    Signalled                 FINISHED   CloseRendezvous, Finish
    JOINING    JoinTimedOut              FINISHED   [CloseRendezvous], Finish(1)
    JOINING    NodeUnfit                 FINISHED   ReportFault, LeaveRendezvous, Finish(1)
    JOINING    NextRoundOpened           JOINING    Join          (a spare tries again)
    JOINING    NextRoundOpened           FINISHED   [LeaveRendezvous | CloseRendezvous], Finish(1)
                                                    (a rank has asked for it)
    JOINING    Preempted                 FINISHED   LeaveRendezvous, Finish
    JOINING    Preempted (rdzv. host)    JOINING    Preempted (ranks save first)
    JOINING    GraceOver                 FINISHED   CloseRendezvous, Finish
    RUNNING    WorkerExited (0, last)    FINISHED   CloseRendezvous, Finish(0)   (one node)
    RUNNING    WorkerExited (0, last)    WAITING    ReportSuccess (others may still work)
    RUNNING    WorkerExited (failed)     STOPPING   ReportFault, [OpenNextRound], StopWorkers
    RUNNING    NextRoundOpened           STOPPING   StopWorkers
    RUNNING    StartFailed               STOPPING   ReportFault, StopWorkers
    RUNNING    Signalled                 STOPPING   StopWorkers (the same signal)
    RUNNING    WorkerStuck               STOPPING   ReportFault, [OpenNextRound], StopWorkers
    RUNNING    HangEvaluated             STOPPING   ReportFault, [OpenNextRound], StopWorkers
    RUNNING    RoundClosed               STOPPING   StopWorkers
    RUNNING    Preempted                 RUNNING    Preempted     (told to the others)
    RUNNING    RoundLeaves               RUNNING    RoundLeaves   (at some node's request)
    RUNNING    GraceOver                 STOPPING   StopWorkers
    with ranks RanksHeld, SaveAgreed     the same   the event: ranks are held in a call
    any        StopRequested             STOPPING   CloseRendezvous, StopWorkers, then Finish(93)
    any        StoreLost                 STOPPING   StopWorkers, then Finish(1)
    WAITING    RoundClosed               FINISHED   Finish
    WAITING    NextRoundOpened           JOINING    Join          (a peer failed: all again)
    WAITING    NextRoundOpened           FINISHED   as in JOINING, where a rank has asked for it
    WAITING    BarrierTimedOut           FINISHED   Finish(0)
    STOPPING   Signalled (SIGINT again)  STOPPING   KillWorkers
    STOPPING   Signalled (first)         STOPPING   StopWorkers; no restart follows
    STOPPING   GroupStopped              JOINING    Join          (a restart was decided)
    STOPPING   GroupStopped              FINISHED   Finish        (otherwise)
    FINISHED   StopRequested             FINISHED   CloseRendezvous, Finish(93) (it serves a store)
    FINISHED   RoundClosed (no restart)  FINISHED   Finish(93) (likewise)
"""

from __future__ import annotations

import dataclasses
import signal

from nvidia_resiliency_ext.fault_tolerance._core.cause import ATTRIBUTION, Cause
from nvidia_resiliency_ext.fault_tolerance._core.errors import (
    RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP,
    RDZV_SHUTDOWN_REASON_FAILURE,
    RDZV_SHUTDOWN_REASON_GRACEFUL,
    RDZV_SHUTDOWN_REASON_NO_PROGRESS,
)
from nvidia_resiliency_ext.fault_tolerance._core.machine import (
    EXIT_FAILURE,
    EXIT_OK,
    BarrierTimedOut,
    BudgetChanged,
    CloseRendezvous,
    Effect,
    Event,
    Finish,
    GraceOver,
    GroupStopped,
    HangEvaluated,
    Join,
    JoinTimedOut,
    KillWorkers,
    LeaveRendezvous,
    Leaving,
    NextRoundOpened,
    Node,
    NodeUnfit,
    OpenNextRound,
    Outcome,
    Phase,
    Preempted,
    RanksHeld,
    ReportBroken,
    ReportFault,
    ReportSuccess,
    RequestReceived,
    RoundClosed,
    RoundLeaves,
    RoundReady,
    SaveAgreed,
    Signalled,
    StartFailed,
    StartWorkers,
    StopRequested,
    StopWorkers,
    StoreLost,
    WorkerExited,
    WorkerStuck,
    restarts_left,
)
from nvidia_resiliency_ext.fault_tolerance.data import WorkloadAction

Decision = tuple[Node, tuple[Effect, ...]]


def decide(node: Node, event: Event) -> Decision:
    """Return the next state and what is to be done; events that no longer matter do nothing."""
    if isinstance(event, RequestReceived):
        return _record_request(node, event)
    if isinstance(event, StopRequested):
        return _no_restart(node, event)
    if isinstance(event, BudgetChanged):
        return dataclasses.replace(node, budget=event.left), ()
    if isinstance(event, (RanksHeld, SaveAgreed)):
        # Ranks that are held in a call may not even see that they are to stop.
        return node, (event,) if node.phase in (Phase.RUNNING, Phase.STOPPING) else ()
    return _BY_PHASE[node.phase](node, event)


def _no_restart(node: Node, event: StopRequested) -> Decision:
    """End the job for everybody, whatever this node does at the moment."""
    ends = CloseRendezvous(event.reason, event.cause)
    if node.phase in (Phase.JOINING, Phase.WAITING, Phase.FINISHED):
        reason = f"no restart: {event.cause.what}"
        finish = Finish(node.policy.no_restart_exit_code, reason, event.reason)
        return _finished(node), (ends, finish)
    if node.phase is Phase.STOPPING and node.outcome is Outcome.RESTART:
        stopping = dataclasses.replace(node, outcome=Outcome.NO_RESTART, cause=event.cause)
        return stopping, (ends,)
    if node.phase is Phase.RUNNING:
        node, stop = _stop(node, event.cause, Outcome.NO_RESTART)
        return node, (ReportFault(event.cause, Outcome.NO_RESTART, 0), ends, *stop)
    return node, ()


def _record_request(node: Node, event: RequestReceived) -> Decision:
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
            group_world_size=event.assignment.group_world_size,
            leaving=node.leaving if node.must_go else None,
        )
        return started, (StartWorkers(event.assignment),)
    if isinstance(event, (Preempted, GraceOver)):
        return _goes_while_joining(node, event)
    if isinstance(event, RoundClosed):
        return _finished(node), (_finish_over(node, event),)
    if isinstance(event, NextRoundOpened):
        return _asked(node, event) if node.requests else (node, _joins(node, event.cause))
    if isinstance(event, (StoreLost, JoinTimedOut)):
        return _alone(node, event)
    if isinstance(event, NodeUnfit):
        cause = event.cause
        report = ReportFault(cause, Outcome.LEAVE, 0)
        leaves = LeaveRendezvous(cause)
        return _finished(node), (report, leaves, Finish(EXIT_FAILURE, cause.what))
    if isinstance(event, Signalled):
        name = signal.Signals(event.signum).name
        return _finished(node), (*_goes(node, name), Finish(EXIT_FAILURE, name))
    return node, ()


def _goes_while_joining(node: Node, event: Preempted | GraceOver) -> Decision:
    """This node has nothing to save, but the job ends with its store, and others may have ranks."""
    if isinstance(event, GraceOver):
        return _gone(node) if node.must_go else (node, ())
    if node.policy.serves_others:
        return _preempted(node, event)
    return _gone(dataclasses.replace(node, leaving=Leaving(event.cause, is_own=True)))


def _joins(node: Node, cause: Cause | None) -> tuple[Effect, ...]:
    """Return how this node joins the next round, which does not know yet that it must go."""
    joins = Join(node.cycle + 1, cause)
    if node.leaving is not None and node.must_go:
        return joins, Preempted(node.leaving.cause)
    return (joins,)


def _alone(node: Node, event: StoreLost | JoinTimedOut) -> Decision:
    """Leave, as nobody is there; without its rendezvous host there is no job to come to later."""
    ends: tuple[Effect, ...] = ()
    if isinstance(event, JoinTimedOut) and node.policy.is_store_host:
        cause = Cause("join_timeout", event.what, host=node.policy.host, detected_by="rendezvous")
        ends = (CloseRendezvous(RDZV_SHUTDOWN_REASON_FAILURE, cause),)
    return _finished(node), (*ends, Finish(EXIT_FAILURE, event.what))


def _goes(node: Node, name: str) -> tuple[Effect, ...]:
    """Return how the others learn that this launcher was asked to end."""
    if not node.policy.many_nodes:
        return (CloseRendezvous(RDZV_SHUTDOWN_REASON_GRACEFUL),)
    what = f"the launcher on host {node.policy.host} was ended by {name}"
    cause = Cause("drained", what, host=node.policy.host)
    if node.leaving is not None and node.leaving.is_own:
        cause = node.leaving.cause
    if node.policy.is_store_host:
        return (CloseRendezvous(RDZV_SHUTDOWN_REASON_FAILURE, cause),)
    return (LeaveRendezvous(cause),)


def _finish_over(node: Node, over: RoundClosed) -> Finish:
    """Return how this launcher leaves a job that is over for everybody."""
    what = over.cause.what if over.cause is not None else over.reason
    if over.no_restart:
        return Finish(node.policy.no_restart_exit_code, f"no restart: {what}", over.reason)
    if over.reason == RDZV_SHUTDOWN_REASON_GRACEFUL:
        return Finish(EXIT_OK, what)
    return Finish(EXIT_FAILURE, what)


def _while_waiting(node: Node, event: Event) -> Decision:
    if isinstance(event, RoundClosed):
        return _finished(node), (_finish_over(node, event),)
    if isinstance(event, Preempted):
        return _preempted(node, event)
    if node.must_go and isinstance(event, (NextRoundOpened, GraceOver)):
        return _gone(node)
    if isinstance(event, NextRoundOpened) and node.requests:
        return _asked(node, event)
    if isinstance(event, NextRoundOpened):
        joining = dataclasses.replace(node, phase=Phase.JOINING, outcome=None)
        left = restarts_left(node)
        report = ReportFault(event.cause, Outcome.RESTART, left)
        return joining, (report, Join(node.cycle + 1, event.cause))
    if isinstance(event, (StoreLost, BarrierTimedOut)):
        code = EXIT_FAILURE if node.unclean else EXIT_OK
        what = event.what if isinstance(event, StoreLost) else "the other nodes did not end in time"
        return _finished(node), (Finish(code, f"all workers of this node ended; {what}"),)
    if isinstance(event, Signalled):
        code = EXIT_FAILURE if node.unclean else EXIT_OK
        name = signal.Signals(event.signum).name
        return _finished(node), (*_goes(node, name), Finish(code, f"ended by {name}"))
    return node, ()


def _while_running(  # noqa: PLR0911 - one for each kind of event
    node: Node, event: Event
) -> Decision:
    if isinstance(event, WorkerExited):
        return _exited(node, event)
    if isinstance(event, (WorkerStuck, StartFailed)):
        return _machine_fails(node, event)
    if isinstance(event, Preempted):
        return _preempted(node, event)
    if isinstance(event, RoundLeaves):
        leaving = node.leaving or Leaving(event.cause, is_own=False)
        return dataclasses.replace(node, leaving=leaving), (event,)
    if isinstance(event, GraceOver):
        return _out_of_time(node)
    if isinstance(event, NextRoundOpened):
        return _restarts(node, event)
    if isinstance(event, HangEvaluated):
        return _hung(node, event)
    if isinstance(event, RoundClosed):
        return _over(node, event)
    if isinstance(event, StoreLost):
        return _lost(node, event)
    if isinstance(event, Signalled):
        return _signalled(node, event.signum)
    return node, ()


def _hung(node: Node, event: HangEvaluated) -> Decision:
    if node.must_go:
        return _out_of_time(node)
    return _fault(node, event.cause, no_progress=event.no_progress, opens=True)


def _restarts(node: Node, event: NextRoundOpened) -> Decision:
    if node.must_go:
        return _out_of_time(node)
    if event.no_restart:
        return _stop(node, event.cause, Outcome.NO_RESTART)
    return _fault(node, event.cause, no_progress=event.no_progress, opens=False)


def _preempted(node: Node, event: Preempted) -> Decision:
    """Preempt this node: its workers may save first."""
    if node.must_go:
        return node, ()
    return dataclasses.replace(node, leaving=Leaving(event.cause, is_own=True)), (event,)


def _out_of_time(node: Node) -> Decision:
    """Stop workers that are still there although this node must go."""
    stopping = dataclasses.replace(
        node, phase=Phase.STOPPING, outcome=Outcome.SIGNALLED, stop_signal=signal.SIGTERM
    )
    return stopping, (StopWorkers(signal.SIGTERM, node.policy.stop_grace_s),)


def _gone(node: Node) -> Decision:
    """Leave, after the last worker: the others hear of it, and may go on without this node."""
    assert node.leaving is not None
    fails = node.unclean or node.policy.serves_others
    code = EXIT_FAILURE if fails else EXIT_OK
    return _finished(node), (*_goes(node, ""), Finish(code, node.leaving.cause.what))


def _machine_fails(node: Node, event: WorkerStuck | StartFailed) -> Decision:
    if node.policy.many_nodes:
        return _leave(node, event.cause)
    if isinstance(event, WorkerStuck):
        return _fault(node, event.cause, no_progress=False, opens=True)
    # Starting failed for a reason of this machine; the same start would fail again.
    node, stop = _stop(node, event.cause, Outcome.FAIL)
    return node, (ReportFault(event.cause, Outcome.FAIL, 0), *stop)


def _over(node: Node, event: RoundClosed) -> Decision:
    """The job is over for everybody while workers still run here."""
    cause = event.cause or Cause("over", f"the job is over: {event.reason}")
    node, stop = _stop(dataclasses.replace(node, over=event), cause, Outcome.OVER)
    if event.reason == RDZV_SHUTDOWN_REASON_GRACEFUL:
        return node, stop
    return node, (ReportFault(cause, Outcome.OVER, 0), *stop)


def _leave(node: Node, cause: Cause) -> Decision:
    """This machine cannot go on: it leaves, and the others may restart without it."""
    node, stop = _stop(node, cause, Outcome.LEAVE)
    return node, (ReportFault(cause, Outcome.LEAVE, 0), LeaveRendezvous(cause), *stop)


def _lost(node: Node, event: StoreLost) -> Decision:
    cause = Cause("store_lost", event.what, host=node.policy.host, detected_by="lease")
    stopping = dataclasses.replace(node, phase=Phase.STOPPING, outcome=Outcome.LEAVE, cause=cause)
    grace_s = min(event.stop_within_s, node.policy.stop_grace_s)
    report = ReportFault(cause, Outcome.LEAVE, 0)
    return stopping, (report, StopWorkers(signal.SIGTERM, grace_s))


def _exited(node: Node, event: WorkerExited) -> Decision:
    node = _without(node, event)
    if event.cause is not None and node.must_go:
        node, stop = _out_of_time(dataclasses.replace(node, cause=event.cause))
        return node, (ReportFault(event.cause, Outcome.SIGNALLED, 0), *stop)
    if event.cause is not None and node.policy.min_healthy and node.group_world_size > 1:
        return _tolerated(node, event.cause)
    if event.cause is not None and event.is_hopeless:
        node, stop = _stop(node, event.cause, Outcome.FAIL)
        return node, (ReportFault(event.cause, Outcome.FAIL, restarts_left(node)), *stop)
    if event.cause is not None:
        return _fault(node, event.cause, no_progress=event.no_progress, opens=True)
    if node.running:
        return node, ()
    if node.group_world_size > 1:
        waiting = dataclasses.replace(node, phase=Phase.WAITING)
        if node.unclean and node.cause is not None:
            return waiting, (ReportBroken(node.cause, all_gone=True),)
        return waiting, (ReportSuccess(),)
    done = _finished(node)
    why = f", after: {node.leaving.cause.what}" if node.leaving is not None else ""
    return done, (
        CloseRendezvous(RDZV_SHUTDOWN_REASON_GRACEFUL),
        Finish(EXIT_OK, f"all workers succeeded{why}"),
    )


def _tolerated(node: Node, cause: Cause) -> Decision:
    """Leave the survivors alone: the rendezvous host decides whether enough nodes are healthy."""
    first = node.cause is None
    node = dataclasses.replace(node, cause=node.cause or cause)
    report: tuple[Effect, ...] = (ReportFault(cause, Outcome.TOLERATED, restarts_left(node)),)
    if not node.running:
        waiting = dataclasses.replace(node, phase=Phase.WAITING)
        return waiting, (*report, ReportBroken(cause, all_gone=True))
    return node, (*report, ReportBroken(cause, all_gone=False)) if first else report


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
    return _no_more_restart(node, event) if node.outcome is Outcome.RESTART else (node, ())


def _no_more_restart(node: Node, event: Event) -> Decision:
    """Record what makes the restart impossible for which workers are being stopped."""
    if isinstance(event, StoreLost):
        return _lost(node, event)
    if isinstance(event, RoundClosed):
        return dataclasses.replace(node, outcome=Outcome.OVER, over=event), ()
    if isinstance(event, Preempted):
        if node.policy.serves_others:
            return _preempted(node, event)
        leaving = Leaving(event.cause, is_own=True)
        return _out_of_time(dataclasses.replace(node, leaving=leaving))
    if isinstance(event, GraceOver) and node.must_go:
        return _out_of_time(node)
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
    elif left > 0 or not opens:
        outcome = Outcome.RESTART
    else:
        outcome = Outcome.FAIL
    node, stop = _stop(node, cause, outcome)
    before: tuple[Effect, ...] = (ReportFault(cause, outcome, left),)
    if outcome is Outcome.RESTART and opens:
        before += (OpenNextRound(cause),)
    elif outcome is Outcome.NO_RESTART and opens:
        before += (CloseRendezvous(RDZV_SHUTDOWN_REASON_NO_PROGRESS, cause),)
    elif opens and node.policy.many_nodes:
        before += (CloseRendezvous(RDZV_SHUTDOWN_REASON_FAILURE, cause),)
    return node, before + stop


def _stop(node: Node, cause: Cause, outcome: Outcome) -> Decision:
    stopping = dataclasses.replace(node, phase=Phase.STOPPING, outcome=outcome, cause=cause)
    return stopping, (StopWorkers(signal.SIGTERM, node.policy.stop_grace_s),)


def _signalled(node: Node, signum: int) -> Decision:
    # A stop that was to end the job for good keeps its reason and its exit code.
    final = node.outcome in (Outcome.NO_RESTART, Outcome.FAIL)
    goes: tuple[Effect, ...] = ()
    if node.policy.many_nodes and node.phase is Phase.RUNNING:
        goes = _goes(node, signal.Signals(signum).name)
    stopping = dataclasses.replace(
        node,
        phase=Phase.STOPPING,
        outcome=node.outcome if final else Outcome.SIGNALLED,
        stop_signal=signum,
    )
    return stopping, (*goes, StopWorkers(signum, node.policy.signal_grace_s))


def _after_stop(node: Node, event: GroupStopped) -> Decision:
    finished = _finished(node)
    if node.outcome is Outcome.SIGNALLED:
        return finished, _after_signal(node, clean=not node.unclean and not event.unkillable)
    if node.outcome is Outcome.OVER and node.over is not None:
        return finished, (_finish_over(node, node.over),)
    if event.unkillable:
        ranks = ", ".join(str(rank) for rank in event.unkillable)
        reason = f"local rank {ranks} survived SIGKILL: this node is unhealthy"
        return finished, (*_left(node, reason), Finish(EXIT_FAILURE, reason))
    what = node.cause.what if node.cause else "workers failed"
    if node.outcome is Outcome.NO_RESTART:
        why = RDZV_SHUTDOWN_REASON_NO_PROGRESS
        if node.cause is not None and node.cause.kind == ATTRIBUTION:
            why = RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP
        return finished, (Finish(node.policy.no_restart_exit_code, f"no restart: {what}", why),)
    if node.requests:
        return finished, _as_requested(node)
    if node.outcome is Outcome.RESTART:
        joining = dataclasses.replace(node, phase=Phase.JOINING, outcome=None)
        return joining, _joins(node, node.cause)
    if node.outcome is Outcome.LEAVE:
        return finished, (Finish(EXIT_FAILURE, what),)
    closes = CloseRendezvous(RDZV_SHUTDOWN_REASON_FAILURE, node.cause)
    return finished, (closes, Finish(EXIT_FAILURE, what))


def _after_signal(node: Node, *, clean: bool) -> tuple[Effect, ...]:
    name = signal.Signals(node.stop_signal or signal.SIGTERM).name
    reason = f"ended by {name}"
    if node.leaving is not None and node.leaving.is_own:
        ends = "the last ranks left with 0" if clean else "not all ranks ended well"
        reason = f"{node.leaving.cause.what}; {ends}"
    return *_goes(node, name), Finish(EXIT_OK if clean else EXIT_FAILURE, reason)


def _asked(node: Node, event: NextRoundOpened) -> Decision:
    """Do what ranks asked for before this node joins the round that was opened."""
    report = ReportFault(event.cause, Outcome.LEAVE, 0)
    return _finished(node), (report, *_as_requested(node))


def _as_requested(node: Node) -> tuple[Effect, ...]:
    # Shutting down is asked for all nodes, excluding for this one: the former includes the latter.
    asked = dict(reversed(node.requests))
    if (why := asked.get(WorkloadAction.ShutdownWorkload)) is not None:
        reason = f"a rank asked to shut the workload down: {why}"
        cause = Cause("shutdown", reason, host=node.policy.host)
        return CloseRendezvous(RDZV_SHUTDOWN_REASON_FAILURE, cause), Finish(EXIT_FAILURE, reason)
    reason = f"a rank asked to exclude this node: {asked[WorkloadAction.ExcludeThisNode]}"
    return *_left(node, reason), Finish(EXIT_FAILURE, reason)


def _left(node: Node, reason: str) -> tuple[Effect, ...]:
    if not node.policy.many_nodes:
        return ()
    what = f"host {node.policy.host} leaves: {reason}"
    return (LeaveRendezvous(Cause("left", what, host=node.policy.host)),)


def _while_finished(node: Node, event: Event) -> Decision:
    """Its own part is over, but it may serve the others' store until theirs is."""
    if isinstance(event, RoundClosed) and event.no_restart:
        return node, (_finish_over(node, event),)
    return node, ()


def _finished(node: Node) -> Node:
    return dataclasses.replace(node, phase=Phase.FINISHED)


_BY_PHASE = {
    Phase.JOINING: _while_joining,
    Phase.RUNNING: _while_running,
    Phase.STOPPING: _while_stopping,
    Phase.WAITING: _while_waiting,
    Phase.FINISHED: _while_finished,
}
