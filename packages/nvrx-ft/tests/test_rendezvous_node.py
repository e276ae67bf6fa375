# SPDX-License-Identifier: Apache-2.0
"""A node's threads: whatever happens in them becomes events, and nothing of them is left behind."""

import contextlib
import queue
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from rendezvous_store import CAUSE, PREFIX, Served, arrival, hosted, name, rules

from nvidia_resiliency_ext.fault_tolerance._agent.store_rendezvous import StoreRendezvous
from nvidia_resiliency_ext.fault_tolerance._core.machine import Event, StoreLost
from nvidia_resiliency_ext.fault_tolerance._rendezvous import client, keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import (
    LeaseExpiredError,
    NodeClient,
    NodeSettings,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.log import DecisionLog
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import (
    Arrival,
    Entry,
    ForeignValueError,
    Kind,
    Phase,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.session import (
    Lost,
    NodeSession,
    Opened,
    Over,
    RankAssigned,
    SessionEvent,
    SpareNode,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import JobStore
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
# No node is lost while a test runs, and no renewal tells it what it should hear otherwise.
LEASE_S = 20.0


@pytest.fixture
def served() -> Iterator[Served]:
    """A store."""
    made = Served()
    yield made
    made.close()


class Beside:
    """A node's threads and the events that they reported."""

    def __init__(self, index: int, connect: Callable[[Any], JobStore], **fields: Any) -> None:
        self.event: queue.Queue[SessionEvent] = queue.Queue()
        given: dict[str, Any] = {"lease_s": LEASE_S, "connect_timeout_s": 5.0, **fields}
        settings = NodeSettings(arrival=arrival(index), **given)
        self.threads = NodeClient(settings, connect, self.event.put, SystemClock())

    def next(self) -> SessionEvent:
        """Return the next event."""
        return self.event.get(timeout=DEADLINE_S)

    def join(self, index: int) -> None:
        """Arrive."""
        self.threads.submit(lambda session: self._arrive(session, index))

    def _arrive(self, session: NodeSession, index: int) -> None:
        if not session.arrive(arrival(index)):
            self.event.put(SpareNode(session.entry))  # as a launcher does


@pytest.fixture
def beside(served: Served) -> Iterator[Callable[..., Beside]]:
    """Make nodes with threads; all are closed at the end."""
    made: list[Beside] = []

    def make(index: int = 0, connect: Any = None, **fields: Any) -> Beside:
        made.append(Beside(index, connect or (lambda _: served.connect()), **fields))
        return made[-1]

    yield make
    for one in made:
        one.threads.close(1.0)
    made.clear()


def alive() -> list[str]:
    """Return the names of the rendezvous's threads that live."""
    return [t.name for t in threading.enumerate() if t.name.startswith("nvrx-rendezvous")]


def wait_until_none_lives() -> None:
    """Wait for the ends of the threads; `close` waits a second for them, and goes."""
    deadline = time.monotonic() + DEADLINE_S
    while alive():
        assert time.monotonic() < deadline, alive()
        threading.Event().wait(0.01)


def test_news_of_a_job_come_in_order(served: Served, beside: Callable[..., Beside]) -> None:
    """Two nodes are assigned, one opens a round, the other learns it, and both learn the end."""
    with hosted(served, rules(2)):
        nodes = [beside(0), beside(1)]
        for index, one in enumerate(nodes):
            one.join(index)
        assert [type(one.next()) for one in nodes] == [RankAssigned, RankAssigned]
        nodes[0].threads.submit(lambda session: session.open_next(0, CAUSE))
        opened = nodes[1].next()
        assert isinstance(opened, Opened)
        assert opened.entry.cause == CAUSE
        for index, one in enumerate(nodes):
            one.join(index)
        assert [type(one.next()) for one in nodes] == [RankAssigned, RankAssigned]
        nodes[1].threads.submit(lambda session: session.end("graceful", None))
        assert isinstance(nodes[0].next(), Over)
        for one in nodes:
            one.threads.submit(lambda session: session.send(Kind.GOODBYE))


@pytest.mark.parametrize(
    "error", [ValueError("a defect"), NvrxError("no"), OSError(5, "io")], ids=["any", "own", "os"]
)
def test_whatever_connecting_raises_is_news(
    beside: Callable[..., Beside], error: Exception
) -> None:
    """A thread that cannot begin says so; it does not end in silence."""

    def connect(_: Any) -> JobStore:
        raise error

    notified = beside(connect=connect).next()
    assert isinstance(notified, Lost)
    assert error.args[-1] in notified.what


def test_whatever_a_command_raises_is_news(
    served: Served, beside: Callable[..., Beside], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect in a step of the session ends the node, and says so."""
    # A record of the error would keep the connection.
    monkeypatch.setattr(client.logger, "exception", lambda *_: None)
    with hosted(served, rules(1)):
        one = beside()

        def defect(_: NodeSession) -> None:
            raise KeyError("a defect")

        one.threads.submit(defect)
        notified = one.next()
    assert isinstance(notified, Lost)
    assert "a defect" in notified.what


def test_a_defect_of_the_watch_is_news(
    served: Served, beside: Callable[..., Beside], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that would hear of nothing any more does not go on."""

    monkeypatch.setattr(client.logger, "exception", lambda *_: None)

    def wait_for(*_: object) -> None:
        raise TypeError("a defect")

    monkeypatch.setattr(DecisionLog, "wait_for", wait_for)
    with hosted(served, rules(1)):
        notified = beside().next()
    assert isinstance(notified, Lost)
    assert "a defect" in notified.what


def test_a_lost_store_is_news_at_once(beside: Callable[..., Beside]) -> None:
    """When the store ends its nodes are told at once: long before they renew their leases."""
    other = Served()
    with contextlib.suppress(StoreLostError), hosted(other, rules(2)):
        one = beside(connect=lambda _: other.connect())
        one.join(0)
        deadline = time.monotonic() + DEADLINE_S
        while "nvrx-rendezvous-watch" not in alive():
            assert time.monotonic() < deadline
            other.connect().wait_until_set("never", 0.02)
        other.kill()
        killed = time.monotonic()
        assert isinstance(one.next(), Lost)
        assert time.monotonic() - killed < LEASE_S / 2
    other.close()


def test_closing_ends_the_threads_and_their_connections(
    served: Served, beside: Callable[..., Beside]
) -> None:
    """After `close` no thread of the node lives, though both may have waited in the store."""
    with hosted(served, rules(2)):
        one = beside()
        one.join(0)
        deadline = time.monotonic() + DEADLINE_S
        while "nvrx-rendezvous-watch" not in alive():
            assert time.monotonic() < deadline
            served.connect().wait_until_set("never", 0.02)
        began = time.monotonic()
        one.threads.close(DEADLINE_S)
        assert time.monotonic() - began < DEADLINE_S
        wait_until_none_lives()
        assert one.event.empty()


def test_closing_returns_though_a_call_hangs(served: Served, beside: Callable[..., Beside]) -> None:
    """A session stuck in a call whose answer never comes is cut off."""
    with hosted(served, rules(2)):
        one = beside()
        entered = threading.Event()

        def stuck(session: NodeSession) -> None:
            entered.set()
            session.store.counters(["missing"])

        one.threads.submit(stuck)
        assert entered.wait(DEADLINE_S)
        began = time.monotonic()
        one.threads.close(0.2)
        assert time.monotonic() - began < DEADLINE_S
        wait_until_none_lives()


def test_closing_while_connecting_leaves_nothing(served: Served) -> None:
    """A connection that comes after the end is not kept."""
    may_connect = threading.Event()

    def connect(_: Any) -> JobStore:
        may_connect.wait(DEADLINE_S)
        return served.connect()

    one = Beside(0, connect)
    one.threads.close(0.0)
    may_connect.set()
    one.threads._worker.join(DEADLINE_S)
    assert alive() == []
    assert one.event.empty()


def test_a_lease_is_renewed_beside_commands(served: Served, beside: Callable[..., Beside]) -> None:
    """A node that is asked for one thing after the other does not look dead meanwhile."""
    with hosted(served, rules(2)):
        one = beside(lease_s=0.7)
        one.join(0)
        deadline = time.monotonic() + DEADLINE_S
        while one.threads.confirmed_at is None:
            assert time.monotonic() < deadline
            served.connect().wait_until_set("never", 0.02)
        first = one.threads.confirmed_at
        while one.threads.confirmed_at == first:
            assert time.monotonic() < deadline
            one.threads.submit(NodeSession.notify)


def test_another_start_is_refused_and_does_no_harm(
    served: Served, beside: Callable[..., Beside]
) -> None:
    """A node started otherwise than the others gets no place in a job that has begun."""
    with hosted(served, rules(1, most=2)):
        right = beside(0, must_agree={"--nnodes": "1:2"})
        right.join(0)
        assert isinstance(right.next(), RankAssigned)
        wrong = beside(1, must_agree={"--nnodes": "2:2"})
        notified = wrong.next()
        assert isinstance(notified, Lost)
        assert "--nnodes is 2:2 on node1 and 1:2 on node0" in notified.what
        assert right.event.empty()


def test_a_job_that_is_not_there_is_said_so(beside: Callable[..., Beside]) -> None:
    """A store without the job is not lost: the launcher says what to look at."""
    other = Served()
    notified = beside(connect=lambda _: other.connect(), connect_timeout_s=0.2).next()
    assert isinstance(notified, Lost)
    assert notified.what.startswith(
        f"the store at 127.0.0.1:{other.port} holds no job 'job' after 0 s"
    )
    other.close()


@pytest.mark.parametrize("key", [keys.SETTINGS, keys.HEAD, keys.log(1)])
def test_a_foreign_value_is_named(served: Served, beside: Callable[..., Beside], key: str) -> None:
    """A node that needs a value which is not the job's ends, and says which one it is."""
    with contextlib.suppress(ForeignValueError), hosted(served, rules(2)):
        served.raw().set(PREFIX + key, "garbage")
        notified = beside().next()
    assert isinstance(notified, Lost)
    assert notified.what.startswith(f"{key}: the signature is wrong")


class Session(NodeSession):
    """A session whose steps are noted, and take a second."""

    def __init__(self, clock: "Seconds") -> None:
        self.node, self.entry, self._notified = name(0), Entry(0, Phase.OPEN, 0), None
        self._clock = clock
        self.done: list[tuple[str, float]] = []

    def _step(self, what: str) -> None:
        self.done.append((what, self._clock.now))
        self._clock.now += 1.0

    def resume(self, *_: Any) -> None:
        """Record it."""
        self._step("resume")

    def renew_lease(self) -> None:
        """Record it."""
        self._step("lease")


class Seconds(SystemClock):
    """A clock that a test sets."""

    now = 100.0

    def monotonic(self) -> float:
        """Return what was set."""
        return self.now


@pytest.mark.parametrize("away_s", [29.0, 30.0])
def test_a_lease_that_has_expired_is_not_renewed_over_another_store(
    monkeypatch: pytest.MonkeyPatch, away_s: float
) -> None:
    """A node that comes back too late leaves the new store alone; else its lease is as it says."""
    clock = Seconds()

    def connect(_: Any) -> JobStore:
        raise StoreLostError("no store is needed")

    settings = NodeSettings(arrival=arrival(0), lease_s=10.0, connect_timeout_s=5.0)
    made = NodeClient(settings, connect, lambda _: None, clock)
    made._worker.join(DEADLINE_S)
    session = Session(clock)
    store: Any = types.SimpleNamespace(create=lambda _, text: text)
    monkeypatch.setattr(made, "_start_watch", lambda *_: None)
    made.confirmed_at = clock.now - away_s
    if away_s < 30.0:
        made._resume(session, store)
        assert session.done == [("resume", 100.0), ("lease", 101.0)]
        assert made.confirmed_at == 101.0
    else:
        with pytest.raises(LeaseExpiredError):
            made._resume(session, store)
        assert session.done == []
    made.close(0.0)


# As the launcher's loop sees it ----------------------------------------------------------------


def settings(index: int, **fields: Any) -> NodeSettings:
    """Return what a node is."""
    return NodeSettings(
        **{
            "arrival": Arrival(name(index), f"10.0.0.{index}", f"node{index}"),
            "master_port": None,
            "lease_s": LEASE_S,
            "join_timeout_s": 5.0,
            "connect_timeout_s": 5.0,
            "domain": lambda: "none",
            "must_agree": {},
            **fields,
        }
    )


class Launched:
    """A rendezvous and the loop that it is in."""

    def __init__(self, served: Served, index: int, **fields: Any) -> None:
        self.loop = EventLoop(SystemClock())
        self.posted: list[Event] = []
        self.rendezvous = StoreRendezvous(
            Mock(loop=self.loop, clock=SystemClock(), post=self.posted.append),
            settings(index, **fields),
            lambda _: served.connect(),
        )

    def next(self, within_s: float = DEADLINE_S) -> str:
        """Return the name of the next event's type."""
        return type(self.event(within_s)).__name__

    def event(self, within_s: float = DEADLINE_S) -> Event:
        """Return the next event."""
        deadline = time.monotonic() + within_s
        while not self.posted:
            assert time.monotonic() < deadline
            self.loop.run_once(until=deadline)
        return self.posted.pop(0)

    def close(self) -> None:
        """End."""
        self.rendezvous.shutdown()
        self.loop.close()


def test_a_late_node_waits_without_limit(served: Served, beside: Callable[..., Beside]) -> None:
    """The join timeout is for a round that is open; who comes later is a spare for as long."""
    with hosted(served, rules(1, most=2)):
        first = beside(0)
        first.join(0)
        assert isinstance(first.next(), RankAssigned)
        late = Launched(served, 1, join_timeout_s=3.0)
        late.rendezvous.join(0)
        with pytest.raises(AssertionError):
            late.next(within_s=4.0)
        first.threads.submit(lambda session: session.open_next(0, CAUSE))
        assert late.next() == "NextRoundOpened"
        late.close()


def test_a_round_that_does_not_close_times_out(served: Served) -> None:
    """Who has joined an open round is told when it does not close in time."""
    with hosted(served, rules(2)):
        one = Launched(served, 0, join_timeout_s=0.3)
        one.rendezvous.join(0)
        assert one.next() == "JoinTimedOut"
        one.close()


def test_a_job_that_does_not_appear_is_no_store_that_is_silent(served: Served) -> None:
    """Before a node is in the job its lease means nothing, however long the job is waited for."""
    one = Launched(served, 0, lease_s=0.05, connect_timeout_s=0.5)
    one.rendezvous.join(0)
    event = one.event()
    assert not one.posted
    assert isinstance(event, StoreLost)
    assert "holds no job 'job'" in event.what
    one.close()


def test_a_store_that_ends_with_the_job_is_not_lost(
    served: Served, beside: Callable[..., Beside]
) -> None:
    """After the end of the job nothing that becomes of the store is an event."""
    with hosted(served, rules(1, most=2)):
        one = Launched(served, 0)
        other = beside(1)
        other.join(1)
        assert isinstance(other.next(), RankAssigned)
        one.rendezvous.join(0)
        other.threads.submit(lambda session: session.end("graceful", None))
        assert one.next() == "RoundClosed"
        one.rendezvous._push(Lost("gone"))
        one.loop.run_once()
        assert one.posted == []
        one.close()


def test_shutting_down_leaves_no_thread(served: Served) -> None:
    """After `shutdown`, which may be called twice, late events of a thread go nowhere."""
    with hosted(served, rules(2)):
        served.connect()
        one = Launched(served, 0)
        one.rendezvous.join(0)
        deadline = time.monotonic() + DEADLINE_S
        while "nvrx-rendezvous-watch" not in alive():
            assert time.monotonic() < deadline
            served.connect().wait_until_set("never", 0.02)
        one.close()
        one.rendezvous.shutdown()
        one.rendezvous._push(Lost("late"))
        wait_until_none_lives()
        assert one.posted == []


def test_a_spare_that_comes_first_is_told_of_later_rounds(
    served: Served, beside: Callable[..., Beside]
) -> None:
    """A node that stood by is assigned in the next round when it is needed."""
    with hosted(served, rules(1, most=2)):
        nodes = [beside(0), beside(1)]
        nodes[0].join(0)
        assert isinstance(nodes[0].next(), RankAssigned)
        nodes[1].join(1)
        assert isinstance(nodes[1].next(), SpareNode)
        leaves = Kind.LEFT
        nodes[0].threads.submit(lambda session: session.send(leaves, cause=CAUSE))
        while not isinstance(nodes[1].next(), Opened):
            pass
        nodes[1].join(1)
        assigned = nodes[1].next()
        assert isinstance(assigned, RankAssigned)
        assert assigned.assignment.group_rank == 0
