# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of many nodes as a launcher sees it; the test writes what the host decides."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent import store_rendezvous
from nvidia_resiliency_ext.fault_tolerance._agent.store_rendezvous import StoreRendezvous
from nvidia_resiliency_ext.fault_tolerance._core.machine import (
    Cause,
    Event,
    LeaveRendezvous,
    NextRoundOpened,
    OpenNextRound,
    RoundReady,
    StoreLost,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import NodeSettings
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import (
    Arrival,
    Entry,
    Phase,
    RankAssignment,
    encode,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import JobStore, connect, serve
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

NODE = "10.0.0.1_1_1"
SECRET = b"a secret"
LIMIT_S = 60.0


LEASE_S = 60.0


class LeapingClock(SystemClock):
    """A clock that passes over the time in which a launcher was stopped."""

    leapt_s = 0.0

    def monotonic(self) -> float:
        """Return the time, with the leaps."""
        return super().monotonic() + self.leapt_s


@contextlib.contextmanager
def a_job(
    clock: SystemClock | None = None,
) -> Iterator[tuple[StoreRendezvous, JobStore, list[Event]]]:
    """Give the rendezvous of one node of a job that begins, the store of its host, and events."""
    listener = socket.create_server(("127.0.0.1", 0))
    at = listener.getsockname()
    server = serve(listener, at[0], 4)
    store = connect(*at, "job:", SECRET, LIMIT_S)
    decide(store, Entry(0, Phase.OPEN, 0))
    store.put(keys.HEAD, "0")
    clock = clock or SystemClock()
    settings = NodeSettings(
        arrival=Arrival(NODE, "10.0.0.1", "node1"),
        master_port=None,
        lease_s=LEASE_S,
        join_timeout_s=LIMIT_S,
        connect_timeout_s=LIMIT_S,
        domain=lambda: "none",
        must_agree={},
    )
    posted: list[Event] = []
    with contextlib.closing(EventLoop(SystemClock())) as loop:
        rendezvous = StoreRendezvous(
            Mock(loop=loop, clock=clock, post=posted.append),
            settings,
            lambda _: connect(*at, "job:", SECRET, LIMIT_S),
        )
        try:
            yield rendezvous, store, posted
        finally:
            rendezvous.shutdown()
            store.cut()
            del server


def decide(store: JobStore, entry: Entry) -> None:
    """Write a decision as the host would."""
    store.create(keys.log(entry.seq), encode(entry))


def wait_for(rendezvous: StoreRendezvous, posted: list[Event], kind: type) -> Event:
    """Wait for an event of a kind."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        while posted:
            if isinstance(event := posted.pop(0), kind):
                return event
        rendezvous.loop.run_once(until=deadline)
    raise AssertionError(f"no {kind.__name__}")


def wait_until_spare(
    rendezvous: StoreRendezvous, posted: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    """Wait until the rendezvous has read that a round goes on without its node."""
    deadline = time.monotonic() + LIMIT_S
    while "goes on without this node" not in caplog.text:
        assert time.monotonic() < deadline
        rendezvous.loop.run_once(until=deadline)
    assert posted == []


def test_dead_workers_of_a_round_that_is_over_open_no_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A node that was away sees its workers dead when the others are a round further: no fault."""
    caplog.set_level("INFO", "nvrx")
    with a_job() as (rendezvous, store, posted):
        rendezvous.join(0)
        assert store.wait_until_set(keys.NOTIFY, LIMIT_S)
        store.put(keys.assignment(NODE), encode(RankAssignment(0, 0, 0)))
        decide(store, Entry(1, Phase.CLOSED, 0, active=2, world_size=2))
        wait_for(rendezvous, posted, RoundReady)
        decide(store, Entry(2, Phase.OPEN, 1, cause=Cause("node_lost", "node1 is lost")))
        wait_for(rendezvous, posted, NextRoundOpened)
        decide(store, Entry(3, Phase.CLOSED, 1, active=2, world_size=2))
        wait_until_spare(rendezvous, posted, caplog)
        rendezvous.perform(OpenNextRound(Cause("killed", "rank 0 died")))
        rendezvous.shutdown()
        assert not store.has(keys.log(4))


def test_a_launcher_that_was_stopped_too_long_ends_whoever_of_its_threads_comes_first() -> None:
    """A lease that has expired is not renewed: the node was replaced, and stops at once."""
    clock = LeapingClock()
    with a_job(clock) as (rendezvous, store, posted):
        rendezvous.join(0)
        assert store.wait_until_set(keys.NOTIFY, LIMIT_S)
        store.put(keys.assignment(NODE), encode(RankAssignment(0, 0, 0)))
        decide(store, Entry(1, Phase.CLOSED, 0, active=2, world_size=2))
        wait_for(rendezvous, posted, RoundReady)
        renewed = store.count(keys.lease(NODE), 0)
        rendezvous._fence.cancel()  # The loop's own look at the lease does not come first here.
        clock.leapt_s = 3 * LEASE_S
        decide(store, Entry(2, Phase.OPEN, 1, cause=Cause("node_lost", "node1 is lost")))
        lost = wait_for(rendezvous, posted, StoreLost)
        assert isinstance(lost, StoreLost)
        assert "no sign of life" in lost.what
        assert lost.stop_within_s <= LEASE_S
        assert store.count(keys.lease(NODE), 0) == renewed


def test_that_a_node_leaves_is_in_the_queue_before_its_ranks_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks of others fail by the end of this node's: the first word of it is the cause."""
    monkeypatch.setattr(store_rendezvous, "SAID_S", LIMIT_S)  # as long as a busy machine takes
    cause = Cause("drained", "the launcher on host node1 was ended by SIGTERM", host="node1")
    with a_job() as (rendezvous, store, _):
        rendezvous.join(0)
        assert store.wait_until_set(keys.NOTIFY, LIMIT_S)
        for _ in range(20):
            rendezvous.perform(LeaveRendezvous(cause))
            lines, _ = store.lines(keys.messages(0), 0, str)
            assert any(cause.what in line for line in lines)
            store.delete(keys.messages(0))
