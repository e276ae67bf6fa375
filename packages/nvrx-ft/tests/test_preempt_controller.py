# SPDX-License-Identifier: Apache-2.0
"""Announced preemption on one node: what a signal means that comes once, twice, or too often."""

import contextlib
import signal
from types import SimpleNamespace

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent.preemption import PreemptionController
from nvidia_resiliency_ext.fault_tolerance._core.machine import (
    Cause,
    GraceOver,
    Preempted,
    RanksHeld,
)
from nvidia_resiliency_ext.shared_utils.clock import ManualClock
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

USR1 = signal.SIGUSR1


class Controller:
    """A controller with a clock that the test moves, and what it has posted."""

    def __init__(self, loop, clock, *, link=None, pids=(), end=None):
        self.clock, self.loop = clock, loop
        self.posted = []
        deadline = None if end is None else str(end)
        config = {"preempt_signal": USR1, "preempt_grace": 60.0, "preempt_deadline": deadline}
        self._controller = PreemptionController(
            SimpleNamespace(
                plan=SimpleNamespace(fault_tol_cfg=SimpleNamespace(**config)),
                environ={},
                loop=loop,
                clock=clock,
                post=self.posted.append,
                monitor=link,
                running_pids=lambda: pids,
                paths=SimpleNamespace(host="a"),
            )
        )
        self.ask, self.acknowledged = self._controller.ask, self._controller.acknowledged

    def signal(self):
        """Deliver the signal; return whether it counts as an announcement."""
        return self._controller.announced(USR1)

    def pass_time(self, seconds):
        """Let time pass, and what is due happen."""
        self.clock.advance(seconds)
        self.loop.call_at(self.clock.monotonic(), lambda: None)
        self.loop.run_once()


class Slots:
    """What the slots of a node's ranks show, and whether the word stands in them."""

    def __init__(self, calls):
        self.calls, self.is_save_acknowledged = calls, True

    def save(self, word):
        """Take the word."""

    def save_calls(self):
        """Return how often each rank has asked."""
        return self.calls


@pytest.fixture
def made():
    """Make controllers."""
    with contextlib.ExitStack() as stack:

        def make(**more):
            clock = ManualClock()
            loop = stack.enter_context(contextlib.closing(EventLoop(clock)))
            return Controller(loop, clock, **more)

        yield make


def test_a_signal_that_comes_twice_at_once_is_one(made):
    """A scheduler may reach a launcher on two ways: ranks keep their time."""
    controller = made()
    assert controller.signal()
    controller.pass_time(0.5)
    assert controller.signal()
    assert [type(event) for event in controller.posted] == [Preempted]


def test_the_time_to_save_begins_with_the_announcement(made):
    """Ranks have the grace time from the signal on, and no longer."""
    controller = made()
    controller.signal()
    controller.pass_time(59.0)
    assert [type(event) for event in controller.posted] == [Preempted]
    controller.pass_time(2.0)
    assert [type(event) for event in controller.posted] == [Preempted, GraceOver]


def test_a_second_signal_ends_the_time_and_a_third_is_a_signal_like_any(made):
    """The first asks to save and leave, the second to leave now."""
    controller = made()
    controller.signal()
    controller.pass_time(2.0)
    assert controller.signal()
    assert [type(event) for event in controller.posted] == [Preempted, GraceOver]
    assert not controller.signal()


def test_a_signal_after_the_deadline_was_announced_is_the_same_announcement(made):
    """Who gives both gets both, in either order; neither is a second announcement."""
    controller = made(end=ManualClock().wall() + 61.0)
    controller.pass_time(2.0)
    assert [event.cause.kind for event in controller.posted] == ["time_limit"]
    assert controller.signal()
    assert len(controller.posted) == 1
    controller.pass_time(2.0)
    controller.signal()
    assert isinstance(controller.posted[1], GraceOver)


def test_ranks_whose_monitor_died_are_waited_for_before_a_call_is_agreed(made):
    """What a new monitor shows counts when it knows the word and has all ranks."""
    slots = Slots({0: 5, 1: 6})
    controller = made(link=slots, pids=(1, 2))
    controller.ask(Cause("preempted", "host a must go"))
    slots.calls, slots.is_save_acknowledged = {}, False  # the monitor dies
    controller.pass_time(1.0)
    slots.is_save_acknowledged = True  # the next one is there, and one rank
    slots.calls = {0: 5}
    controller.acknowledged()
    controller.pass_time(1.0)
    assert not controller.posted
    slots.calls = {0: 5, 1: 7}
    controller.pass_time(1.0)
    assert controller.posted == [RanksHeld(7)]
