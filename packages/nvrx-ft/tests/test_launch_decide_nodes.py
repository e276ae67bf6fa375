# SPDX-License-Identifier: Apache-2.0
"""The launcher's decisions when other nodes take part, event by event."""

import itertools
import random
import signal

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent import decide
from nvidia_resiliency_ext.fault_tolerance._core.machine import (
    Assignment,
    BarrierTimedOut,
    Cause,
    CloseRendezvous,
    Finish,
    GroupStopped,
    HangEvaluated,
    Join,
    JoinTimedOut,
    LeaveRendezvous,
    NextRoundOpened,
    Node,
    OpenNextRound,
    Outcome,
    Phase,
    Policy,
    Preempted,
    ReportBroken,
    ReportFault,
    ReportSuccess,
    RequestReceived,
    RoundClosed,
    RoundReady,
    Signalled,
    StartFailed,
    StopRequested,
    StopWorkers,
    StoreLost,
    WorkerExited,
    WorkerStuck,
)
from nvidia_resiliency_ext.fault_tolerance.data import WorkloadAction
from nvidia_resiliency_ext.shared_utils.children import ExitStatus

POLICY = Policy(
    max_restarts=2,
    stop_grace_s=15.0,
    signal_grace_s=1800.0,
    no_restart_exit_code=93,
    many_nodes=True,
    host="node2",
)
HOST_POLICY = Policy(2, 15.0, 1800.0, 93, many_nodes=True, is_store_host=True, host="node1")
PATIENT = Policy(2, 15.0, 1800.0, 93, many_nodes=True, min_healthy=True, host="node2")
DEAD = Cause("killed", "rank 3 died by SIGKILL", rank=3, local_rank=1)
FAR = Cause("killed", "rank 17 on host h died by SIGKILL", rank=17, host="h")
KILLED = ExitStatus(None, 9)
CLEAN = ExitStatus(0)
LOST = StoreLost("the store is gone", 2.5)


def running(cycle=0, policy=POLICY, nodes=2):
    assignment = Assignment(cycle, 1, nodes, 2, 2 * nodes, "10.0.0.1", 29500)
    ready = RoundReady(assignment, (0, 1))
    node, effects = decide.decide(Node(policy), ready)
    assert effects == (ready,)
    return node


def play(node, *events):
    done = []
    for event in events:
        node, effects = decide.decide(node, event)
        done += effects
    return node, done


def test_a_node_that_succeeds_waits_for_the_others():
    """The job ends with 0 only when every node has succeeded, not when this one has."""
    node, done = play(running(), WorkerExited(0, CLEAN), WorkerExited(1, CLEAN))
    assert (node.phase, done) == (Phase.WAITING, [ReportSuccess()])
    node, done = play(node, RoundClosed("graceful"))
    assert (node.phase, done) == (Phase.FINISHED, [Finish(0, "graceful")])


def test_a_peer_that_fails_after_this_node_succeeded_takes_it_along():
    """All nodes restart together, those included whose workers had already ended well."""
    node, _ = play(running(), WorkerExited(0, CLEAN), WorkerExited(1, CLEAN))
    node, done = play(node, NextRoundOpened(FAR))
    assert (node.phase, done) == (
        Phase.JOINING,
        [ReportFault(FAR, Outcome.RESTART, 2), Join(1, FAR)],
    )


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (WorkloadAction.ExcludeThisNode, LeaveRendezvous),
        (WorkloadAction.ShutdownWorkload, CloseRendezvous),
    ],
)
@pytest.mark.parametrize("is_early", [True, False])
def test_a_request_is_honoured_by_a_node_that_waits(request_, expected, is_early):
    """What a rank asked for before it ended well is done before the next round, not after it."""
    asks = RequestReceived(request_, "rank 2: why")
    ends = [WorkerExited(0, CLEAN), WorkerExited(1, CLEAN)]
    node, _ = play(running(), *([asks, *ends] if is_early else [*ends, asks]))
    assert node.phase is Phase.WAITING
    node, done = play(node, NextRoundOpened(FAR))
    assert node.phase is Phase.FINISHED
    assert [type(effect) for effect in done] == [ReportFault, expected, Finish]
    assert done[-1].exit_code == 1


def test_a_request_that_comes_while_a_node_joins_is_honoured_before_the_next_round():
    """A rank's last words may be read after it has ended."""
    asks = RequestReceived(WorkloadAction.ExcludeThisNode, "rank 2: why")
    node, done = play(Node(POLICY), asks, NextRoundOpened(FAR))
    assert (node.phase, done[-1].exit_code) == (Phase.FINISHED, 1)
    assert isinstance(done[1], LeaveRendezvous)


def test_a_verdict_against_a_restart_reaches_a_host_that_only_serves_the_store():
    """Its own part is over, and still it ends the job for all and leaves with the code of that."""
    cause = Cause("attribution", "useless", detected_by="attribution")
    over = Node(HOST_POLICY, phase=Phase.FINISHED)
    node, done = play(over, StopRequested(cause, "attribution_stop"))
    assert done == [
        CloseRendezvous("attribution_stop", cause),
        Finish(93, "no restart: useless", "attribution_stop"),
    ]
    _, done = play(node, RoundClosed("no_progress", no_restart=True))
    assert [effect.exit_code for effect in done] == [93]
    assert play(over, RoundClosed("failure"))[1] == []


@pytest.mark.parametrize("event", [BarrierTimedOut(), LOST])
def test_a_node_that_succeeded_is_not_kept_for_ever(event):
    """Peers that do not end, and a store that is gone, cannot make a success a failure."""
    node, _ = play(running(), WorkerExited(0, CLEAN), WorkerExited(1, CLEAN))
    node, done = play(node, event)
    assert node.phase is Phase.FINISHED
    assert [effect.exit_code for effect in done] == [0]


def test_the_last_failure_ends_the_job_for_everybody_at_once():
    """Without a restart left the others learn the cause before this node's workers have stopped."""
    _, done = play(running(cycle=2), WorkerExited(1, KILLED, DEAD))
    assert done[:2] == [ReportFault(DEAD, Outcome.FAIL, 0), CloseRendezvous("failure", DEAD)]


def test_a_peers_restart_is_followed_whatever_this_nodes_count():
    """The node that opens a round has counted; a follower never fails where it restarts."""
    node, done = play(running(cycle=2), NextRoundOpened(FAR))
    assert done == [ReportFault(FAR, Outcome.RESTART, 0), StopWorkers(signal.SIGTERM, 15.0)]
    assert play(node, GroupStopped())[1] == [Join(3, FAR)]


def test_a_spare_joins_each_round_that_opens():
    """A node without a place offers itself again whenever a round opens."""
    node, done = play(Node(POLICY), NextRoundOpened(FAR), NextRoundOpened(FAR))
    assert node.phase is Phase.JOINING
    assert [type(effect) for effect in done] == [Join, Join]


@pytest.mark.parametrize(
    ("over", "code"),
    [
        (RoundClosed("graceful"), 0),
        (RoundClosed("failure", cause=FAR), 1),
        (RoundClosed("no_progress", no_restart=True), 93),
    ],
)
@pytest.mark.parametrize("phase", ["joining", "running", "waiting"])
def test_the_end_of_the_job_gives_every_launcher_the_same_code(over, code, phase):
    """Spares, workers and those that wait leave with the code that the reason asks for."""
    node = Node(POLICY) if phase == "joining" else running()
    if phase == "waiting":
        node, _ = play(node, WorkerExited(0, CLEAN), WorkerExited(1, CLEAN))
    node, done = play(node, over, GroupStopped())
    assert node.phase is Phase.FINISHED
    assert done[-1].exit_code == code
    if over.cause is not None:
        assert over.cause.what in done[-1].reason


@pytest.mark.parametrize("event", [StartFailed(DEAD), WorkerStuck(DEAD)])
def test_a_broken_machine_leaves_and_the_others_go_on(event):
    """What only this machine cannot do ends this launcher, not the job."""
    node, done = play(running(), event)
    assert LeaveRendezvous(DEAD) in done
    assert not any(isinstance(effect, (CloseRendezvous, OpenNextRound)) for effect in done)
    assert play(node, GroupStopped())[1] == [Finish(1, DEAD.what)]


def test_a_judged_hang_restarts_every_node_for_the_same_cause():
    """Whoever the nodes blame together: each reports it, opens the next round, and stops."""
    node, done = play(running(), HangEvaluated(FAR))
    assert done == [
        ReportFault(FAR, Outcome.RESTART, 2),
        OpenNextRound(FAR),
        StopWorkers(signal.SIGTERM, 15.0),
    ]
    assert play(node, NextRoundOpened(FAR))[1] == []
    assert play(running(), HangEvaluated(FAR, no_progress=True))[0].outcome is Outcome.NO_RESTART


def test_a_node_that_lost_the_store_stops_in_time_and_touches_nothing():
    """Its workers end within the bound; it neither joins nor opens nor closes anything."""
    node, done = play(running(), LOST)
    assert done[-1] == StopWorkers(signal.SIGTERM, 2.5)
    node, done = play(node, GroupStopped())
    assert done == [Finish(1, "the store is gone")]


def test_losing_the_store_during_a_restart_ends_the_node():
    """A node that was to restart does not wait for a store that is gone."""
    node, _ = play(running(), NextRoundOpened(FAR))
    assert play(node, LOST, GroupStopped())[1][-1] == Finish(1, "the store is gone")
    joining, _ = play(node, GroupStopped())
    assert play(joining, LOST)[1] == [Finish(1, "the store is gone")]


def test_a_round_that_does_not_close_ends_the_node():
    """A node does not wait for others beyond its limit."""
    assert play(Node(POLICY), JoinTimedOut("late"))[1] == [Finish(1, "late")]


def test_a_store_host_to_which_nobody_comes_ends_the_job():
    """It must not serve a store for ever of which it has left the job."""
    closes, leaves = play(Node(HOST_POLICY), JoinTimedOut("late"))[1]
    assert leaves == Finish(1, "late")
    assert isinstance(closes, CloseRendezvous)
    assert (closes.reason, closes.cause.what) == ("failure", "late")


def test_a_drained_node_leaves_at_once_and_its_workers_get_their_time():
    """The others need not wait for the workers of a node that was told to end."""
    node, done = play(running(), Signalled(signal.SIGTERM))
    assert isinstance(done[0], LeaveRendezvous)
    assert "node2" in done[0].cause.what
    assert done[1] == StopWorkers(signal.SIGTERM, 1800.0)
    node, done = play(node, WorkerExited(0, CLEAN), WorkerExited(1, CLEAN), GroupStopped())
    assert done[-1] == Finish(0, "ended by SIGTERM")


def test_the_end_of_the_store_host_is_the_end_of_the_job():
    """A signal to the launcher that serves the store tells everybody before it goes."""
    _, done = play(running(policy=HOST_POLICY), Signalled(signal.SIGTERM))
    assert isinstance(done[0], CloseRendezvous)
    assert done[0].reason == "failure"


def test_an_excluded_node_leaves_and_the_others_restart():
    """Excluding a node ends its launcher without closing the rendezvous."""
    node, _ = play(running(), RequestReceived(WorkloadAction.ExcludeThisNode, "bad NIC"))
    _, done = play(node, WorkerExited(1, KILLED, DEAD), GroupStopped())
    assert OpenNextRound(DEAD) in done
    assert isinstance(done[-2], LeaveRendezvous)
    assert done[-1].exit_code == 1


def test_min_healthy_leaves_survivors_alone():
    """A failed worker is told to the store host once; nobody is stopped until it says so."""
    node, done = play(running(policy=PATIENT, nodes=3), WorkerExited(1, KILLED, DEAD))
    assert done == [ReportFault(DEAD, Outcome.TOLERATED, 2), ReportBroken(DEAD, all_gone=False)]
    node, done = play(node, WorkerExited(0, KILLED, DEAD))
    assert ReportBroken(DEAD, all_gone=True) in done
    assert node.phase is Phase.WAITING
    assert play(node, RoundClosed("graceful"))[1] == [Finish(0, "graceful")]


def test_any_order_of_events_ends_once_and_stays_ended():
    """Whatever comes in whatever order: one Finish, nothing after it, never two starts in a row."""
    pool = [
        WorkerExited(0, CLEAN), WorkerExited(1, CLEAN), WorkerExited(0, KILLED, DEAD),
        WorkerExited(1, KILLED, DEAD, no_progress=True), NextRoundOpened(FAR), GroupStopped(),
        GroupStopped((1,)), RoundClosed("graceful"), RoundClosed("failure", cause=FAR), LOST,
        JoinTimedOut("late"), BarrierTimedOut(), Signalled(signal.SIGTERM),
        Signalled(signal.SIGINT), StartFailed(DEAD), WorkerStuck(DEAD),
        RequestReceived(WorkloadAction.ExcludeThisNode, "x"),
        RequestReceived(WorkloadAction.ShutdownWorkload, "y"),
        *(RoundReady(Assignment(c, 0, 2, 0, 4, "h", 1), (0, 1)) for c in range(3)),
    ]  # fmt: skip
    for seed, policy in itertools.product(range(400), (POLICY, HOST_POLICY, PATIENT)):
        chance = random.Random(seed)
        node, finishes, started = Node(policy), 0, False
        for event in chance.choices(pool, k=60):
            node, effects = decide.decide(node, event)
            for effect in effects:
                # One whose own part is over still ends the job of those whose store it serves.
                assert finishes == 0 or isinstance(effect, (CloseRendezvous, Preempted)), effect
                finishes += isinstance(effect, Finish)
                assert not (started and isinstance(effect, RoundReady)), (seed, event)
                started = isinstance(effect, RoundReady) or (
                    started
                    and not isinstance(effect, (StopWorkers, Join, ReportSuccess, ReportBroken))
                )
            assert (node.phase is Phase.FINISHED) == (finishes == 1), (seed, event)
