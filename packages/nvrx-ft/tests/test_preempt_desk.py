# SPDX-License-Identifier: Apache-2.0
"""Announced preemption on one node: what a signal means that comes once, twice, or too often."""

import contextlib
import signal

import pytest

from nvidia_resiliency_ext.fault_tolerance._launch.leaving import GraceOver, Preempted
from nvidia_resiliency_ext.fault_tolerance._launch.loop import EventLoop
from nvidia_resiliency_ext.fault_tolerance._preempt.desk import PreemptionDesk
from nvidia_resiliency_ext.shared_utils.clock import ManualClock

USR1 = signal.SIGUSR1


class Desk:
    """A desk with a clock that the test moves, and what it has posted."""

    def __init__(self, loop, clock, **more):
        self.clock, self.loop = clock, loop
        self.posted = []
        self._desk = PreemptionDesk(
            loop, clock, host="a", signum=USR1, grace_s=60.0, **{"end": None, **more}
        )
        self._desk.open(self.posted.append, None, list)

    def signal(self):
        """Deliver the signal; return whether it counts as an announcement."""
        if not self._desk.is_announcement(USR1):
            return False
        self._desk.announced(USR1)
        return True

    def pass_time(self, seconds):
        """Let time pass, and what is due happen."""
        self.clock.advance(seconds)
        self.loop.call_at(self.clock.monotonic(), lambda: None)
        self.loop.run_once()


@pytest.fixture
def made():
    """Make desks."""
    with contextlib.ExitStack() as stack:

        def make(**more):
            clock = ManualClock()
            loop = stack.enter_context(contextlib.closing(EventLoop(clock)))
            return Desk(loop, clock, **more)

        yield make


def test_a_signal_that_comes_twice_at_once_is_one(made):
    """A scheduler may reach a launcher on two ways: ranks keep their time."""
    desk = made()
    assert desk.signal()
    desk.pass_time(0.5)
    assert desk.signal()
    assert [type(event) for event in desk.posted] == [Preempted]


def test_a_second_signal_ends_the_time_and_a_third_is_a_signal_like_any(made):
    """The first asks to save and leave, the second to leave now."""
    desk = made()
    desk.signal()
    desk.pass_time(2.0)
    assert desk.signal()
    assert [type(event) for event in desk.posted] == [Preempted, GraceOver]
    assert not desk.signal()


def test_a_signal_after_the_deadline_was_announced_is_the_same_announcement(made):
    """Who gives both gets both, in either order; neither is a second announcement."""
    desk = made(end=ManualClock().wall() + 61.0)
    desk.pass_time(2.0)
    assert [event.cause.kind for event in desk.posted] == ["time_limit"]
    assert desk.signal()
    assert len(desk.posted) == 1
    desk.pass_time(2.0)
    desk.signal()
    assert isinstance(desk.posted[1], GraceOver)
