# SPDX-License-Identifier: Apache-2.0
"""When a monitor that lives, but says nothing, is given up."""

from nvidia_resiliency_ext.inprocess._monitor.timeouts import Silence

LIMIT_S = 30.0


def test_a_stopped_monitor_is_given_up_well_before_other_nodes_do() -> None:
    """It is asked several times; then there is time left for another one to start."""
    silence = Silence(LIMIT_S, 0.0)
    given_up_s = None
    now = 0.0
    while given_up_s is None:
        now += silence.interval_s
        silence.missed(now)
        given_up_s = now if silence.is_over(is_stopped=True) else None
    assert 3 * silence.interval_s < given_up_s <= 15.0
    assert not silence.is_over(is_stopped=False)


def test_one_that_can_run_gets_time_to_import() -> None:
    """A monitor that is only busy is given up after a minute, not before."""
    silence = Silence(LIMIT_S, 0.0)
    for step in range(1, 1000):
        silence.missed(step * silence.interval_s)
        if silence.is_over(is_stopped=False):
            assert step * silence.interval_s >= 60.0
            return
    raise AssertionError("it is never given up")


def test_any_message_ends_the_silence() -> None:
    """After a word the time begins anew."""
    silence = Silence(LIMIT_S, 0.0)
    for step in range(1, 100):
        silence.missed(step * silence.interval_s)
        if step % 3 == 0:
            silence.received(step * silence.interval_s)
        assert not silence.is_over(is_stopped=True)


def test_time_in_which_we_were_held_up_does_not_count() -> None:
    """A job that was suspended as a whole gives no monitor up when it goes on."""
    silence = Silence(LIMIT_S, 0.0)
    silence.missed(10_000.0)
    assert not silence.is_over(is_stopped=True)


def test_short_timeouts_leave_a_second() -> None:
    """No monitor is given up for less than a second of silence."""
    silence = Silence(0.1, 0.0)
    for step in range(1, 5):
        assert not silence.is_over(is_stopped=True)
        silence.missed(step * silence.interval_s)
    assert silence.seconds == 1.0
    assert silence.is_over(is_stopped=True)
