# SPDX-License-Identifier: Apache-2.0
"""Stopping workers: who gets which signal when."""

import signal

from nvidia_resiliency_ext.fault_tolerance._workers import workers
from nvidia_resiliency_ext.fault_tolerance._workers.workers import KILL_BOUND_S, Send


def test_everybody_is_woken_and_asked():
    """SIGCONT precedes the signal, so that a stopped worker can end."""
    _, sends = workers.begin([0, 1], signal.SIGTERM, 15.0, 100.0)
    assert sends == (
        Send(0, (signal.SIGCONT, signal.SIGTERM)),
        Send(1, (signal.SIGCONT, signal.SIGTERM)),
    )


def test_only_the_stubborn_one_is_killed():
    """A worker that ignores the request is killed at its deadline; the others are left alone."""
    state, _ = workers.begin([0, 1], signal.SIGTERM, 15.0, 100.0)
    state = workers.exited(state, 0)
    assert state.due == 115.0
    state, sends = workers.advance(state, 114.9)
    assert sends == ()
    state, sends = workers.advance(state, 115.0)
    assert sends == (Send(1, (signal.SIGKILL,)),)
    assert not state.is_over
    assert workers.exited(state, 1).is_over


def test_survivor_of_sigkill_is_given_up():
    """A process in state D is reported after a bound instead of being waited for."""
    state, _ = workers.begin([3], signal.SIGTERM, 1.0, 0.0)
    state, _ = workers.advance(state, 1.0)
    state, sends = workers.advance(state, 1.0 + KILL_BOUND_S)
    assert (sends, state.is_over, state.given_up, state.due) == ((), True, (3,), None)


def test_force_kills_now_and_only_once():
    """A forced stop does not wait for the deadline and does not signal twice."""
    state, _ = workers.begin([0, 1], signal.SIGINT, 1800.0, 0.0)
    state, sends = workers.force(state, 2.0)
    assert sends == (Send(0, (signal.SIGKILL,)), Send(1, (signal.SIGKILL,)))
    _, sends = workers.force(state, 3.0)
    assert sends == ()


def test_stopping_nobody_is_over_at_once():
    """There is nothing to wait for when no worker runs."""
    state, sends = workers.begin([], signal.SIGTERM, 15.0, 0.0)
    assert (state.is_over, sends, state.due) == (True, (), None)


def test_a_second_request_never_gives_more_time():
    """A stop under way keeps its deadline, and a worker that was killed is not asked again."""
    state, _ = workers.begin([0, 1], signal.SIGTERM, 3.0, 0.0)
    state, sends = workers.begin([0, 1], signal.SIGINT, 1800.0, 1.0, state)
    assert (state.due, len(sends)) == (3.0, 2)
    state, _ = workers.advance(state, 3.0)
    state, sends = workers.begin([0, 1], signal.SIGTERM, 1800.0, 4.0, state)
    assert (state.due, sends) == (3.0 + KILL_BOUND_S, ())
