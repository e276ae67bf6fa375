# SPDX-License-Identifier: Apache-2.0
"""Stopping workers: who gets which signal when."""

import signal

import pytest

from nvidia_resiliency_ext.fault_tolerance._workers import workers
from nvidia_resiliency_ext.fault_tolerance._workers.output import Target, Tee, WorkerOutput
from nvidia_resiliency_ext.shared_utils.children import ExitStatus
from nvidia_resiliency_ext.shared_utils.clock import ManualClock

WOKEN_AND_ASKED = [signal.SIGCONT, signal.SIGTERM]


class FakeLoop:
    """Calls the latest timer when its time has come."""

    def __init__(self, clock):
        self.clock, self.due = clock, None

    def call_at(self, at, callback):
        self.due, self.callback = at, callback
        return self

    def cancel(self):
        self.due = None

    def advance_to(self, now):
        self.clock.advance(now - self.clock.monotonic())
        while self.due is not None and self.due <= now:
            self.due = None
            self.callback()

    def watch(self, *_):
        pass

    unwatch = watch


class FakeChild:
    """Keeps what it was sent, and ends when the test says so."""

    def __init__(self, rank):
        self.pid, self.status, self.signals = 100 + rank, None, []

    def fileno(self):
        return self.pid

    def poll(self):
        return self.status

    def signal_group(self, signum):
        self.signals.append(signum)

    def close(self):
        pass


class FakeStarter(workers.Starter):
    def start(self, spec, *_):
        return workers.Started(FakeChild(spec.local_rank), warm=False)


class Group(workers.WorkerGroup):
    """Workers of given ranks over children, loop and clock of the test's."""

    def __init__(self, ranks):
        clock = ManualClock()
        self.given_up = None
        super().__init__(
            FakeLoop(clock), clock, Tee(),
            exited=lambda *_: None, stopped=self._stopped, started_again=print,
        )  # fmt: skip
        output = WorkerOutput(Target(), Target(), "")
        specs = [workers.WorkerSpec(rank, rank, ("true",), {}, output, "") for rank in ranks]
        self.start(specs, FakeStarter())

    def _stopped(self, given_up):
        assert self.given_up is None
        self.given_up = given_up

    def sent(self, rank):
        """Return what a worker was sent since the last call."""
        child = self.started[rank].child
        child.signals, sent = [], child.signals
        return sent

    def end(self, rank):
        self.started[rank].child.status = ExitStatus(0)
        self.reap_exited()


@pytest.fixture
def group():
    groups = []

    def make(*ranks):
        groups.append(Group(ranks))
        return groups[-1]

    yield make
    for one in groups:
        one.close()
        one.tee.close()


def test_everybody_is_woken_and_asked(group):
    """SIGCONT precedes the signal, so that a stopped worker can end."""
    them = group(0, 1)
    them.stop(signal.SIGTERM, 15.0)
    assert [them.sent(rank) for rank in range(2)] == [WOKEN_AND_ASKED] * 2


def test_only_the_stubborn_one_is_killed(group):
    """A worker that ignores the request is killed at its deadline; the others are left alone."""
    them = group(0, 1)
    began = them.clock.monotonic()
    them.stop(signal.SIGTERM, 15.0)
    them.end(0)
    assert them.loop.due == began + 15.0
    them.loop.advance_to(began + 14.9)
    assert them.sent(1) == WOKEN_AND_ASKED
    them.loop.advance_to(began + 15.0)
    assert (them.sent(0), them.sent(1)) == (WOKEN_AND_ASKED, [signal.SIGKILL])
    assert them.given_up is None
    them.end(1)
    assert them.given_up == ()


def test_survivor_of_sigkill_is_given_up(group):
    """A process in state D is reported after a bound instead of being waited for."""
    them = group(3)
    began = them.clock.monotonic()
    them.stop(signal.SIGTERM, 1.0)
    them.loop.advance_to(began + 1.0)
    assert them.loop.due == began + 1.0 + workers.KILL_BOUND_S
    them.loop.advance_to(them.loop.due)
    assert (them.given_up, them.loop.due) == ((3,), None)


def test_a_survivor_is_asked_again_by_the_next_stop(group):
    """Whoever was given up and is there still has its time anew."""
    them = group(3)
    them.stop(signal.SIGTERM, 1.0)
    for _ in range(2):
        them.loop.advance_to(them.loop.due)
    assert them.given_up == (3,)
    them.given_up, _ = None, them.sent(3)
    them.stop(signal.SIGTERM, 5.0)
    assert (them.sent(3), them.given_up) == (WOKEN_AND_ASKED, None)
    them.end(3)
    assert them.given_up == ()


def test_force_kills_now_and_only_once(group):
    """A forced stop does not wait for the deadline and does not signal twice."""
    them = group(0, 1)
    them.stop(signal.SIGINT, 1800.0)
    for expected in ([signal.SIGCONT, signal.SIGINT, signal.SIGKILL], []):
        them.kill()
        assert [them.sent(rank) for rank in range(2)] == [expected] * 2


def test_killing_without_a_stop_under_way_kills_at_once(group):
    """It is a stop without time."""
    them = group(0)
    them.kill()
    them.loop.advance_to(them.clock.monotonic())
    assert them.sent(0) == [signal.SIGCONT, signal.SIGKILL, signal.SIGKILL]


def test_stopping_nobody_is_over_at_once(group):
    """There is nothing to wait for when no worker runs."""
    them = group()
    them.stop(signal.SIGTERM, 15.0)
    assert (them.given_up, them.loop.due) == ((), None)


def test_a_second_request_never_gives_more_time(group):
    """A stop under way keeps its deadline, and a worker that was killed is not asked again."""
    them = group(0, 1)
    began = them.clock.monotonic()
    them.stop(signal.SIGTERM, 3.0)
    them.stop(signal.SIGINT, 1800.0)
    assert them.loop.due == began + 3.0
    assert them.sent(0) == [*WOKEN_AND_ASKED, signal.SIGCONT, signal.SIGINT]
    them.loop.advance_to(began + 3.0)
    assert them.sent(0) == [signal.SIGKILL]
    them.stop(signal.SIGTERM, 1800.0)
    assert them.loop.due == began + 3.0 + workers.KILL_BOUND_S
    assert them.sent(0) == []
