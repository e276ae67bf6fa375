# SPDX-License-Identifier: Apache-2.0
"""A control plane that is started anew takes up what launchers tell it, and what they said."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from rendezvous_store import Served, arrival, name, rules

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._rendezvous import coordinator, keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import NodeClient, NodeSettings
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator_loop import Coordinator
from nvidia_resiliency_ext.fault_tolerance._rendezvous.log import DecisionLog, resume_state_from
from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import PlacementRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import (
    Arrival,
    Entry,
    Kind,
    NodeMessage,
    Phase,
    RankAssignment,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import Budget
from nvidia_resiliency_ext.fault_tolerance._rendezvous.session import (
    Leaves,
    NodeSession,
    Opened,
    Over,
    RankAssigned,
    SessionEvent,
    SpareNode,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import JobStore
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError

DEADLINE_S = 60.0
GOES = Cause("preempted", "host node0 must go", host="node0")


# What launchers know --------------------------------------------------------------------------


def notified(index: int, entry: Entry, rank: int | None) -> NodeMessage:
    """Return what a launcher tells a new host."""
    place = None if rank is None else RankAssignment(entry.round, rank)
    return NodeMessage(
        Kind.RESUMED, name(index), arrival=arrival(index), entry=entry, assignment=place
    )


def test_who_heard_most_is_believed() -> None:
    """Where ranks are to save may have reached one launcher only: the job stands there."""
    closed = Entry(5, Phase.CLOSED, 2, active=2)
    asked = dataclasses.replace(closed, seq=6, is_leaving=True)
    agreed = dataclasses.replace(asked, seq=7, save_at=9)
    known = resume_state_from(
        (notified(0, asked, 0), notified(1, agreed, 1), notified(2, closed, None))
    )
    assert known is not None
    assert known.entry == agreed
    assert [message.node for message in known.members] == [name(0), name(1)]
    assert [message.node for message in known.spares] == [name(2)]


@pytest.fixture(scope="module", autouse=True)
def libuv() -> None:
    """Make a store once: the first one of a process opens a pipe that stays."""
    Served().close()


# With real stores -----------------------------------------------------------------------------


class Followed:
    """What a host told of rounds."""

    def __init__(self) -> None:
        self.notified: list[Any] = []

    def begins(
        self,
        cycle: int,
        active: Sequence[Arrival],
        waiting: Sequence[Arrival] = (),
        *,
        goes_on: bool = False,
    ) -> None:
        """Record it."""
        if goes_on:
            self.notified.append(("goes on", cycle, [node.host for node in active]))
        else:
            nodes = sorted(node.host for node in (*active, *waiting))
            self.notified.append(("closed", cycle, nodes))

    def ended(self, cycle: int, cause: Cause | None = None) -> None:  # noqa: ARG002
        """Record it."""
        self.notified.append(("ended", cycle))


class Plane:
    """A store and its host, as a control plane has them; `kill` ends both at once."""

    def __init__(self, by: CoordinatorRules) -> None:
        self.served = Served()
        self.followed = Followed()
        self.is_dying = False
        self._stop = threading.Event()
        self.ended = threading.Event()
        store = self.served.connect()
        self.host = Coordinator(
            store,
            by,
            me="control",
            epoch=os.urandom(8).hex(),
            clock=SystemClock(),
            is_controlled=True,
            begins=self.followed.begins,
            ended=self.followed.ended,
            stop=self._stop,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._store = store
        self._looking = self.served.connect()

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self.host.run()
        self.ended.set()

    def wait_for(self, reached: Callable[[Entry], bool]) -> Entry:
        """Wait until the last decision is such, and return it; who comes then finds it."""
        deadline = time.monotonic() + DEADLINE_S
        while not reached(entry := self.host.entry):
            assert time.monotonic() < deadline, entry
            threading.Event().wait(0.01)
        # The host has it a moment before it is announced.
        while int(self._looking.peek(keys.HEAD) or 0) < entry.seq:
            assert time.monotonic() < deadline, entry
            threading.Event().wait(0.01)
        return entry

    def wait_until_reported(self, *notified: Any) -> None:
        """Wait until exactly this was told of rounds; that follows when a decision is seen."""
        self.wait_until(lambda: self.followed.notified == [*notified])

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for what follows from a decision that is seen already."""
        deadline = time.monotonic() + DEADLINE_S
        while not reached():
            assert time.monotonic() < deadline, (self.followed.notified, self.host._memory)
            threading.Event().wait(0.01)

    def die(self) -> None:
        """End the host and the store."""
        self._stop.set()
        self._store.cut()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self.served.kill()

    def kill(self) -> None:
        """End all of it."""
        self.die()
        self.served.close()


class Planes:
    """One after the other."""

    def __init__(self, by: CoordinatorRules) -> None:
        self._rules = by
        self.present = Plane(by)

    def restart(self) -> Plane:
        """Kill the present one and start another."""
        self.present.kill()
        self.present = Plane(self._rules)
        return self.present


@contextlib.contextmanager
def planes(by: CoordinatorRules) -> Iterator[Planes]:
    """Give a control plane that may be started anew."""
    made = Planes(by)
    try:
        yield made
    finally:
        made.present.kill()


class Node:
    """A launcher's session, driven by the test; each one has a lease that stays young."""

    def __init__(self, index: int, plane: Plane) -> None:
        self._store = plane.served.connect()
        self._session = NodeSession(self._store, name(index), f"node{index}", DEADLINE_S)
        self._session.arrive(arrival(index))

    def next(self) -> SessionEvent | None:
        """Return what the next decision means for this node."""
        self._session.renew_lease()
        entry = DecisionLog(self._store).wait_for(self._session.notified_seq + 1, DEADLINE_S)
        assert entry is not None
        return self._session.take(entry)

    def catch_up(self, entry: Entry) -> list[SessionEvent]:
        """Take all decisions up to this one, and return what is new."""
        event = []
        while self._session.notified_seq < entry.seq:
            event.append(self.next())
        return [one for one in event if one is not None]

    def resume(
        self, plane: Plane, before_it_tells: Callable[[], None] | None = None
    ) -> SessionEvent | None:
        """Go on with another control plane; what happens between asking it and telling it."""
        store = self._store = plane.served.connect()
        if plane.is_dying:
            plane.die()
        if before_it_tells is None:
            return self._session.resume(store, DEADLINE_S)
        send = store.append_line

        def send_late(key: str, text: str) -> None:
            before_it_tells()
            send(key, text)

        with mock.patch.object(store, "append_line", send_late):
            return self._session.resume(store, DEADLINE_S)

    def send(self, kind: Kind, **fields: Any) -> None:
        """Leave a message."""
        self._session.send(kind, **fields)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def of(**fields: Any) -> CoordinatorRules:
    """Return the rules of two nodes and a spare; nobody is lost while a test runs."""
    return dataclasses.replace(rules(2, most=3, lease_s=20.0), **fields)


def placed(plane: Plane, count: int = 2) -> list[Node]:
    """Return nodes that work."""
    nodes = [Node(index, plane) for index in range(count)]
    assert all(isinstance(node.next(), RankAssigned) for node in nodes)
    return nodes


def spare_of(plane: Plane) -> Node:
    """Return a node that came when the round was closed, and knows that."""
    spare = Node(2, plane)
    spare.catch_up(plane.wait_for(lambda entry: entry.phase is Phase.CLOSED))
    return spare


def open_next(plane: Plane, nodes: list[Node], spare: Node) -> None:
    """Let a round begin in which the same nodes work."""
    nodes[0].open_next(plane.host.entry.round, GOES)
    opened = plane.wait_for(lambda entry: entry.phase is Phase.OPEN)
    for index, node in enumerate(nodes):
        node.catch_up(opened)
        node.arrive(arrival(index))
    closed = plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
    spare.catch_up(closed)
    assert not spare.arrive(arrival(len(nodes)))
    assert all(isinstance(node.next(), RankAssigned) for node in nodes)


def test_a_round_goes_on_and_was_no_restart() -> None:
    """All nodes come back: nobody restarts, a budget with a window is as full as before."""
    by = of(budget=Budget(3, window_s=1000.0))
    with planes(by) as control:
        first, second = placed(control.present)
        first.open_next(0, GOES)
        assert isinstance(second.next(), Opened)
        first.take(control.present.wait_for(lambda entry: entry.round == 1))
        for index, node in enumerate((first, second)):
            node.arrive(arrival(index))
        assert all(isinstance(node.next(), RankAssigned) for node in (first, second))
        for _ in range(2):
            plane = control.restart()
            assert first.resume(plane) is None
            assert second.resume(plane) is None
            entry = plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
            assert (entry.round, len(entry.restart_ages_s)) == (1, 1)
            assert first.next() is None
            assert second.next() is None
            plane.wait_until_reported(("goes on", 1, ["node0", "node1"]))
        second.open_next(1, GOES)
        entry = plane.wait_for(lambda entry: entry.round == 2)
        assert by.budget.left(entry) == 2, "the entry counts those before it"
        for index, node in enumerate((first, second)):
            node.take(entry)
            node.arrive(arrival(index))
        entry = plane.wait_for(lambda entry: entry.phase is Phase.CLOSED and entry.round == 2)
        assert by.budget.left(entry) == 1
        nodes = ["node0", "node1"]
        plane.wait_until_reported(("goes on", 1, nodes), ("ended", 1), ("closed", 2, nodes))


@pytest.mark.parametrize("received", ["nothing", "one", "all"])
def test_a_drain_goes_on_where_it_was(received: str) -> None:
    """That a node must go, and how far ranks are that wait, survive: a call is agreed."""
    with planes(of()) as control:
        plane = control.present
        first, second = placed(plane)
        spare = spare_of(plane)
        if received == "nothing":
            # Said to a host that dies before it decides anything.
            plane._stop.set()
            plane._thread.join(DEADLINE_S)
        first.send(Kind.PREEMPTED, cause=GOES)
        if received != "nothing":
            assert isinstance(first.next(), Leaves)
            first.send(Kind.HELD, calls=7)
        if received == "all":
            assert isinstance(second.next(), Leaves)
        plane = control.restart()
        # The spare tells the host itself, or is known from what it said of the round before.
        for node in (spare, first, second) if received == "all" else (first, second, spare):
            node.resume(plane)
        entry = plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
        first_event, second_event = first.catch_up(entry), second.catch_up(entry)
        if received == "nothing":
            entry = plane.wait_for(lambda entry: entry.is_leaving)
            first_event, second_event = first.catch_up(entry), second.catch_up(entry)
            first.send(Kind.HELD, calls=7)
        assert [isinstance(one, Leaves) for one in first_event] == [True] * (received == "nothing")
        assert [isinstance(one, Leaves) for one in second_event] == [True] * (received != "all")
        # A spare whose word came too late learns here that the host went on without it.
        spare.catch_up(entry)
        second.send(Kind.HELD, calls=4)
        entry = plane.wait_for(lambda entry: entry.save_at > 0)
        assert entry.save_at == 8
        for node in (first, second):
            node.catch_up(entry)
            node.succeeded(0)
        # The spare is known: the job goes on with it.
        entry = plane.wait_for(lambda entry: entry.phase is not Phase.CLOSED)
        assert (entry.phase, entry.round, entry.cause) == (Phase.OPEN, 1, GOES)


@pytest.mark.parametrize("round_", [0, 1])
def test_a_spare_whose_word_comes_too_late_says_it_again(round_: int) -> None:
    """It found a host that knew nothing, which went on before it heard: a drain goes on with it."""
    with planes(of()) as control:
        plane = control.present
        first, second = nodes = placed(plane)
        spare = spare_of(plane)
        if round_ == 1:
            open_next(plane, nodes, spare)
        plane = control.restart()

        def go_on() -> None:
            for node in nodes:
                node.resume(plane)
            plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)

        assert spare.resume(plane, before_it_tells=go_on) is None
        for node in (first, second, spare):
            assert node.catch_up(plane.host.entry) == []
        first.send(Kind.PREEMPTED, cause=GOES)
        for node in nodes:
            assert isinstance(node.next(), Leaves)
            node.send(Kind.HELD, calls=7)
        entry = plane.wait_for(lambda entry: entry.save_at > 0)
        for node in nodes:
            node.catch_up(entry)
            node.succeeded(round_)
        entry = plane.wait_for(lambda entry: entry.phase is not Phase.CLOSED)
        assert (entry.phase, entry.round) == (Phase.OPEN, round_ + 1)


def test_a_node_that_came_before_the_round_went_on_is_known() -> None:
    """It joined a host that knew nothing, in a round that is not the job's: it says it again."""
    with planes(of()) as control:
        nodes = placed(control.present)
        open_next(control.present, nodes, spare_of(control.present))
        plane = control.restart()
        new = Node(3, plane)
        for node in nodes:
            node.resume(plane)
        entry = plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
        assert entry.round == 1
        assert [type(one) for one in new.catch_up(entry)] == [SpareNode]
        lines, _ = plane.served.connect().lines(keys.messages(1), 0, str)
        assert any(name(3) in line and '"ARRIVED"' in line for line in lines)


def test_a_round_after_a_restart_waits_for_the_spare_that_is_known() -> None:
    """A job that may grow does not begin its next round without the spare that came back."""
    by = rules(2, lease_s=20.0, last_call_s=10.0)
    by = dataclasses.replace(by, placement=PlacementRules(2, 3, elastic=True))
    with planes(dataclasses.replace(by, last_call_s=0.0)) as control:
        nodes = placed(control.present)
        spare = spare_of(control.present)
        control._rules = by
        plane = control.restart()
        for node in (spare, *nodes):
            node.resume(plane)
        entry = plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
        for node in nodes:
            node.catch_up(entry)
        # Before the spare has heard anything of the host that it told.
        nodes[0].open_next(0, GOES)
        entry = plane.wait_for(lambda entry: entry.phase is Phase.OPEN)
        for index, node in enumerate(nodes):
            node.catch_up(entry)
            node.arrive(arrival(index))
        entry = plane.wait_for(
            lambda entry: (
                entry.phase is Phase.CLOSED or plane.host._waits_for == "more nodes may come"
            )
        )
        assert entry.phase is Phase.OPEN
        spare.catch_up(entry)
        spare.arrive(arrival(2))
        entry = plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
        assert entry.active == 3


def test_a_drain_waits_for_spares_that_may_come_back() -> None:
    """All have saved and left at once after the restart: the spare is late, and still taken."""
    with planes(of()) as control:
        first, second = placed(control.present)
        spare = spare_of(control.present)
        first.send(Kind.PREEMPTED, cause=GOES)
        for node in (first, second):
            assert isinstance(node.next(), Leaves)
            node.send(Kind.HELD, calls=7)
        entry = control.present.wait_for(lambda entry: entry.save_at > 0)
        for node in (first, second):
            node.catch_up(entry)
        plane = control.restart()
        for node in (first, second):
            node.resume(plane)
        entry = plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
        for node in (first, second):
            node.catch_up(entry)
            node.succeeded(0)
        assert spare.resume(plane) is None, "a round that is left is nothing to a spare"
        entry = plane.wait_for(lambda entry: entry.seq > 1)
        assert (entry.phase, entry.round) == (Phase.OPEN, 1)


def test_a_job_that_ends_soon_after_a_restart_is_told_to_late_nodes() -> None:
    """A spare that was not back yet when the job ended finds the store, and the end."""
    with planes(of()) as control:
        first, second = placed(control.present)
        spare = spare_of(control.present)
        plane = control.restart()
        for node in (first, second):
            node.resume(plane)
            node.catch_up(plane.host.entry)
        entry = plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
        for node in (first, second):
            node.catch_up(entry)
            node.succeeded(0)
        entry = plane.wait_for(lambda entry: entry.phase is Phase.OVER)
        for node in (first, second):
            node.catch_up(entry)
            node.send(Kind.GOODBYE)
        assert not plane.ended.wait(0.5)
        assert isinstance(spare.resume(plane), Over)


def test_a_store_that_goes_again_at_once_costs_nothing() -> None:
    """Launchers have told one host only in part when it dies: they tell the next one the same."""
    with planes(of()) as control:
        first, second = placed(control.present)
        plane = control.restart()
        assert first.resume(plane) is None
        plane.is_dying = True
        with pytest.raises(StoreLostError):
            second.resume(plane)
        plane = control.restart()
        for node in (first, second):
            assert node.resume(plane) is None
        entry = plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
        assert (entry.round, entry.active) == (0, 2)
        for node in (first, second):
            assert node.catch_up(entry) == []
            node.succeeded(0)
        plane.wait_for(lambda entry: entry.phase is Phase.OVER)


def test_a_spare_that_comes_back_late_is_known() -> None:
    """When the round already goes on, a spare says that it is there."""
    with planes(of()) as control:
        first, second = placed(control.present)
        spare = spare_of(control.present)
        plane = control.restart()
        for node in (first, second):
            node.resume(plane)
        plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
        assert spare.resume(plane) is None, "it was one before"
        lines, _ = plane.served.connect().lines(keys.messages(0), 0, str)
        assert any(name(2) in line and '"ARRIVED"' in line for line in lines)


def test_a_round_that_ended_while_nobody_served_is_said_to_have_ended() -> None:
    """A fault opened a round, and its host died: the follower of the next host hears of it."""
    with planes(of()) as control:
        first, second = placed(control.present)
        first.open_next(0, GOES)
        assert isinstance(second.next(), Opened)
        plane = control.restart()
        for node in (first, second):
            node.resume(plane)
        entry = plane.wait_for(lambda entry: entry.round == 1)
        assert (entry.phase, entry.cause) == (Phase.OPEN, GOES)
        assert plane.followed.notified == [("ended", 0)]


def test_the_end_of_a_job_may_be_asked_for() -> None:
    """A host that is told to end the job ends it for all, with the first reason."""
    with planes(of()) as control:
        first, _ = placed(control.present)
        control.present.host.end_job("attribution_stop", GOES)
        control.present.host.end_job("failure", GOES)
        event = first.next()
        assert isinstance(event, Over)
        assert (event.entry.reason, event.no_restart) == ("attribution_stop", True)


# A connection that breaks between two words ----------------------------------------------------


def test_a_member_that_was_counted_and_did_not_hear_it_is_a_member() -> None:
    """The round goes on with its word; it comes back once more, and what it said is said again."""
    with planes(of()) as control:
        first, second = placed(control.present)
        first.succeeded(0)
        plane = control.restart()
        for node in (first, second):
            assert node.resume(plane) is None
        entry = plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
        assert first.resume(plane) is None, "it trains on, and is no spare"
        assert not first.is_resuming
        assert second.catch_up(entry) == []
        second.succeeded(0)
        entry = plane.wait_for(lambda entry: entry.phase is Phase.OVER)
        assert [type(one) for one in first.catch_up(entry)] == [Over]


def test_a_member_hears_what_was_decided_while_it_came_back_twice() -> None:
    """That ranks are to save reaches a member that did not hear that the round goes on."""
    with planes(of()) as control:
        first, second = placed(control.present)
        plane = control.restart()
        for node in (first, second):
            node.resume(plane)
        second.catch_up(plane.wait_for(lambda entry: entry.phase is Phase.CLOSED))
        second.send(Kind.PREEMPTED, cause=GOES)
        plane.wait_for(lambda entry: entry.is_leaving)
        assert isinstance(first.resume(plane), Leaves)


def test_a_member_whose_round_was_closed_anew_without_it_stops() -> None:
    """Others opened its round again and closed it without this node: it must not train on."""
    with planes(of()) as control:
        plane = control.present
        nodes = placed(plane)
        spare = spare_of(plane)
        nodes[0].open_next(0, GOES)
        opened = plane.wait_for(lambda entry: entry.phase is Phase.OPEN)
        for index, node in enumerate(nodes):
            node.catch_up(opened)
            node.arrive(arrival(index))
        first, second = nodes
        first.catch_up(plane.wait_for(lambda entry: entry.phase is Phase.CLOSED))
        plane = control.restart()
        # The others had not heard that it was closed.
        for index, node in ((1, second), (2, spare)):
            node.resume(plane)
            node.catch_up(plane.wait_for(lambda entry: entry.round == 1))
            node.arrive(arrival(index))
        plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
        assert isinstance(first.resume(plane), Opened), "its workers have to stop"
        assert first.arrive(arrival(0)) is False


# Nodes that have left ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.LEFT, Kind.UNHEALTHY])
@pytest.mark.parametrize("is_early", [True, False], ids=["early", "late"])
def test_a_spare_that_left_is_none_for_the_next_host(kind: Kind, is_early: bool) -> None:
    """It comes back before or after the round goes on: a drain ends the job, for nobody is left."""
    with planes(of()) as control:
        first, second = nodes = placed(control.present)
        spare = spare_of(control.present)
        spare.send(kind, cause=GOES)
        plane = control.restart()
        for node in (spare, *nodes) if is_early else (*nodes, spare):
            if node is spare and not is_early:
                plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
            node.resume(plane)
        for node in (first, second):
            node.catch_up(plane.wait_for(lambda entry: entry.phase is Phase.CLOSED))
        spare.catch_up(plane.host.entry)
        first.open_next(0, GOES)
        plane.wait_for(lambda entry: entry.round == 1)
        plane.wait_until(lambda: plane.host._memory.gone == {name(2)})
        assert plane.host._memory.spares == frozenset()


@pytest.mark.parametrize("round_", [0, 1])
def test_a_member_that_left_makes_the_round_end(round_: int) -> None:
    """Its host died with its word: the next one opens a round for that cause, and at once."""
    with planes(of()) as control:
        plane = control.present
        first, second = nodes = placed(plane)
        spare = spare_of(plane)
        if round_ == 1:
            open_next(plane, nodes, spare)
        plane._stop.set()
        plane._thread.join(DEADLINE_S)
        first.send(Kind.LEFT, cause=GOES)
        plane = control.restart()
        for node in (first, second, spare):
            node.resume(plane)
        entry = plane.wait_for(lambda entry: entry.round == round_ + 1)
        assert (entry.phase, entry.cause) == (Phase.OPEN, GOES)
        plane.wait_until(lambda: name(0) in plane.host._memory.gone)


def test_a_node_that_left_and_comes_again_is_there() -> None:
    """Who arrives after it has left counts, for this host and for the next."""
    with planes(of()) as control:
        nodes = placed(control.present)
        spare = spare_of(control.present)
        spare.send(Kind.LEFT, cause=GOES)
        spare.arrive(arrival(2))
        plane = control.restart()
        for node in (spare, *nodes):
            node.resume(plane)
        plane.wait_for(lambda entry: entry.phase is Phase.CLOSED)
        there = {name(2)}
        plane.wait_until(lambda: coordinator.arrived(tuple(plane.host._messages)).keys() == there)


def test_who_left_after_it_told_the_host_is_no_spare() -> None:
    """Its departure notice reaches a host that does not know yet where the job stands."""
    closed = Entry(5, Phase.CLOSED, 2, active=1)
    left = NodeMessage(Kind.LEFT, name(2), arrival=arrival(2))
    known = resume_state_from((notified(2, closed, None), notified(0, closed, 0), left))
    assert known is not None
    assert (known.spares, known.gone) == ((), (left,))
    known = resume_state_from((notified(0, closed, 0), left, notified(2, closed, None)))
    assert known is not None
    assert (len(known.spares), known.gone) == (0, (left,)), "only an arrival takes it back"
    known = resume_state_from(
        (left, NodeMessage(Kind.ARRIVED, name(2), arrival=arrival(2)), notified(0, closed, 0))
    )
    assert known is not None
    assert known.gone == ()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Let nothing but the last reference free an object."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_departure_notices_do_not_wait_for_the_host_to_find_out() -> None:
    """A launcher that leaves while members have still to come back says so, and is no spare.

    Nothing of the stores that it lost is left for the garbage collector.
    """
    with planes(of()) as control:
        first, second = placed(control.present)
        may_connect, event = threading.Event(), queue.Queue[SessionEvent]()
        may_connect.set()
        made: list[weakref.ref[JobStore]] = []

        def connect(_: Callable[[], None]) -> JobStore:
            assert may_connect.wait(DEADLINE_S)
            store = control.present.served.connect()
            made.append(weakref.ref(store))
            return store

        settings = NodeSettings(arrival=arrival(2), lease_s=20.0, connect_timeout_s=5.0)
        threads = NodeClient(settings, connect, event.put, SystemClock())
        arrived = threading.Event()

        def arrive(session: NodeSession) -> None:
            session.arrive(arrival(2))
            arrived.set()

        threads.submit(arrive)
        assert arrived.wait(DEADLINE_S)
        may_connect.clear()
        plane = control.restart()
        may_connect.set()
        plane.wait_until(lambda: resume_state_from(tuple(plane.host._messages)) is not None)
        threads.submit(lambda session: session.send(Kind.LEFT, cause=GOES), is_urgent=True)
        threads.close(DEADLINE_S)
        for node in (first, second):
            node.resume(plane)
        plane.wait_until(lambda: bool(plane.host._memory.active))
        known = tuple(plane.host._messages)
        assert coordinator.nodes_gone(known) == {name(2)}
        assert coordinator.arrived(known) == {}
    del threads
    assert [store() for store in made] == [None] * 2
