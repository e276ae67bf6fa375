# SPDX-License-Identifier: Apache-2.0
"""Wall clocks of nodes that are minutes apart: they are named, and nothing else depends on them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import types
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from rendezvous_store import Served, arrival, hosted, rules

from nvidia_resiliency_ext.fault_tolerance._agent.preemption import PreemptionController
from nvidia_resiliency_ext.fault_tolerance._agent.store_rendezvous import StoreRendezvous
from nvidia_resiliency_ext.fault_tolerance._core.machine import Event, Preempted, RoundReady
from nvidia_resiliency_ext.fault_tolerance._rendezvous import agreement
from nvidia_resiliency_ext.fault_tolerance._rendezvous.agreement import Reading, off_by, read
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import NodeSettings
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
from nvidia_resiliency_ext.shared_utils.clock import ManualClock, SystemClock
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

LIMIT_S = 60.0
MINUTES_S = 180.0
LEASE_S = 20.0


class ShiftedClock(SystemClock):
    """The machine's clock, with the wall time of a node that is off."""

    def __init__(self, off_s: float) -> None:
        self._off_s = off_s

    def wall(self) -> float:
        """Return the wrong time."""
        return super().wall() + self._off_s


@pytest.fixture
def served() -> Iterator[Served]:
    """A store."""
    with contextlib.closing(Served()) as made:
        yield made


# What clocks tell --------------------------------------------------------------------------------


def test_a_stamp_is_read_as_exactly_as_it_can_be() -> None:
    """What was written some time between two looks tells the clock within half that time."""
    assert read(100.5, 100.0, 101.0) == Reading(0.0, 0.5)
    assert read(280.0, 100.0, 100.0) == Reading(180.0, 0.0)


@pytest.mark.parametrize(
    ("ahead", "off"),
    [
        ({}, {}),
        ({"a": 0.0}, {}),
        ({"a": 0.0, "b": 4.9}, {}),
        ({"a": 0.0, "b": 180.0}, {"b": 180.0}),
        ({"a": 0.0, "b": -180.0}, {"b": -180.0}),
        ({"a": 0.0, "b": 180.0, "c": 180.5}, {"a": -180.0}),
        ({"a": 0.0, "b": 0.5, "c": -60.0, "d": 60.0}, {"c": -60.0, "d": 60.0}),
    ],
)
def test_the_time_is_what_most_clocks_say(ahead: dict[str, float], off: dict[str, float]) -> None:
    """Who differs from the largest group is off; of two as large the reader's own is right."""
    assert off_by({node: Reading(s) for node, s in ahead.items()}) == pytest.approx(off, abs=0.6)


def test_what_is_not_known_well_enough_is_not_said() -> None:
    """A reading taken after a long pause of the reader proves nothing."""
    assert off_by({"a": Reading(0.0), "b": Reading(-30.0, 30.0)}) == {}
    assert off_by({"a": Reading(0.0), "b": Reading(-90.0, 30.0)}) == {"b": -90.0}


def test_a_line_names_the_worst_and_stays_short() -> None:
    """A thousand wrong clocks are one line of five names and a number."""
    assert agreement.sentence([]) == ""
    line = agreement.sentence([(f"node{i}", float(-i)) for i in range(6, 1006)])
    assert "node1005 is 1005.0 s behind" in line
    assert "and 995 more" in line
    assert len(line) < 300


# The store host and its nodes --------------------------------------------------------------------


def joined(
    served: Served, index: int, clock: SystemClock, loop: EventLoop, posted: list[Event]
) -> StoreRendezvous:
    """Let a node with this clock join."""
    settings = NodeSettings(
        arrival=dataclasses.replace(arrival(index), infra_rank=index),
        master_port=None,
        lease_s=LEASE_S,
        join_timeout_s=LIMIT_S,
        connect_timeout_s=LIMIT_S,
        domain=lambda: "none",
        must_agree={},
    )
    job = Mock(loop=loop, clock=clock, post=posted.append)
    made = StoreRendezvous(job, settings, lambda _: served.connect())
    made.join(0)
    return made


def placed(posted: list[Event], loop: EventLoop) -> RoundReady:
    """Wait until a node has its place; anything else is wrong."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for event in posted:
            assert isinstance(event, RoundReady), event
            return event
        loop.call_at(time.monotonic() + 0.05, lambda: None)
        loop.run_once()
    raise AssertionError("no place")


@pytest.mark.parametrize("host_is_off", [False, True])
def test_a_node_whose_clock_is_off_is_named_on_all_and_works(
    served: Served, caplog: pytest.LogCaptureFixture, host_is_off: bool
) -> None:
    """Three minutes ahead, on a node or on the store host: a place like any other, and a warning.

    A node is lost after a minute: if it went by wall clocks, it would be lost at once.
    """
    caplog.set_level("WARNING", "nvrx")
    off_s = {1: MINUTES_S}
    # With the store host, node 0 is off: its clock is the one that the others are read with.
    if host_is_off:
        off_s = {0: MINUTES_S}
    host_clock = ShiftedClock(off_s.get(0, 0.0))
    with contextlib.ExitStack() as stack:
        stack.enter_context(hosted(served, rules(3, lease_s=LEASE_S), clock=host_clock))
        loop = stack.enter_context(contextlib.closing(EventLoop(SystemClock())))
        posted: list[list[Event]] = [[], [], []]
        for index in range(3):
            clock = ShiftedClock(off_s.get(index, 0.0))
            stack.callback(joined(served, index, clock, loop, posted[index]).shutdown)
        found = [placed(events, loop).assignment.clock_off_s for events in posted]
    (wrong,) = off_s
    assert found[wrong] == pytest.approx(MINUTES_S, abs=2.0)
    assert [off for index, off in enumerate(found) if index != wrong] == [0.0, 0.0]
    said = [line for line in caplog.messages if "clocks are off" in line]
    assert len(said) == 3
    assert all(f"node{wrong} is" in line and "s ahead" in line for line in said)
    assert all(line.count("node") == 1 for line in said)


# The end of the job's time -----------------------------------------------------------------------


def test_a_deadline_is_announced_the_grace_time_before() -> None:
    """Ranks get the whole grace time: 820 s are left, of which 120 s are theirs."""
    clock = ManualClock(wall_s=10_000.0)
    announced: list[float] = []

    def post(event: object) -> None:
        assert isinstance(event, Preempted)
        announced.append(clock.monotonic())

    with contextlib.closing(EventLoop(clock)) as loop:
        config = FaultToleranceConfig(preempt_deadline="+820", preempt_grace=120.0)
        PreemptionController(
            types.SimpleNamespace(  # type: ignore[arg-type]
                plan=types.SimpleNamespace(fault_tol_cfg=config),
                environ={},
                loop=loop,
                clock=clock,
                post=post,
                paths=types.SimpleNamespace(host="a"),
            )
        )
        began = clock.monotonic()
        while not announced and clock.monotonic() < began + 3600.0:
            # Something is always due, so the loop never waits for the machine's time.
            loop.call_at(clock.monotonic(), lambda: None)
            loop.run_once()
            clock.advance(1.0)
    assert announced == [pytest.approx(began + 700.0, abs=2.0)]
