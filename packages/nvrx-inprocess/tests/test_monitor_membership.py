# SPDX-License-Identifier: Apache-2.0
"""For whom a monitor speaks: tables, and random walks of several nodes over one iteration store."""

import random
from collections import deque

import pytest

from nvidia_resiliency_ext.inprocess._monitor import membership as r
from nvidia_resiliency_ext.inprocess._monitor.membership import Membership
from nvidia_resiliency_ext.inprocess._monitor.messages import Completed, Decided, Interrupted
from nvidia_resiliency_ext.inprocess._protocol.decision import (
    Arrival,
    Decision,
    decide,
    encode_decision,
    is_complete,
    is_whole,
)
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord

K = Interruption
ALL = frozenset(range(4))


def record(rank: int, kind: Interruption) -> InterruptionRecord:
    """Return a record."""
    return InterruptionRecord(rank, kind)


def begun(world: int = 4, ranks=(0, 1), iteration: int = 0) -> Membership:
    """Return the membership of a node whose ranks have begun an iteration."""
    membership = Membership(world)
    for rank in ranks:
        membership.attach(rank)
        membership.begun(rank, iteration, rank, world, frozenset(range(world)))
    return membership


def decision(going: dict[int, int], out=(), ended=()) -> Decision:
    """Return a decision: initial ranks that go on with their numbers, and who does not."""
    arrivals = [Arrival(initial, rank, 4, is_out=False) for initial, rank in going.items()]
    arrivals += [Arrival(initial, None, None, is_out=True) for initial in out]
    arrivals += [Arrival(initial, None, None, is_out=False) for initial in ended]
    return decide(arrivals, frozenset([*going, *out, *ended]), ())


def decided(iteration: int, made: Decision) -> Decided:
    """Return the event that tells ranks a decision."""
    return Decided(iteration, encode_decision(made))


def kinds(effects) -> list[str]:
    """Return the names of effects."""
    return [type(effect).__name__ for effect in effects]


def test_first_to_begin_is_followed_once() -> None:
    """The outcome of an iteration is waited for once, however many ranks begin it."""
    membership = Membership(4)
    membership.attach(0)
    membership.attach(1)
    assert membership.begun(0, 0, 0, 4, ALL) == [r.Follow(0, ALL)]
    assert membership.begun(1, 0, 1, 4, ALL) == []


def test_what_ranks_say_goes_to_the_store() -> None:
    """Completion, report and arrival are written with the rank's number, and only once."""
    membership = begun()
    assert membership.completed(0, 0) == [r.Complete(0, Arrival(0, 0, 4, is_out=False))]
    assert membership.completed(0, 0) == []
    report = r.Interrupt(0, (record(1, K.EXCEPTION),), ALL)
    assert membership.reported(1, 0, K.EXCEPTION) == [report]
    assert membership.reported(1, 0, K.EXCEPTION) == []
    assert membership.arrived(1, 0) == [r.Arrive(0, Arrival(1, 1, 4, is_out=False), ALL)]
    assert membership.arrived(1, 0) == []


def test_dead_rank_is_reported_and_arrived_for() -> None:
    """A process that ends is TERMINATED, and its monitor arrives for it."""
    membership = begun()
    assert membership.ended(1) == [
        r.Interrupt(0, (record(1, K.TERMINATED),), ALL),
        r.Arrive(0, Arrival(1, None, None, is_out=False), ALL, has_reported=True),
    ]
    assert membership.ended(1) == []


def test_dead_before_it_began() -> None:
    """A rank that dies between attaching and beginning is accounted for in iteration 0."""
    membership = Membership(4)
    membership.attach(2)
    effects = membership.ended(2)
    assert kinds(effects) == ["Interrupt", "Arrive", "Follow"]
    assert not membership.is_settled


def test_killed_for_a_hard_timeout_is_one_record() -> None:
    """Who is killed by the monitor is HARD_TIMEOUT, not TERMINATED as well."""
    membership = begun()
    assert membership.timed_out(0, K.SOFT_TIMEOUT) == [
        r.Interrupt(0, (record(0, K.SOFT_TIMEOUT),), ALL)
    ]
    assert membership.timed_out(0, K.HARD_TIMEOUT) == [
        r.Interrupt(0, (record(0, K.HARD_TIMEOUT),), ALL)
    ]
    assert kinds(membership.ended(0)) == ["Arrive"]


def test_leaving_in_an_iteration_interrupts_it() -> None:
    """A rank that leaves an iteration that it began is reported, if it has not done so itself."""
    membership = begun()
    assert membership.left(0, is_lost=True) == [
        r.Interrupt(0, (record(0, K.BASE_EXCEPTION),), ALL),
        r.Arrive(0, Arrival(0, None, None, is_out=True), ALL, has_reported=True),
    ]
    membership.reported(1, 0, K.EXCEPTION)
    assert membership.left(1, is_lost=True) == [
        r.Arrive(0, Arrival(1, None, None, is_out=True), ALL, has_reported=True)
    ]
    assert membership.ended(0) == []


def test_ranks_that_left_their_function_get_no_records() -> None:
    """Records are read for ranks that are still inside, not for those that raised or ended."""
    membership = begun(ranks=range(4))
    assert membership.is_anybody_inside
    for rank in (0, 1, 2):
        membership.reported(rank, 0, K.EXCEPTION)
    membership.timed_out(3, K.SOFT_TIMEOUT)
    assert membership.is_anybody_inside
    membership.ended(3)
    assert not membership.is_anybody_inside
    membership.decided(0, decision({0: 0, 1: 1, 2: 2}, ended=(3,)))
    assert membership.is_anybody_inside


def test_discarded_rank_arrives_in_the_next_iteration() -> None:
    """Who is discarded by its own rank assignment interrupts nobody."""
    membership = begun()
    membership.outcome(0, is_completed=False)
    membership.decided(0, decision({0: 0, 1: 1, 2: 2, 3: 3}))
    assert membership.left(1, is_lost=True, is_discarded=True) == [
        r.Arrive(1, Arrival(1, None, None, is_out=True), ALL)
    ]


def test_leaving_after_arrival_interrupts_the_next_iteration() -> None:
    """Who leaves after it arrived has a number that the others count on."""
    membership = begun()
    membership.reported(1, 0, K.EXCEPTION)
    membership.arrived(1, 0)
    assert kinds(membership.left(1, is_lost=True)) == ["Arrive"]
    effects = membership.decided(0, decision({0: 0, 1: 1, 2: 2, 3: 3}))
    assert r.Interrupt(1, (record(1, K.BASE_EXCEPTION),), ALL) in effects


def test_death_after_arrival_counts_in_the_next_iteration() -> None:
    """Who dies after its arrival was decided upon is reported in the iteration that follows."""
    membership = begun()
    membership.arrived(0, 0)
    membership.decided(0, decision({0: 0, 1: 1, 2: 2, 3: 3}))
    assert membership.ended(0) == [
        r.Interrupt(1, (record(0, K.TERMINATED),), ALL),
        r.Arrive(1, Arrival(0, None, None, is_out=False), ALL, has_reported=True),
    ]


def test_dead_rank_that_a_decision_still_counts_on() -> None:
    """If the decision was made before the death was written, it is written again for the next."""
    membership = begun()
    membership.ended(0)
    effects = membership.decided(0, decision({0: 0, 1: 1, 2: 2, 3: 3}))
    assert r.Interrupt(1, (record(0, K.TERMINATED),), ALL) in effects
    arrival = Arrival(0, None, None, is_out=False)
    assert r.Arrive(1, arrival, ALL, has_reported=True) in effects
    assert effects[-1] == r.Follow(1, ALL)


def test_dead_rank_is_settled_by_the_decision() -> None:
    """Nothing is owed for the dead once a decision goes on without them."""
    membership = begun(ranks=(0,))
    membership.ended(0)
    assert not membership.is_settled
    assert membership.decided(0, decision({1: 1, 2: 2, 3: 3}, ended=[0])) == []
    assert membership.is_settled


def test_completion_settles_everybody() -> None:
    """After completion nobody's end matters."""
    membership = begun()
    told = membership.outcome(0, is_completed=True)
    assert told == [r.Notify(0, Completed(0)), r.Notify(1, Completed(0))]
    assert membership.left(0, is_lost=False) == []
    assert membership.ended(1) == []
    assert membership.is_settled


def test_events_go_to_ranks_in_the_iteration() -> None:
    """Ranks receive events of the iteration that they are in, late ones when they begin it."""
    membership = begun(ranks=(0,))
    membership.attach(1)
    records = (record(3, K.EXCEPTION),)
    event = Interrupted(0, records, 0.5)
    assert membership.last_call_over(0, records, 0.5) == [r.Notify(0, event)]
    assert membership.begun(1, 0, 1, 4, ALL) == [r.Notify(1, event)]
    made = decision({0: 0, 1: 1, 2: 2}, ended=[3])
    effects = membership.decided(0, made)
    assert effects[:2] == [r.Notify(0, decided(0, made)), r.Notify(1, decided(0, made))]


def test_successor_goes_on_where_the_ranks_are() -> None:
    """A new monitor follows the latest iteration and reads what a late rank has yet to receive."""
    membership = Membership(4)
    membership.attach(0)
    membership.attach(1)
    who = frozenset({0, 1, 2})
    assert membership.begun(0, 5, 0, 3, who) == [r.Follow(5, who)]
    assert membership.begun(1, 4, 1, 4, ALL) == [r.CatchUp(4)]
    made = decision({0: 0, 1: 1, 2: 2}, ended=[3])
    assert membership.decided(4, made) == [r.Notify(1, decided(4, made))]
    assert membership.position == 5


def test_lost_node_is_spoken_for_until_a_decision_names_it() -> None:
    """Ranks of a lost node are reported once, in each iteration that still counts on them."""
    membership = begun()
    effects = membership.lost([2, 3, 1])
    assert kinds(effects) == ["Interrupt", "Arrive", "Interrupt", "Arrive"]
    assert effects[0] == r.Interrupt(0, (record(2, K.UNRESPONSIVE),), ALL)
    assert membership.lost([2, 3]) == []
    effects = membership.decided(0, decision({0: 0, 1: 1, 2: 2}, ended=[3]))
    assert r.Interrupt(1, (record(2, K.UNRESPONSIVE),), frozenset({0, 1, 2})) in effects
    assert all(
        effect.arrival.initial_rank == 2 for effect in effects if isinstance(effect, r.Arrive)
    )


def test_cut_off_node_gets_the_decision_and_interrupts_no_rank() -> None:
    """Ranks that a decision does not name receive it, and their leaving is no event."""
    membership = begun()
    made = decision({2: 2, 3: 3}, ended=[0, 1])
    assert membership.decided(0, made) == [
        r.Notify(0, decided(0, made)),
        r.Notify(1, decided(0, made)),
    ]
    assert membership.left(0, is_lost=True) == []
    assert membership.ended(1) == []
    assert membership.is_settled


class IterationStore:
    """The protocol's store, in memory."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.outcomes: dict[int, bool] = {}
        self.records: dict[int, list[InterruptionRecord]] = {}
        self.completions: dict[int, list[Arrival]] = {}
        self.arrivals: dict[int, list[Arrival]] = {}
        self.decisions: dict[int, Decision] = {}

    def apply(self, effect) -> None:
        n = effect.iteration
        if isinstance(effect, r.Complete):
            self.completions.setdefault(n, []).append(effect.arrival)
            if is_complete(self.completions[n]):
                self.outcomes.setdefault(n, True)
        elif isinstance(effect, r.Interrupt):
            self.records.setdefault(n, []).extend(effect.records)
            self.outcomes.setdefault(n, False)
        else:
            self.arrivals.setdefault(n, []).append(effect.arrival)
            whole = is_whole(self.arrivals[n], effect.participants)
            if whole and n not in self.decisions and not self.outcomes.setdefault(n, False):
                records = self.records.get(n, [])
                self.decisions[n] = decide(self.arrivals[n], effect.participants, records)


class Simulation:
    """Several nodes with their monitors, which die and are replaced, and ranks that fail."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.nodes = self.draw.choice((1, 2, 3))
        self.per_node = self.draw.choice((1, 2, 3))
        self.world = self.nodes * self.per_node
        self.iteration_store = IterationStore(self.world)
        self.memberships = [Membership(self.world) for _ in range(self.nodes)]
        self.pending: list[deque] = [deque() for _ in range(self.nodes)]
        self.followed: list[set[int]] = [set() for _ in range(self.nodes)]
        self.lost_nodes: set[int] = set()
        self.alive = set(range(self.world))
        self.present = set(range(self.world))
        self.said: dict[int, list] = {}
        self.state = dict.fromkeys(range(self.world), "begun")
        self.iteration = dict.fromkeys(range(self.world), 0)
        self.received: dict[int, dict[int, Decision]] = {rank: {} for rank in range(self.world)}
        self.completed: set[int] = set()
        self.faults = self.draw.randrange(6)
        for rank in range(self.world):
            self.memberships[self.node(rank)].attach(rank)
            self.begin(rank, 0, rank, self.world, frozenset(range(self.world)))

    def node(self, rank: int) -> int:
        return rank // self.per_node

    def begin(self, rank, iteration, number, world, who) -> None:
        self.said[rank] = [("begun", iteration, number, world, who)]
        self.state[rank], self.iteration[rank] = "begun", iteration
        self.notify(rank, self.said[rank][0])

    def say(self, rank, *message) -> None:
        self.said[rank].append(message)
        self.notify(rank, message)

    def notify(self, rank, message) -> None:
        membership = self.memberships[self.node(rank)]
        name, *rest = message
        if name == "left":
            effects = membership.left(rank, is_lost=True)
        else:
            effects = getattr(membership, name)(rank, *rest)
        self.take(self.node(rank), effects)

    def take(self, node: int, effects) -> None:
        for effect in effects:
            if isinstance(effect, r.Notify):
                if effect.initial_rank in self.present & self.alive:
                    self.receive(effect.initial_rank, effect.event)
            elif isinstance(effect, (r.Follow, r.CatchUp)):
                self.followed[node].add(effect.iteration)
            else:
                self.pending[node].append(effect)

    def receive(self, rank: int, event) -> None:
        if isinstance(event, Interrupted) and self.state[rank] in {"begun", "done"}:
            self.state[rank] = "interrupted"
        elif isinstance(event, Completed):
            self.completed.add(rank)
            self.present.discard(rank)
            self.memberships[self.node(rank)].left(rank, is_lost=False)
        elif isinstance(event, Decided) and event.iteration == self.iteration[rank]:
            self.received[rank][event.iteration] = event.decision
            if rank not in event.decision.going_on:
                self.leave(rank)
                return
            going = sorted(event.decision.going_on)
            self.begin(
                rank, event.iteration + 1, going.index(rank), len(going), event.decision.going_on
            )

    def leave(self, rank: int) -> None:
        self.present.discard(rank)
        self.notify(rank, ("left",))

    def step(self) -> bool:
        """Do one random thing; return whether there was anything to do."""
        todo = []
        for node in range(self.nodes):
            if node in self.lost_nodes:
                continue
            if self.pending[node]:
                todo.append(
                    lambda node=node: self.iteration_store.apply(self.pending[node].popleft())
                )
            todo += [
                lambda node=node, n=n: self.read(node, n)
                for n in self.followed[node]
                if self.is_event(node, n)
            ]
        for rank in self.present & self.alive:
            if self.state[rank] == "begun":
                todo.append(lambda rank=rank: self.finish(rank))
            elif self.state[rank] == "interrupted":
                todo.append(lambda rank=rank: self.arrive(rank))
        if self.faults and self.alive and self.draw.random() < 0.15:
            self.faults -= 1
            todo = [self.fault]
        if not todo:
            return False
        self.draw.choice(todo)()
        return True

    def finish(self, rank: int) -> None:
        self.state[rank] = "done"
        if self.draw.random() < 0.05:
            self.say(rank, "reported", self.iteration[rank], K.EXCEPTION)
        else:
            self.say(rank, "completed", self.iteration[rank])

    def arrive(self, rank: int) -> None:
        self.state[rank] = "arrived"
        self.say(rank, "arrived", self.iteration[rank])

    def is_event(self, node: int, n: int) -> bool:
        events = self.memberships[node]._events.get(n)
        if n not in self.iteration_store.outcomes:
            return False
        if events is None:
            return True
        return Completed not in events and (
            Interrupted not in events
            or (Decided not in events and n in self.iteration_store.decisions)
        )

    def read(self, node: int, n: int) -> None:
        membership = self.memberships[node]
        self.take(node, membership.outcome(n, is_completed=self.iteration_store.outcomes[n]))
        if not self.iteration_store.outcomes[n]:
            self.take(
                node, membership.last_call_over(n, tuple(self.iteration_store.records.get(n, [])))
            )
            if n in self.iteration_store.decisions:
                self.take(node, membership.decided(n, self.iteration_store.decisions[n]))

    def fault(self) -> None:
        rank = self.draw.choice(sorted(self.alive))
        node = self.node(rank)
        kind = self.draw.choice(("rank", "monitor", "both", "node", "leave"))
        if kind == "leave" and rank in self.present:
            self.leave(rank)
        if kind in {"rank", "both"}:
            self.alive.discard(rank)
        if kind == "rank":
            self.take(node, self.memberships[node].ended(rank))
        if kind in {"monitor", "both"}:
            self.replace(node)
        if kind == "node" and len(self.lost_nodes) < self.nodes - 1:
            self.lose(node)

    def lose(self, node: int) -> None:
        self.lost_nodes.add(node)
        gone = [rank for rank in range(self.world) if self.node(rank) == node]
        self.alive.difference_update(gone)
        for other in set(range(self.nodes)) - self.lost_nodes:
            self.take(other, self.memberships[other].lost(gone))

    def replace(self, node: int) -> None:
        """Lose a monitor with what it had not written; another receives everything from ranks."""
        ranks = [rank for rank in range(self.world) if self.node(rank) == node]
        back = [rank for rank in ranks if rank in self.alive and rank in self.present]
        if not back:
            # Nobody of this node needs one: the others must find out by themselves.
            self.lose(node)
            return
        self.memberships[node] = membership = Membership(self.world)
        self.pending[node].clear()
        self.followed[node].clear()
        self.draw.shuffle(back)
        for rank in back:
            membership.attach(rank)
            for message in list(self.said[rank]):
                self.notify(rank, message)
        for rank in ranks:
            if rank not in back and rank not in self.completed:
                membership.attach(rank)
                self.take(node, membership.ended(rank))
        for gone in self.lost_nodes:
            lost = [rank for rank in range(self.world) if self.node(rank) == gone]
            self.take(node, membership.lost(lost))


@pytest.mark.parametrize("seed", range(300))
def test_random_walks(seed: int) -> None:
    """Ranks, monitors and nodes die at any moment: survivors agree, finish, and nothing is owed."""
    simulation = Simulation(seed)
    for _ in range(4000):
        if not simulation.step():
            break
    else:
        pytest.fail("the job does not come to an end")
    assert not simulation.present & simulation.alive, "a survivor waits for ever"
    for n, made in simulation.iteration_store.decisions.items():
        assert all(received.get(n, made) == made for received in simulation.received.values()), (
            "two ranks hold different decisions"
        )
    if simulation.completed:
        # Completion and interruption exclude each other, and all survivors saw the same.
        last = max(simulation.iteration_store.outcomes)
        assert simulation.iteration_store.outcomes[last]
    for node, membership in enumerate(simulation.memberships):
        assert node in simulation.lost_nodes or membership.is_settled
