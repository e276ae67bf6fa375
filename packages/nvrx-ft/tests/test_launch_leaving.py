# SPDX-License-Identifier: Apache-2.0
"""Announced preemption: what a node does about it, and what the store host decides."""

import signal
import types
from unittest.mock import Mock

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent import decide
from nvidia_resiliency_ext.fault_tolerance._agent.agent import NodeAgent
from nvidia_resiliency_ext.fault_tolerance._core.machine import (
    Assignment,
    Cause,
    CloseRendezvous,
    Finish,
    GraceOver,
    GroupStopped,
    Join,
    LeaveRendezvous,
    NextRoundOpened,
    Node,
    OpenNextRound,
    Outcome,
    Phase,
    Policy,
    Preempted,
    RanksHeld,
    ReportFault,
    ReportSuccess,
    RoundClosed,
    RoundLeaves,
    RoundReady,
    SaveAgreed,
    Signalled,
    StopWorkers,
    WorkerExited,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous import coordinator, records
from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import (
    PlacementRules,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import (
    Arrival,
    Entry,
    Kind,
    NodeMessage,
    WorkerState,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import Budget
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
from nvidia_resiliency_ext.shared_utils.children import ExitStatus

GOES = Cause("preempted", "host a must go: SIGUSR1 was received", host="a")
DEAD = Cause("killed", "rank 1 died by SIGKILL", rank=1, local_rank=1)
CLEAN, KILLED = ExitStatus(0), ExitStatus(None, 9)


def running(nodes=1):
    """Return a node whose two workers run."""
    policy = Policy(2, 15.0, 1800.0, 93, many_nodes=nodes > 1, host="a")
    assignment = Assignment(0, 0, nodes, 0, 2 * nodes, "127.0.0.1", 29500)
    return decide.decide(Node(policy), RoundReady(assignment, (0, 1)))[0]


def play(node, *events):
    """Feed events; return the node and all effects."""
    done = []
    for event in events:
        node, effects = decide.decide(node, event)
        done += effects
    return node, done


def test_an_announcement_asks_ranks():
    """The signal is told to the others, ranks are asked once the round leaves, and work goes on."""
    steps = [Preempted(GOES), RoundLeaves(GOES), RanksHeld(7), SaveAgreed(8)]
    node, done = play(running(), *steps)
    assert done == steps
    assert node.phase is Phase.RUNNING
    assert play(node, Preempted(GOES))[1] == []


def test_ranks_that_leave_with_0_end_the_job_with_0():
    """On one node the job is over when its ranks have left."""
    node, _ = play(running(), Preempted(GOES), RoundLeaves(GOES))
    _, done = play(node, WorkerExited(0, CLEAN), WorkerExited(1, CLEAN))
    assert done == [
        CloseRendezvous("graceful"),
        Finish(0, f"all workers succeeded, after: {GOES.what}"),
    ]


@pytest.mark.parametrize(("status", "code"), [(CLEAN, 0), (KILLED, 1)])
def test_ranks_that_stay_are_stopped_when_the_time_is_over(status, code):
    """After the grace time SIGTERM with the ordinary stop time; 0 only if all end cleanly."""
    node, done = play(running(), Preempted(GOES), GraceOver())
    assert done[-1] == StopWorkers(signal.SIGTERM, 15.0)
    _, done = play(node, WorkerExited(0, CLEAN), WorkerExited(1, status), GroupStopped())
    assert done[-1].exit_code == code


def test_ranks_that_are_held_are_released_while_they_are_stopped():
    """A signal that ends the job between the question and the answer leaves no rank waiting."""
    node, _ = play(running(), Preempted(GOES), RoundLeaves(GOES), Signalled(signal.SIGTERM))
    assert node.phase is Phase.STOPPING
    assert play(node, RanksHeld(7), SaveAgreed(8))[1] == [RanksHeld(7), SaveAgreed(8)]


def test_a_failure_on_a_node_that_must_go_is_no_restart():
    """Its other workers are stopped; with many nodes the others hear that it leaves."""
    node, _ = play(running(nodes=2), Preempted(GOES), RoundLeaves(GOES))
    node, done = play(node, WorkerExited(1, KILLED, DEAD))
    assert done == [ReportFault(DEAD, Outcome.SIGNALLED, 0), StopWorkers(signal.SIGTERM, 15.0)]
    assert not any(isinstance(effect, OpenNextRound) for effect in done)
    _, done = play(node, WorkerExited(0, CLEAN), GroupStopped())
    assert LeaveRendezvous(GOES) in done
    assert done[-1].exit_code == 1


def test_the_node_that_must_go_leaves_and_the_others_join_again():
    """When all have left and a round opens without it: exit 0 here, the next round there."""
    left = (WorkerExited(0, CLEAN), WorkerExited(1, CLEAN))
    there, done = play(running(nodes=2), RoundLeaves(GOES), SaveAgreed(3), *left)
    assert done[-1] == ReportSuccess()
    _, done = play(there, NextRoundOpened(GOES))
    assert done[-1] == Join(1, GOES)
    here, _ = play(running(nodes=2), Preempted(GOES), RoundLeaves(GOES), *left)
    _, done = play(here, NextRoundOpened(GOES))
    assert done == [LeaveRendezvous(GOES), Finish(0, GOES.what)]


def test_a_spare_that_must_go_leaves_at_once():
    """A node without workers has nothing to save."""
    policy = Policy(2, 15.0, 1800.0, 93, many_nodes=True, host="a")
    _, done = play(Node(policy), Preempted(GOES))
    assert done == [LeaveRendezvous(GOES), Finish(0, GOES.what)]


SERVES = Policy(2, 15.0, 1800.0, 93, many_nodes=True, is_store_host=True, host="a")


def test_a_store_host_without_ranks_that_must_go_lets_the_others_save():
    """The job ends with its store: it stays until all have left, and leaves with 0 then."""
    node, done = play(Node(SERVES), Preempted(GOES))
    assert (node.phase, done) == (Phase.JOINING, [Preempted(GOES)])
    assert play(node, Preempted(GOES))[1] == []
    node, done = play(node, RoundClosed("graceful"))
    assert (node.phase, done[-1].exit_code) == (Phase.FINISHED, 0)


def test_a_store_host_without_ranks_stays_no_longer_than_the_grace_time():
    """When the others have not left in time the job fails everywhere, and says why."""
    node, _ = play(Node(SERVES), Preempted(GOES))
    assert play(node, GraceOver())[1] == [CloseRendezvous("failure", GOES), Finish(1, GOES.what)]
    assert play(Node(SERVES), GraceOver())[1] == []


def test_a_store_host_that_must_go_between_two_rounds_says_so_in_the_next():
    """What it told the round that ended is forgotten: the next one saves and leaves."""
    node, _ = play(Node(SERVES), Preempted(GOES))
    assert play(node, NextRoundOpened(DEAD))[1] == [Join(1, DEAD), Preempted(GOES)]
    ready = RoundReady(Assignment(1, 0, 2, 0, 4, "127.0.0.1", 29500), (0, 1))
    node, _ = play(node, ready)
    assert node.must_go
    node, done = play(node, RoundLeaves(GOES), SaveAgreed(8))
    assert done == [RoundLeaves(GOES), SaveAgreed(8)]


def test_a_store_host_told_while_its_workers_stop_for_a_restart_does_not_end_the_job():
    """The restart goes on, with which all get ranks that can save."""
    assignment = Assignment(0, 0, 2, 0, 4, "127.0.0.1", 29500)
    node, _ = play(Node(SERVES), RoundReady(assignment, (0, 1)), NextRoundOpened(DEAD))
    node, done = play(node, Preempted(GOES))
    assert (node.phase, done) == (Phase.STOPPING, [Preempted(GOES)])
    over, done = play(node, GraceOver(), GroupStopped())
    assert (over.phase, done[-2]) == (Phase.FINISHED, CloseRendezvous("failure", GOES))
    node, done = play(node, GroupStopped())
    assert (node.phase, done) == (Phase.JOINING, [Join(1, DEAD), Preempted(GOES)])


class Stays:
    """What an agent needs that stays for the others; each turn of its loop brings one event."""

    def __init__(self, *events):
        self.reported, self.must_stay, self._events = [], True, list(events)
        loop = types.SimpleNamespace(run_once=self.turn)
        job = Mock(loop=loop, rendezvous=self, paths=types.SimpleNamespace(host="a"))
        job.plan.fault_tol_cfg = FaultToleranceConfig()
        self.agent = NodeAgent(job, SERVES)
        self.agent._node = Node(SERVES, Phase.FINISHED)

    def turn(self):
        self.agent.post(self._events.pop(0))
        self.must_stay = bool(self._events)

    def perform(self, effect):
        is_end = isinstance(effect, CloseRendezvous)
        self.reported.append((effect.reason, effect.cause.kind) if is_end else effect.cause)


OVER = RoundClosed("graceful")


@pytest.mark.parametrize(
    ("events", "reported"),
    [
        ((Preempted(GOES), OVER), [GOES]),
        ((Preempted(GOES), NextRoundOpened(DEAD), OVER), [GOES, GOES]),
        ((Preempted(GOES), GraceOver(), OVER), [GOES, ("failure", "preempted")]),
        ((Signalled(signal.SIGTERM), OVER), [("failure", "drained")]),
        ((NextRoundOpened(DEAD), OVER), []),
    ],
)
def test_a_store_host_whose_own_part_is_over_lets_the_others_save(events, reported):
    """One that only stays for its store asks all to save; a signal to end still ends the job."""
    here = Stays(*events)
    here.agent._stay()
    assert here.reported == reported


# --- the store host ------------------------------------------------------------------------------


A, B, C = "a_1_0", "b_1_0", "c_1_0"


def closed(**fields):
    """Return the entry of a closed round of two nodes."""
    return Entry(5, records.Phase.CLOSED, 0, active=2, world_size=2, **fields)


MEMORY = coordinator.Memory(
    active=tuple(Arrival(n, f"10.0.0.{i}", n, i) for i, n in enumerate((A, B))),
    spares=frozenset({C}),
)
WANTS_TO_GO = NodeMessage(Kind.PREEMPTED, A, cause=GOES)


def evaluate(entry, *messages, successes=0, me=B, min_nodes=2, memory=MEMORY, restarts=3):
    """Return what the store host decides."""
    rules = coordinator.CoordinatorRules(
        PlacementRules(min_nodes, 3), Budget(restarts, None), lease_s=5.0
    )
    done = tuple(
        NodeMessage(Kind.STATE, n, state=WorkerState.SUCCEEDED) for n in (A, B)[:successes]
    )
    quiet_s = dict.fromkeys((A, B, C), 0.0)
    view = coordinator.View(rules, memory, 100.0, entry, (*messages, *done), quiet_s, me=me)
    return coordinator.decide(view)


def test_the_round_leaves_when_a_node_must_go():
    """The host says so once; then it waits until every node has told how far its ranks are."""
    leaves = closed().again(B, cause=GOES, is_leaving=True)
    assert evaluate(closed(), WANTS_TO_GO) == leaves
    asked = closed(is_leaving=True)
    held = (NodeMessage(Kind.HELD, A, calls=7), NodeMessage(Kind.HELD, B, calls=9))
    assert isinstance(evaluate(asked, WANTS_TO_GO, held[0]), coordinator.Wait)
    assert evaluate(asked, WANTS_TO_GO, *held) == asked.again(B, cause=GOES, save_at=10)
    agreed = closed(is_leaving=True, save_at=10)
    assert isinstance(evaluate(agreed, WANTS_TO_GO, *held), coordinator.Wait)


def test_the_round_leaves_when_the_store_host_must_go_though_it_has_no_ranks():
    """Only nodes that work are waited for; the job is over then, whoever else is there."""
    spare_goes = NodeMessage(Kind.PREEMPTED, C, cause=GOES)
    leaves = closed().again(C, cause=GOES, is_leaving=True)
    assert evaluate(closed(), spare_goes, me=C) == leaves
    held = (NodeMessage(Kind.HELD, A, calls=7), NodeMessage(Kind.HELD, B, calls=9))
    asked = closed(is_leaving=True)
    agreed = asked.again(C, cause=GOES, save_at=10)
    assert evaluate(asked, spare_goes, *held, me=C) == agreed
    left = closed(is_leaving=True, save_at=10)
    assert evaluate(left, spare_goes, successes=2, me=C) == left.over(C, "graceful")


def test_a_node_that_is_done_or_a_spare_is_not_waited_for():
    """Only nodes that still work have ranks to ask; a spare that must go concerns nobody."""
    done = NodeMessage(Kind.STATE, B, state=WorkerState.SUCCEEDED)
    asked = closed(is_leaving=True)
    reported = NodeMessage(Kind.HELD, A, calls=4)
    agreed = asked.again(B, cause=GOES, save_at=5)
    assert evaluate(asked, WANTS_TO_GO, done, reported) == agreed
    assert isinstance(
        evaluate(closed(), NodeMessage(Kind.PREEMPTED, C, cause=GOES)), coordinator.Wait
    )


def test_the_job_goes_on_without_the_node_when_enough_others_are_there():
    """With a spare the next round opens; with none, or without restarts left, the job is over."""
    left = closed(is_leaving=True, save_at=10)
    opened = left.opened(B, GOES)
    assert evaluate(left, WANTS_TO_GO, successes=2) == opened
    alone = coordinator.Memory(active=MEMORY.active)
    over = left.over(B, "graceful")
    assert evaluate(left, WANTS_TO_GO, successes=2, memory=alone) == over
    assert evaluate(left, WANTS_TO_GO, successes=2, memory=alone, min_nodes=1) == opened
    assert evaluate(left, WANTS_TO_GO, successes=2, restarts=0) == over
    gone = NodeMessage(Kind.LEFT, C)
    assert evaluate(left, WANTS_TO_GO, gone, successes=2) == over


def test_the_job_ends_when_all_nodes_or_the_store_host_must_go():
    """A job that is preempted as a whole is over when its ranks have left."""
    left = closed(is_leaving=True, save_at=10)
    both = (WANTS_TO_GO, NodeMessage(Kind.PREEMPTED, B, cause=GOES))
    assert evaluate(left, *both, successes=2) == left.over(B, "graceful")
    assert evaluate(left, WANTS_TO_GO, successes=2, me=A) == left.over(A, "graceful")


def test_new_fields_pass_through_the_store():
    """What nodes and host write about leaving is read as it was written."""
    entry = closed(is_leaving=True, save_at=12, cause=GOES)
    assert records.decode(Entry, records.encode(entry)) == entry
    message = NodeMessage(Kind.HELD, A, calls=0)
    assert records.decode(NodeMessage, records.encode(message)) == message
