# SPDX-License-Identifier: Apache-2.0
"""The launcher's decisions, event by event."""

import dataclasses
import random
import signal

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent import decide
from nvidia_resiliency_ext.fault_tolerance._core import machine
from nvidia_resiliency_ext.fault_tolerance._core.machine import (
    Assignment,
    Cause,
    CloseRendezvous,
    Finish,
    GroupStopped,
    Join,
    KillWorkers,
    NextRoundOpened,
    Node,
    OpenNextRound,
    Outcome,
    Phase,
    Policy,
    ReportFault,
    RequestReceived,
    RoundClosed,
    RoundReady,
    Signalled,
    StartFailed,
    StopRequested,
    StopWorkers,
    WorkerExited,
    WorkerStuck,
)
from nvidia_resiliency_ext.fault_tolerance.data import WorkloadAction
from nvidia_resiliency_ext.shared_utils.children import ExitStatus

POLICY = Policy(max_restarts=2, stop_grace_s=15.0, signal_grace_s=1800.0, no_restart_exit_code=93)
DEAD = Cause("killed", "rank 1 died by SIGKILL", rank=1, local_rank=1)
KILLED = ExitStatus(None, 9)
CLEAN = ExitStatus(0)


def assignment(cycle=0):
    return Assignment(cycle, 0, 1, 0, 2, "127.0.0.1", 29500)


def running(cycle=0, policy=POLICY):
    ready = RoundReady(assignment(cycle), (0, 1))
    node, effects = decide.decide(Node(policy), ready)
    assert effects == (ready,)
    return node


def play(node, *events):
    done = []
    for event in events:
        node, effects = decide.decide(node, event)
        done += effects
    return node, done


def test_all_workers_succeeding_finishes_with_zero():
    """The job ends with exit code 0 only when the last worker has exited 0."""
    node, done = play(running(), WorkerExited(0, CLEAN))
    assert (node.phase, done) == (Phase.RUNNING, [])
    node, done = play(node, WorkerExited(1, CLEAN))
    assert node.phase is Phase.FINISHED
    assert done == [CloseRendezvous("graceful"), Finish(0, "all workers succeeded")]


def test_failure_stops_everybody_and_joins_the_next_cycle():
    """A failed worker with budget left leads to a stop of all and one restart, counted once."""
    node, done = play(running(), WorkerExited(1, KILLED, DEAD))
    assert done == [
        ReportFault(DEAD, Outcome.RESTART, 2),
        OpenNextRound(DEAD),
        StopWorkers(signal.SIGTERM, 15.0),
    ]
    node, done = play(node, WorkerExited(0, ExitStatus(None, 15)), GroupStopped())
    assert (node.phase, done) == (Phase.JOINING, [Join(1, DEAD)])


def test_two_deaths_at_once_are_one_fault():
    """A second death while stopping is not a second restart."""
    _, done = play(running(), WorkerExited(1, KILLED, DEAD), WorkerExited(0, KILLED, DEAD))
    assert sum(isinstance(effect, ReportFault) for effect in done) == 1


def test_budget_counts_from_the_global_cycle():
    """A launcher that joins at cycle 2 of 2 has no restart left."""
    node, done = play(running(cycle=2), WorkerExited(1, KILLED, DEAD))
    assert done[0] == ReportFault(DEAD, Outcome.FAIL, 0)
    node, done = play(node, WorkerExited(0, CLEAN), GroupStopped())
    assert done == [CloseRendezvous("failure", DEAD), Finish(1, DEAD.what)]


def test_no_progress_ends_with_the_no_restart_code():
    """A job without progress stops its workers, tells everybody and exits 93."""
    node, done = play(running(), WorkerExited(1, KILLED, DEAD, no_progress=True))
    assert CloseRendezvous("no_progress", DEAD) in done
    assert OpenNextRound(DEAD) not in done
    _, done = play(node, GroupStopped())
    assert done == [Finish(93, f"no restart: {DEAD.what}", "no_progress")]


@pytest.mark.parametrize(
    ("request_", "code", "closes"),
    [(WorkloadAction.ExcludeThisNode, 1, False), (WorkloadAction.ShutdownWorkload, 1, True)],
)
def test_requests_act_at_the_next_rendezvous(request_, code, closes):
    """A rank's request changes nothing until a restart would join the next round."""
    node, done = play(running(), RequestReceived(request_, "why"))
    assert (node.phase, done) == (Phase.RUNNING, [])
    _, done = play(node, WorkerExited(1, KILLED, DEAD), GroupStopped())
    assert done[-1].exit_code == code
    assert "why" in done[-1].reason
    assert any(isinstance(effect, CloseRendezvous) for effect in done) is closes
    assert not any(isinstance(effect, Join) for effect in done)


@pytest.mark.parametrize(
    ("status", "cause", "code"),
    [(CLEAN, None, 0), (ExitStatus(None, 15), DEAD, 1), (CLEAN, DEAD, 1)],
)
def test_signal_is_forwarded_and_cleanliness_decides(status, cause, code):
    """After SIGTERM the launcher exits 0 if every rank ended cleanly, else 1."""
    node, done = play(running(), Signalled(signal.SIGTERM))
    assert done == [StopWorkers(signal.SIGTERM, 1800.0)]
    _, done = play(node, WorkerExited(0, CLEAN), WorkerExited(1, status, cause), GroupStopped())
    assert done[-1] == Finish(code, "ended by SIGTERM")


def test_second_interrupt_kills_at_once():
    """Ctrl-C once is orderly; the second one kills; a second SIGTERM changes nothing."""
    node, _ = play(running(), Signalled(signal.SIGINT))
    assert play(node, Signalled(signal.SIGTERM))[1] == []
    assert play(node, Signalled(signal.SIGINT))[1] == [KillWorkers()]


def test_signal_during_a_restart_cancels_the_restart():
    """A signal that arrives while workers are being stopped for a restart ends the job."""
    node, _ = play(running(), WorkerExited(1, KILLED, DEAD), Signalled(signal.SIGTERM))
    _, done = play(node, GroupStopped())
    assert done[-1] == Finish(1, "ended by SIGTERM")


def test_signal_does_not_soften_a_stop_for_good():
    """A job that was to end with 93 still does when a signal comes during its stop."""
    node, _ = play(
        running(), WorkerExited(1, KILLED, DEAD, no_progress=True), Signalled(signal.SIGTERM)
    )
    assert play(node, Signalled(signal.SIGINT))[1] == [KillWorkers()]
    assert play(node, GroupStopped())[1] == [Finish(93, f"no restart: {DEAD.what}", "no_progress")]


def test_hung_rank_that_leaves_with_zero_is_a_failure():
    """Exit code 0 of a rank that the monitor had to end does not make the job a success."""
    _, done = play(running(), WorkerExited(0, CLEAN), WorkerExited(1, CLEAN, DEAD))
    assert done[0] == ReportFault(DEAD, Outcome.RESTART, 2)


def test_rank_that_survives_sigkill_ends_this_node():
    """A hung rank that the kernel holds starts a stop, and the node leaves as unhealthy."""
    node, done = play(running(), WorkerStuck(DEAD))
    assert isinstance(done[-1], StopWorkers)
    _, done = play(node, GroupStopped(unkillable=(1,)))
    assert done[-1].exit_code == 1


def test_shutdown_wins_over_exclusion():
    """When ranks ask for both, the whole workload is shut down."""
    node, _ = play(
        running(),
        RequestReceived(WorkloadAction.ExcludeThisNode, "a"),
        RequestReceived(WorkloadAction.ShutdownWorkload, "b"),
        WorkerExited(1, KILLED, DEAD),
    )
    assert play(node, GroupStopped())[1][0].reason == "failure"


def test_unkillable_worker_makes_the_node_unhealthy():
    """A worker that survives SIGKILL is reported and not waited for: no restart here."""
    node, _ = play(running(), WorkerExited(1, KILLED, DEAD))
    _, done = play(node, GroupStopped(unkillable=(0,)))
    assert done[-1].exit_code == 1
    assert "survived SIGKILL" in done[-1].reason


def test_failed_start_is_final():
    """Workers that cannot be started here end the job with the machine's reason."""
    cause = Cause("start", "disk full")
    node, done = play(running(), StartFailed(cause))
    assert done[0] == ReportFault(cause, Outcome.FAIL, 0)
    assert play(node, GroupStopped())[1][-1] == Finish(1, "disk full")


def test_another_node_opening_the_round_joins_it():
    """A fault elsewhere stops healthy workers here and spends the budget once."""
    node, done = play(running(), NextRoundOpened(DEAD))
    assert done == [ReportFault(DEAD, Outcome.RESTART, 2), StopWorkers(signal.SIGTERM, 15.0)]
    assert play(node, GroupStopped())[1] == [Join(1, DEAD)]


def test_attribution_ends_the_job_with_its_own_reason():
    """Whatever a node does when attribution stops the job, its end names that, and not progress."""
    cause = Cause("attribution", "useless", detected_by="attribution")
    stop = StopRequested(cause, "attribution_stop")
    finish = Finish(93, "no restart: useless", "attribution_stop")
    assert play(running(), stop, GroupStopped())[1][-1] == finish
    assert play(Node(POLICY), stop)[1][-1] == finish
    over = RoundClosed("attribution_stop", no_restart=True, cause=cause)
    assert play(Node(POLICY), over)[1] == [finish]
    assert play(running(), over, GroupStopped())[1][-1] == finish
    restarting, _ = play(running(), WorkerExited(1, KILLED, DEAD))
    assert play(restarting, stop, GroupStopped())[1][-1] == finish


def test_closed_rendezvous_ends_a_waiting_node():
    """A node that waits when the rendezvous closes leaves, with 93 for a no-restart reason."""
    assert play(Node(POLICY), RoundClosed("failure"))[1] == [Finish(1, "failure")]
    assert play(Node(POLICY), RoundClosed("no_progress", no_restart=True))[1] == [
        Finish(93, "no restart: no_progress", "no_progress")
    ]


def test_any_order_of_events_ends_once_and_stays_ended():
    """Whatever comes in whatever order: one Finish, nothing after it, never two starts in a row."""
    pool = [
        WorkerExited(0, CLEAN),
        WorkerExited(1, CLEAN),
        WorkerExited(0, KILLED, DEAD),
        WorkerExited(1, KILLED, DEAD),
        WorkerExited(1, KILLED, DEAD, no_progress=True),
        GroupStopped(),
        GroupStopped(unkillable=(1,)),
        Signalled(signal.SIGTERM),
        Signalled(signal.SIGINT),
        RequestReceived(WorkloadAction.ShutdownWorkload, "x"),
        NextRoundOpened(DEAD),
        StartFailed(DEAD),
        WorkerStuck(DEAD),
        RoundClosed("failure"),
    ]
    for seed in range(300):
        rng = random.Random(seed)
        node, finishes, starts, joins = Node(POLICY), 0, 0, 1
        for _ in range(40):
            event = rng.choice(pool)
            if node.phase is Phase.JOINING and rng.random() < 0.7:
                event = RoundReady(assignment(node.cycle + (starts > 0)), (0, 1))
            node, effects = decide.decide(node, event)
            finishes += sum(isinstance(effect, Finish) for effect in effects)
            starts += sum(isinstance(effect, RoundReady) for effect in effects)
            joins += sum(isinstance(effect, Join) for effect in effects)
            assert finishes <= 1
            assert starts <= joins
            if finishes:
                assert node.phase is Phase.FINISHED
        assert starts <= POLICY.max_restarts + 1


@pytest.mark.parametrize("many_nodes", [False, True])
def test_an_unfit_node_leaves_with_1_and_closes_nothing(many_nodes):
    """A failed health check before joining ends this launcher only; the others are told why."""
    cause = Cause("unhealthy", "host h is unhealthy: health check gpu: reset", host="h")
    node = Node(dataclasses.replace(POLICY, many_nodes=many_nodes, is_store_host=many_nodes))
    node, done = play(node, machine.NodeUnfit(cause))
    assert node.phase is Phase.FINISHED
    assert done == [
        ReportFault(cause, Outcome.LEAVE, 0),
        machine.LeaveRendezvous(cause),
        Finish(1, cause.what),
    ]


def test_a_finding_that_comes_late_changes_nothing():
    """A node that runs, or is over, is not evaluated by a check that was for its next round."""
    cause = Cause("unhealthy", "too late")
    assert play(running(), machine.NodeUnfit(cause)) == (running(), [])
