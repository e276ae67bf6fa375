# SPDX-License-Identifier: Apache-2.0
"""What the store host decides, row by row; then the host at work over a real store."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard
from unittest import mock

import pytest
from rendezvous_store import CAUSE, PREFIX, Served, arrival, hosted, name, rules

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._rendezvous import coordinator, coordinator_loop, keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import (
    CoordinatorRules,
    Decision,
    Memory,
    View,
    Wait,
    decide,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.log import DecisionLog
from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import Placement
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import (
    Entry,
    ForeignValueError,
    HangStage,
    Kind,
    NodeMessage,
    Phase,
    WorkerState,
    encode,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import Budget, Denylist
from nvidia_resiliency_ext.fault_tolerance._rendezvous.session import (
    NodeSession,
    Opened,
    RankAssigned,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import JobStore
from nvidia_resiliency_ext.shared_utils.clock import ManualClock, SystemClock
from nvidia_resiliency_ext.shared_utils.hang_culprit import RankState
from nvidia_resiliency_ext.shared_utils.rank_activity import Activity

NOW = 1000.0
LOST_S = 100.0
OPEN = Entry(0, Phase.OPEN, 0)
REOPENED = Entry(4, Phase.OPEN, 2)
CLOSED = Entry(3, Phase.CLOSED, 1, active=3)
DEADLINE_S = 60.0


def came(*indices: int) -> tuple[NodeMessage, ...]:
    """Return the messages of nodes that arrived."""
    return tuple(
        NodeMessage(Kind.ARRIVED, name(index), arrival=arrival(index)) for index in indices
    )


def knows(*indices: int) -> tuple[NodeMessage, ...]:
    """Return the messages of nodes that know that the round is open."""
    return tuple(NodeMessage(Kind.ACKNOWLEDGED, name(index)) for index in indices)


def state(index: int, what: WorkerState) -> NodeMessage:
    """Return a node's message on its workers."""
    cause = None if what is WorkerState.SUCCEEDED else CAUSE
    return NodeMessage(Kind.STATE, name(index), state=what, cause=cause)


def quiet(**seconds: float) -> Mapping[str, float]:
    """Return how long nodes have been quiet: `n1=100.0` is node number 1."""
    return {name(int(key[1:])): value for key, value in seconds.items()}


def ask(
    by: CoordinatorRules, memory: Memory, entry: Entry, *messages: NodeMessage, **view: Any
) -> Decision:
    """Return the decision on a view."""
    return decide(View(by, memory, NOW, entry=entry, messages=messages, **view))


def is_verdict(decision: Decision) -> TypeGuard[Entry]:
    """Return whether a decision blames somebody for a hang."""
    return isinstance(decision, Entry) and decision.hang == HangStage.EVALUATED


def opens(decision: Decision) -> TypeGuard[Entry]:
    """Return whether a decision opens a round."""
    return isinstance(decision, Entry) and decision.phase is Phase.OPEN


def ends(decision: Decision) -> TypeGuard[Entry]:
    """Return whether a decision ends the job."""
    return isinstance(decision, Entry) and decision.phase is Phase.OVER


def closes(decision: Decision) -> TypeGuard[Placement]:
    """Return whether a decision closes the round."""
    return isinstance(decision, Placement)


def waits(decision: Decision) -> TypeGuard[Wait]:
    """Return whether nothing is done."""
    return isinstance(decision, Wait)


THREE = Memory(active=tuple(arrival(index) for index in range(3)))
ALIVE = quiet(n0=0.1, n1=0.1, n2=0.1)


# When ranks hang -------------------------------------------------------------------------------

BROKE = Cause("hang_section", "x", detail={"limit_words": "rank 0 was in section 'step' for 2 s"})
ASKED = dataclasses.replace(CLOSED, hang=HangStage.ASKED, world_size=3)
SOON, LATE = coordinator.HANG_ANSWERS_S / 2, 2 * coordinator.HANG_ANSWERS_S


def hung(index: int, activity: Activity, cause: Cause | None = None) -> NodeMessage:
    """Return what a node says of its one rank, with the limit that the rank broke if it did."""
    ranks = (RankState(index, activity, f"node{index}", activity.value),)
    return NodeMessage(Kind.HUNG, name(index), cause=cause, ranks=ranks)


def test_a_rank_that_waits_makes_the_host_ask_all_nodes() -> None:
    """Who broke a limit may only wait for another node's rank: the others are asked first, once."""
    accused = hung(0, Activity.WAITING, BROKE)
    entry = dataclasses.replace(CLOSED, world_size=3)
    asks = ask(rules(3), THREE, entry, accused, quiet_s=ALIVE)
    assert asks == entry.again("", hang=HangStage.ASKED)
    assert isinstance(ask(rules(3), THREE, ASKED, accused, quiet_s=ALIVE), Wait)


def test_all_answers_name_the_culprit() -> None:
    """When all nodes have answered, the rank that does not wait is the cause, and its host."""
    messages = (
        hung(0, Activity.WAITING, BROKE),
        hung(1, Activity.WAITING),
        hung(2, Activity.WORKING),
    )
    found = ask(rules(3), THREE, ASKED, *messages, quiet_s=ALIVE)
    assert is_verdict(found)
    assert (found.cause.rank, found.cause.host, found.cause.kind) == (2, "node2", "hang_section")
    assert found.cause.what == (
        "rank 2 on host node2 working; ranks 0 and 1 waited for it"
        " (rank 0 was in section 'step' for 2 s)"
    )
    done = dataclasses.replace(ASKED, hang=HangStage.EVALUATED)
    assert isinstance(ask(rules(3), THREE, done, *messages, quiet_s=ALIVE), Wait)


def test_a_stopped_rank_is_blamed_without_asking() -> None:
    """What is certain does not depend on the others' answers."""
    found = ask(rules(3), THREE, CLOSED, hung(1, Activity.STOPPED, BROKE), quiet_s=ALIVE)
    assert is_verdict(found)
    assert found.cause.rank == 1


def test_a_node_that_does_not_answer_is_named_and_not_waited_for() -> None:
    """After some seconds the verdict says which hosts are missing, and blames no rank."""
    messages = (hung(0, Activity.WAITING, BROKE), hung(1, Activity.WAITING))
    early = ask(rules(3), THREE, ASKED, *messages, quiet_s=ALIVE, entry_age_s=SOON)
    assert isinstance(early, Wait)
    found = ask(rules(3), THREE, ASKED, *messages, quiet_s=ALIVE, entry_age_s=LATE)
    assert is_verdict(found)
    assert found.cause.rank is None
    assert found.cause.what.endswith("no answer from node2")


# While a round is open -------------------------------------------------------------------------


def test_too_few_nodes_are_waited_for_with_the_reason() -> None:
    """A round with fewer nodes than needed stays open, and the host can say why."""
    decision = ask(rules(3), Memory(), OPEN, *came(0, 1))
    assert isinstance(decision, Wait)
    assert "needed: 3" in decision.why
    assert decision.until <= NOW + coordinator.LOOK_AGAIN_S


def test_the_first_round_closes_with_the_last_needed_node() -> None:
    """Nobody is waited for who has not been there."""
    decision = ask(rules(3, most=5), Memory(), OPEN, *came(2, 0, 1))
    assert closes(decision)
    assert [one.node for one in decision.active] == [name(0), name(1), name(2)]


@pytest.mark.parametrize("kind", [Kind.LEFT, Kind.UNHEALTHY])
def test_who_left_after_arriving_is_not_placed(kind: Kind) -> None:
    """A node that says that it goes does not count as there."""
    messages = (*came(0, 1, 2), NodeMessage(kind, name(1)))
    assert isinstance(ask(rules(3, most=4), Memory(), OPEN, *messages), Wait)
    decision = ask(rules(3, most=4), Memory(), OPEN, *messages, *came(3))
    assert closes(decision)
    assert name(1) not in [one.node for one in decision.active]


def test_who_is_lost_after_arriving_is_not_placed() -> None:
    """A node whose lease expired while it waited does not count as there."""
    assert isinstance(ask(rules(2), Memory(), OPEN, *came(0, 1), quiet_s=quiet(n1=LOST_S)), Wait)


def test_a_restart_waits_for_those_active_before_who_live_and_know() -> None:
    """With a spare there, a survivor that knows of the round is given a last call, no longer."""
    by = rules(3, most=4, last_call_s=1.0)
    messages = (*knows(0, 1, 2), *came(0, 1, 3))
    first = ask(by, THREE, REOPENED, *messages, quiet_s=ALIVE)
    assert isinstance(first, Wait)
    assert first.is_last_call
    assert "node2" in first.why
    waited = dataclasses.replace(THREE, enough_since=NOW - 1.0)
    assert closes(ask(by, waited, REOPENED, *messages, quiet_s=ALIVE))


def test_nobody_starts_beside_a_node_that_may_train_on() -> None:
    """A survivor of which there is no sign is waited for until its lease has expired."""
    by = rules(3, most=4)
    waited = dataclasses.replace(THREE, enough_since=NOW - LOST_S)
    messages = (*knows(0, 1), *came(0, 1, 3))
    decision = ask(by, waited, REOPENED, *messages, quiet_s=ALIVE)
    assert isinstance(decision, Wait)
    assert "node2" in decision.why
    gone = quiet(n0=0.1, n1=0.1, n2=LOST_S)
    decision = ask(by, waited, REOPENED, *messages, quiet_s=gone)
    assert closes(decision)


@pytest.mark.parametrize("kind", [Kind.LEFT, Kind.UNHEALTHY])
def test_who_said_that_it_goes_is_not_waited_for(kind: Kind) -> None:
    """A survivor that leaves keeps nobody waiting, in whatever round it said so."""
    by = rules(3, most=4)
    message = NodeMessage(kind, name(2), cause=CAUSE)
    assert closes(ask(by, THREE, REOPENED, *came(0, 1, 3), message, quiet_s=ALIVE))
    carried = coordinator.carried_over(THREE, (message,))
    assert closes(ask(by, carried, REOPENED, *came(0, 1, 3), quiet_s=ALIVE))


def test_started_differently_ends_the_first_round_only() -> None:
    """A mismatch ends a job that has not begun, and does not touch one that has."""
    message = NodeMessage(Kind.MISMATCH, name(1), text="--nnodes is 2 on node1 and 3 on node0")
    decision = ask(rules(2), Memory(), OPEN, *came(0, 1), message)
    assert ends(decision)
    assert decision.cause is not None
    assert decision.cause.what == message.text
    later = ask(rules(2), THREE, REOPENED, *came(0, 1, 2), message)
    assert closes(later)


@pytest.mark.parametrize(("unhealthy", "is_over"), [(0, False), (1, False), (2, True), (3, True)])
def test_more_unhealthy_nodes_than_may_be_missing_end_the_job(
    unhealthy: int, is_over: bool
) -> None:
    """With one node to spare a second unhealthy one ends the job, and the nodes are named."""
    messages = tuple(NodeMessage(Kind.UNHEALTHY, name(index)) for index in range(unhealthy))
    decision = ask(rules(3, most=4), Memory(), OPEN, *came(4, 5, 6), *messages)
    assert ends(decision) if is_over else closes(decision)
    if ends(decision):
        assert decision.reason == "failure"
        assert decision.cause is not None
        assert name(0) in decision.cause.what


def test_unhealthy_nodes_of_earlier_rounds_count() -> None:
    """The count is the job's, also for nodes that said so while others trained."""
    memory = coordinator.carried_over(THREE, (NodeMessage(Kind.UNHEALTHY, name(7)),))
    last = NodeMessage(Kind.UNHEALTHY, name(8))
    assert closes(ask(rules(3, most=4), memory, REOPENED, *came(0, 1, 2)))
    assert ends(ask(rules(3, most=4), memory, REOPENED, *came(0, 1, 2), last))


def test_in_a_job_array_unhealthy_nodes_are_not_counted() -> None:
    """Where nodes are replaced from outside, any number of them may be unhealthy."""
    messages = tuple(NodeMessage(Kind.UNHEALTHY, name(index)) for index in range(5))
    by = rules(2, counts_unhealthy=False)
    assert closes(ask(by, Memory(), OPEN, *messages, *came(6, 7)))


def test_two_launchers_with_one_address_end_the_job() -> None:
    """Nodes that cannot work together are a failure that says so."""
    twin = dataclasses.replace(arrival(1), addr=arrival(0).addr)
    message = NodeMessage(Kind.ARRIVED, twin.node, arrival=twin)
    decision = ask(rules(2), Memory(), OPEN, *came(0), message)
    assert ends(decision)
    assert decision.cause is not None
    assert decision.cause.kind == "placement"


# While workers run -----------------------------------------------------------------------------


def done(*indices: int) -> tuple[NodeMessage, ...]:
    """Return the messages of nodes whose workers all ended well."""
    return tuple(state(index, WorkerState.SUCCEEDED) for index in indices)


def test_nothing_happens_while_all_is_well() -> None:
    """A healthy round waits."""
    assert isinstance(ask(rules(3), THREE, CLOSED, quiet_s=ALIVE), Wait)


def test_the_job_ends_well_when_all_have() -> None:
    """Two of three are not all; three are; who ended well twice counts once."""
    assert isinstance(ask(rules(3), THREE, CLOSED, *done(0, 1, 1, 0), quiet_s=ALIVE), Wait)
    decision = ask(rules(3), THREE, CLOSED, *done(0, 1, 2), quiet_s=ALIVE)
    assert decision == CLOSED.over("", "graceful")


@pytest.mark.parametrize(
    ("messages", "silent"),
    [
        ((), True),
        ((NodeMessage(Kind.LEFT, name(1), cause=CAUSE),), False),
        ((NodeMessage(Kind.UNHEALTHY, name(1), cause=CAUSE),), False),
        ((state(1, WorkerState.FAILED),), False),
        ((state(1, WorkerState.UNHEALTHY),), False),
    ],
    ids=["lost", "left", "unhealthy", "failed", "broken"],
)
def test_a_node_that_drops_out_opens_the_next_round(
    messages: tuple[NodeMessage, ...], silent: bool
) -> None:
    """However a node with a place drops out, the job restarts, and with the cause."""
    seconds = quiet(n0=0.1, n1=LOST_S if silent else 0.1, n2=0.1)
    decision = ask(rules(3), THREE, CLOSED, *messages, quiet_s=seconds)
    assert opens(decision)
    if silent:
        assert decision.cause.kind == "node_lost"
        assert decision.cause.host == "node1"
    else:
        assert decision.cause == CAUSE
    spent = dataclasses.replace(rules(3), budget=Budget(1))
    ended = ask(spent, THREE, CLOSED, *messages, quiet_s=seconds)
    assert ended == CLOSED.over("", "failure", decision.cause)


def test_who_ended_well_may_be_silent_or_leave() -> None:
    """A node that is done is not lost, whatever becomes of it."""
    messages = (
        *done(1),
        NodeMessage(Kind.LEFT, name(1), cause=CAUSE),
        state(1, WorkerState.FAILED),
    )
    seconds = quiet(n0=0.1, n1=LOST_S, n2=0.1)
    assert isinstance(ask(rules(3), THREE, CLOSED, *messages, quiet_s=seconds), Wait)


def test_a_spare_that_is_lost_restarts_nobody() -> None:
    """Only nodes with a place matter while workers run."""
    messages = (NodeMessage(Kind.LEFT, name(7)), state(8, WorkerState.FAILED))
    seconds = {**ALIVE, **quiet(n9=LOST_S)}
    assert isinstance(ask(rules(3, most=9), THREE, CLOSED, *messages, quiet_s=seconds), Wait)


@pytest.mark.parametrize(("age_s", "restarts"), [(0.0, False), (3590.0, False), (3610.0, True)])
def test_a_budget_with_a_window_refills(age_s: float, restarts: bool) -> None:
    """A restart counts for as long as the window, also when the decision itself is old."""
    by = dataclasses.replace(rules(3), budget=Budget(1, window_s=3600.0))
    entry = dataclasses.replace(CLOSED, round=5, restart_ages_s=(0.5,))
    seconds = quiet(n0=0.1, n1=LOST_S, n2=0.1)
    decision = ask(by, THREE, entry, quiet_s=seconds, entry_age_s=age_s)
    assert opens(decision) if restarts else ends(decision)


@pytest.mark.parametrize(
    ("broken", "well", "expected"),
    [
        ((0,), (), waits), ((0, 1), (), opens), ((0,), (1,), waits), ((0, 1), (2,), opens),
        ((0,), (1, 2), ends), ((0, 1, 2), (), opens),
    ],
)  # fmt: skip
def test_min_healthy_bears_what_it_may(
    broken: tuple[int, ...], well: tuple[int, ...], expected: Callable[[Decision], bool]
) -> None:
    """Of three nodes one may break; when nobody works any more and enough are done, it ends."""
    by = rules(2, most=3, min_healthy=True)
    messages = (*(state(index, WorkerState.FAILED) for index in broken), *done(*well))
    decision = ask(by, THREE, CLOSED, *messages, quiet_s=ALIVE)
    assert expected(decision)
    if ends(decision):
        assert decision.reason == "graceful"


# The host at work ------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[Served]:
    """A store."""
    made = Served()
    yield made
    made.close()


@dataclasses.dataclass
class Crew:
    """Nodes of one job, driven by the test."""

    served: Served
    sessions: list[NodeSession]
    stores: list[JobStore]
    seqs: list[int]

    def follow(self, index: int) -> Any:
        """Return the event of the next decision for a node."""
        log, entry = DecisionLog(self.stores[index]), None
        deadline = time.monotonic() + DEADLINE_S
        while entry is None:
            assert time.monotonic() < deadline
            entry = log.wait_for(self.seqs[index] + 1, DEADLINE_S)
        self.seqs[index] = entry.seq
        return self.sessions[index].take(entry)

    def arrive(self) -> None:
        """Let all nodes arrive."""
        for index, session in enumerate(self.sessions):
            session.arrive(arrival(index))


@pytest.fixture
def crew(served: Served) -> Callable[[int], Crew]:
    """Make nodes that have attached."""

    def make(count: int) -> Crew:
        stores = [served.connect() for _ in range(count)]
        sessions = [
            NodeSession(one, name(i), f"node{i}", DEADLINE_S) for i, one in enumerate(stores)
        ]
        seqs = [session.entry.seq for session in sessions]
        return Crew(served, sessions, stores, seqs)

    return make


def test_a_round_needs_few_operations_of_a_node(
    served: Served, crew: Callable[[int], Crew]
) -> None:
    """From the opening of a round to its end a node asks the store at most 8 times, on average."""
    with hosted(served, rules(4)):
        nodes = crew(4)
        nodes.arrive()
        assert all(isinstance(nodes.follow(index), RankAssigned) for index in range(4))
        before = sum(one.operations for one in nodes.stores)
        nodes.sessions[2].open_next(0, CAUSE)
        for index in range(4):
            nodes.follow(index)
        nodes.arrive()
        assert all(isinstance(nodes.follow(index), RankAssigned) for index in range(4))
        spent = sum(one.operations for one in nodes.stores) - before
    # One opened the round and one set the notification key.
    assert spent <= 8 * 4 + 3


def test_the_store_does_not_grow_with_the_rounds(
    served: Served, crew: Callable[[int], Crew]
) -> None:
    """After 500 rounds the store holds as many keys as after 50."""
    counts = {}
    with hosted(served, rules(2, lease_s=60.0)) as host:
        host._keep_s = 0.0
        nodes = crew(2)
        for round_ in range(501):
            nodes.arrive()
            for index in range(2):
                assert isinstance(nodes.follow(index), RankAssigned)
            counts[round_] = served._server.num_keys()
            nodes.sessions[round_ % 2].open_next(round_, CAUSE)
            for index in range(2):
                nodes.follow(index)
    assert counts[500] <= counts[50] + 4


def test_a_node_that_dies_before_it_is_counted_delays_a_round_by_a_second(
    served: Served, crew: Callable[[int], Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message without a count wakes nobody, and is found at the next look."""
    monkeypatch.setattr(coordinator, "LOOK_AGAIN_S", 0.1)
    with hosted(served, rules(2)):
        nodes = crew(2)
        nodes.sessions[0].arrive(arrival(0))
        message = NodeMessage(Kind.ARRIVED, name(1), arrival=arrival(1))
        nodes.stores[1].append_line(keys.messages(0), encode(message))
        assert isinstance(nodes.follow(0), RankAssigned)


def test_a_node_counted_too_late_still_takes_the_place_it_was_given(
    served: Served, crew: Callable[[int], Crew]
) -> None:
    """Between a node's message and its count the round may close with it; it must not stand by."""
    with hosted(served, rules(2, most=3)):
        nodes = crew(3)
        real, closed = nodes.stores[0].count, threading.Event()

        def late(key: str, step: int) -> int:
            if key == keys.arrivals(0):
                for index in (1, 2):
                    nodes.sessions[index].arrive(arrival(index))
                closed.set()
                nodes.follow(1)
            return real(key, step)

        nodes.stores[0].count = late  # type: ignore[method-assign]
        nodes.sessions[0].arrive(arrival(0))
        assert closed.is_set()
        event = nodes.follow(0)
        assert isinstance(event, RankAssigned)
        assert event.assignment.group_rank == 0


def test_garbage_in_the_queue_is_refused_and_the_round_closes(
    served: Served, crew: Callable[[int], Crew], caplog: pytest.LogCaptureFixture
) -> None:
    """Messages of foreign programs, or of nodes in others' names, are reported and left out."""
    with hosted(served, rules(2)):
        nodes = crew(2)
        name_ = served.connect()._name(keys.messages(0))
        served.raw().append(name_, "\x00\xff garbage\n{}\n")
        forged = NodeMessage(Kind.ARRIVED, name(0), arrival=arrival(1))
        nodes.stores[0].append_line(keys.messages(0), encode(forged))
        ghost = NodeMessage(Kind.ARRIVED, "10.0.0.9_1_0", arrival=None)
        nodes.stores[0].append_line(keys.messages(0), encode(ghost))
        nodes.arrive()
        ranks = [nodes.follow(index).assignment.group_rank for index in range(2)]
    assert ranks == [0, 1]
    assert "refused what somebody else wrote" in caplog.text


def test_an_arrival_without_a_lease_does_not_block_the_host(
    served: Served, crew: Callable[[int], Crew]
) -> None:
    """A forged arrival of a node that never renewed a lease is a node that is lost, no more."""
    with hosted(served, rules(1, most=3)):
        nodes = crew(1)
        ghost = NodeMessage(Kind.ARRIVED, name(5), arrival=arrival(5))
        nodes.stores[0].append_line(keys.messages(0), encode(ghost))
        nodes.arrive()
        event = nodes.follow(0)
    assert isinstance(event, RankAssigned)


@pytest.mark.parametrize("garbage", ["garbage", "\x00", "-"])
def test_garbage_at_the_next_decision_ends_the_host(
    served: Served, crew: Callable[[int], Crew], garbage: str
) -> None:
    """A foreign value where the next decision belongs is named by the host and by a node."""
    host = coordinator_loop.Coordinator(
        served.connect(), rules(2), me="host", epoch="e", clock=SystemClock()
    )
    nodes = crew(1)
    served.raw().set(served.connect()._name(keys.log(1)), garbage)
    for end in (lambda: nodes.sessions[0].end("failure", CAUSE), host.run):
        with pytest.raises(ForeignValueError, match="log/1: the signature is wrong"):
            end()


def test_garbage_at_its_place_ends_a_node(served: Served, crew: Callable[[int], Crew]) -> None:
    """A node whose place was overwritten does not train at a rank that somebody made up."""
    with hosted(served, rules(1)):
        nodes = crew(1)
        nodes.arrive()
        closed = DecisionLog(served.connect()).wait_for(1, DEADLINE_S)
        assert closed is not None
        served.raw().set(served.connect()._name(keys.assignment(name(0))), "garbage")
        with pytest.raises(ForeignValueError, match="assignment/"):
            nodes.sessions[0].take(closed)


def test_a_node_lost_while_a_round_is_open_stays_lost(
    served: Served, crew: Callable[[int], Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a round stays open, a dead node that had arrived is never alive again."""
    monkeypatch.setattr(coordinator, "LOOK_AGAIN_S", 0.05)
    by = rules(2, lease_s=0.1)
    expiry_s = coordinator.expiry_s(by)
    with hosted(served, by) as running:
        nodes = crew(2)
        nodes.sessions[0].arrive(arrival(0))
        waiting = threading.Event()
        deadline = time.monotonic() + DEADLINE_S
        while name(0) not in running._leases:
            assert time.monotonic() < deadline
            waiting.wait(0.01)
        # Longer than it takes until the host would forget it.
        waiting.wait(2.5 * expiry_s + 0.2)
        nodes.sessions[1].arrive(arrival(1))
        assert DecisionLog(nodes.stores[1]).wait_for(1, expiry_s) is None
        assert running.entry.phase is Phase.OPEN


def test_a_host_that_is_held_up_while_it_reads_leases_loses_nobody(
    served: Served, crew: Callable[[int], Crew]
) -> None:
    """A lease renewed after the host began to read is no older than the answer."""
    clock = ManualClock()
    host = coordinator_loop.Coordinator(
        served.connect(), rules(1), me="host", epoch="e", clock=clock
    )
    session = crew(1).sessions[0]
    session.arrive(arrival(0))
    host._act(host._decide())
    assert host.entry.phase is Phase.CLOSED
    counters = host.store.counters

    def read_late(names: Iterator[str]) -> list[int]:
        clock.advance(LOST_S)
        session.renew_lease()
        return counters(names)

    clock.advance(host.rules.lease_s)
    with mock.patch.object(host.store, "counters", read_late):
        host._decide()
    assert waits(host._decide())


def test_nobody_else_can_say_that_a_node_knows_of_a_round(
    served: Served, crew: Callable[[int], Crew]
) -> None:
    """Whatever is added to its lease, a round waits for the word of a node that may train on."""
    with hosted(served, rules(2, most=3, lease_s=60.0)):
        nodes = crew(3)
        for index in range(2):
            nodes.sessions[index].arrive(arrival(index))
        assert all(isinstance(nodes.follow(index), RankAssigned) for index in range(2))
        nodes.follow(2)
        nodes.sessions[0].open_next(0, CAUSE)
        for index in (0, 2):
            nodes.follow(index)
            nodes.sessions[index].arrive(arrival(index))
        for step in (1 << 32, 1 << 40):
            served.raw().add(PREFIX + keys.lease(name(1)), step)
        log = DecisionLog(served.connect())
        assert log.wait_for(nodes.seqs[0] + 1, 0.5) is None
        assert isinstance(nodes.follow(1), Opened)
        assert isinstance(nodes.follow(0), RankAssigned)


def test_messages_of_a_round_gone_by_change_nothing(
    served: Served, crew: Callable[[int], Crew]
) -> None:
    """Success and failure told late are not taken for those of the round that came since."""
    with hosted(served, rules(2)) as running:
        nodes = crew(2)
        nodes.arrive()
        for index in range(2):
            nodes.follow(index)
        nodes.sessions[0].open_next(0, CAUSE)
        for index in range(2):
            nodes.follow(index)
        nodes.sessions[1].succeeded(0)
        failed = WorkerState.FAILED
        nodes.sessions[1].send(Kind.STATE, in_round=0, state=failed, cause=CAUSE)
        nodes.arrive()
        for index in range(2):
            assert isinstance(nodes.follow(index), RankAssigned)
        nodes.sessions[0].succeeded(1)
        nodes.sessions[0].notify()
        assert DecisionLog(nodes.stores[1]).wait_for(nodes.seqs[1] + 1, 0.3) is None
        nodes.sessions[1].succeeded(1)
        last = DecisionLog(nodes.stores[1]).wait_for(nodes.seqs[1] + 1, DEADLINE_S)
        assert last is not None
        assert last.reason == "graceful"
        for session in nodes.sessions:
            session.take(last)
            session.send(Kind.GOODBYE)
    assert running.entry.phase is Phase.OVER


def test_who_fails_to_say_how_often_it_succeeded_still_counts(
    served: Served, crew: Callable[[int], Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that dies after its message of success, before the count, does not hold up the end."""
    monkeypatch.setattr(coordinator, "LOOK_AGAIN_S", 0.05)
    with hosted(served, rules(1)):
        nodes = crew(1)
        nodes.arrive()
        nodes.follow(0)
        message = NodeMessage(Kind.STATE, name(0), state=WorkerState.SUCCEEDED)
        nodes.stores[0].append_line(keys.messages(0), encode(message))
        last = DecisionLog(nodes.stores[0]).wait_for(2, DEADLINE_S)
        assert last is not None
        assert last.reason == "graceful"
        nodes.sessions[0].take(last)
        nodes.sessions[0].send(Kind.GOODBYE)


def test_the_cause_of_a_restart_reaches_a_node_that_asked_for_it_too(
    served: Served, crew: Callable[[int], Crew]
) -> None:
    """Two nodes that open a round at once open it once, and the end is told to both."""
    with hosted(served, rules(2)):
        nodes = crew(2)
        nodes.arrive()
        for index in range(2):
            nodes.follow(index)
        for index in range(2):
            nodes.sessions[index].open_next(0, Cause("exit", f"on {index}"))
        assert [nodes.follow(index) for index in range(2)] == [None, None]
        assert {session.entry.round for session in nodes.sessions} == {1}
        nodes.sessions[0].end("failure", CAUSE)
        nodes.sessions[1].end("graceful", None)
        assert nodes.follow(0) is None
        over = nodes.follow(1)
        assert over.entry.reason == "failure"
        for session in nodes.sessions:
            session.send(Kind.GOODBYE)


# Hosts that attribution names ------------------------------------------------------------------


def placed(
    by: CoordinatorRules, excluded: set[str], *indices: int, **memory: Any
) -> list[str] | str:
    """Return who works in a round, or why it is waited."""
    known = Memory(excluded=frozenset(excluded), **memory)
    decision = ask(by, known, OPEN, *came(*indices))
    if isinstance(decision, Wait):
        return decision.why
    assert closes(decision)
    return [one.node for one in decision.active]


@pytest.mark.parametrize("named", ["node0", "NODE0.some.domain", "10.0.0.0"])
def test_a_named_host_gets_no_place_while_others_are_enough(named: str) -> None:
    """It stands by instead; the name may be short, whole, or an address."""
    assert placed(rules(2, most=3), {named}, 0, 1, 2) == [name(1), name(2)]
    decision = ask(rules(2, most=3), Memory(excluded=frozenset({named})), OPEN, *came(0, 1, 2))
    assert closes(decision)
    assert [one.node for one in decision.excluded] == [name(0)]
    assert "named by attribution" in decision.why_excluded


def test_a_named_host_works_where_others_are_too_few() -> None:
    """A service reads logs, which anybody writes: its word must not end a job."""
    assert placed(rules(2, most=3), {"node0"}, 0, 1) == [name(0), name(1)]
    assert placed(rules(2, most=3), {"node0", "node1", "node2"}, 0, 1, 2) == [name(0), name(1)]


@pytest.mark.parametrize(
    "held",
    [{"excluded": frozenset({"node0"})}, {"failures": {"node0": (NOW - 3, NOW - 2, NOW - 1)}}],
)
def test_the_spare_of_an_unwanted_host_may_come_a_moment_later(held: Any) -> None:
    """A known spare that lives is waited for, as long as the last call; without one nobody is."""
    by, known = (
        rules(2, most=3),
        Memory(active=THREE.active[:2], spares=frozenset({name(2)}), **held),
    )
    decision = ask(by, known, REOPENED, *came(0, 1), quiet_s=ALIVE)
    assert isinstance(decision, Wait)
    assert (decision.why, decision.is_last_call) == ("spare nodes in place of node0", True)
    late = dataclasses.replace(known, enough_since=NOW - LOST_S)
    assert closes(ask(by, late, REOPENED, *came(0, 1), quiet_s=ALIVE))
    dead = quiet(n0=0.1, n1=0.1, n2=LOST_S)
    assert closes(ask(by, known, REOPENED, *came(0, 1), quiet_s=dead))
    assert closes(ask(by, known, REOPENED, *came(0, 1, 2), quiet_s=ALIVE))


def test_other_names_change_nothing() -> None:
    """Only whole names count."""
    assert placed(rules(2, most=3), {"node", "node01", "10.0.0"}, 0, 1, 2) == [name(0), name(1)]


def test_where_all_work_a_named_host_has_to_go() -> None:
    """In the older rendezvous the job goes on with fewer nodes, as long as these are enough."""
    by = rules(2, most=3)
    elastic = dataclasses.replace(by, placement=dataclasses.replace(by.placement, elastic=True))
    waited = {"enough_since": NOW - LOST_S}
    assert placed(elastic, {"node1"}, 0, 1, 2, **waited) == [name(0), name(2)]


def test_a_named_host_goes_before_one_that_failed() -> None:
    """With one spare only, the host that attribution names stays out, the other one works."""
    failures = {"node1": (NOW - 3, NOW - 2, NOW - 1)}
    assert placed(rules(2, most=3), {"node0"}, 0, 1, 2, failures=failures) == [name(1), name(2)]
    assert placed(rules(1, most=3), {"node0"}, 0, 1, 2, failures=failures) == [name(2)]


def test_names_that_come_while_a_round_is_open_count_in_it(
    served: Served, crew: Callable[[int], Crew]
) -> None:
    """The host reads them at each decision, and reports the node once."""
    named, reported = Denylist(), []
    served_host = coordinator_loop.Coordinator(
        served.connect(),
        rules(1, most=2),
        me="host",
        epoch="e",
        clock=SystemClock(),
        denylist=named,
        on_bad_node=reported.append,
    )
    for index, session in enumerate(crew(2).sessions):
        session.arrive(arrival(index))
    named.add(["node0"], "it fell off the bus")
    named.add(["node0"], "again")
    served_host._act(served_host._decide())
    assert served_host.entry.phase is Phase.CLOSED
    assert [(cause.kind, cause.host) for cause in reported] == [("attribution", "node0")]
    assert reported[0].what == "attribution names host node0: it fell off the bus"
