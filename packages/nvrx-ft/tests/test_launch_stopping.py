# SPDX-License-Identifier: Apache-2.0
"""Stopping workers: who gets which signal when."""

import signal

from nvidia_resiliency_ext.fault_tolerance._workers.workers import KILL_BOUND_S, Stopping


def asked(ranks, signum=signal.SIGTERM, grace_s=15.0, now=100.0):
    """Return a stop that was begun, and what is sent."""
    stop = Stopping()
    return stop, stop.begin(ranks, signum, grace_s, now)


def test_everybody_is_woken_and_asked():
    """SIGCONT precedes the signal, so that a stopped worker can end."""
    _, sends = asked([0, 1])
    assert sends == [
        (0, (signal.SIGCONT, signal.SIGTERM)),
        (1, (signal.SIGCONT, signal.SIGTERM)),
    ]


def test_only_the_stubborn_one_is_killed():
    """A worker that ignores the request is killed at its deadline; the others are left alone."""
    stop, _ = asked([0, 1])
    stop.exited(0)
    assert stop.due == 115.0
    assert stop.advance(114.9) == []
    assert stop.advance(115.0) == [(1, (signal.SIGKILL,))]
    assert not stop.is_over
    stop.exited(1)
    assert stop.is_over


def test_survivor_of_sigkill_is_given_up():
    """A process in state D is reported after a bound instead of being waited for."""
    stop, _ = asked([3], grace_s=1.0, now=0.0)
    stop.advance(1.0)
    sends = stop.advance(1.0 + KILL_BOUND_S)
    assert (sends, stop.is_over, stop.given_up, stop.due) == ([], True, (3,), None)


def test_force_kills_now_and_only_once():
    """A forced stop does not wait for the deadline and does not signal twice."""
    stop, _ = asked([0, 1], signal.SIGINT, 1800.0, 0.0)
    assert stop.force(2.0) == [(0, (signal.SIGKILL,)), (1, (signal.SIGKILL,))]
    assert stop.force(3.0) == []


def test_stopping_nobody_is_over_at_once():
    """There is nothing to wait for when no worker runs."""
    stop, sends = asked([])
    assert (stop.is_over, sends, stop.due) == (True, [], None)


def test_a_second_request_never_gives_more_time():
    """A stop under way keeps its deadline, and a worker that was killed is not asked again."""
    stop, _ = asked([0, 1], grace_s=3.0, now=0.0)
    sends = stop.begin([0, 1], signal.SIGINT, 1800.0, 1.0)
    assert (stop.due, len(sends)) == (3.0, 2)
    stop.advance(3.0)
    sends = stop.begin([0, 1], signal.SIGTERM, 1800.0, 4.0)
    assert (stop.due, sends) == (3.0 + KILL_BOUND_S, [])
