# SPDX-License-Identifier: Apache-2.0
"""Clocks and deadlines."""

import math

import pytest

from nvidia_resiliency_ext.shared_utils.clock import Deadline, ManualClock, SystemClock


def test_deadline_follows_the_clock_it_was_made_with() -> None:
    """A deadline counts down with its clock, expires exactly on time and never goes negative."""
    clock = ManualClock()
    deadline = Deadline.after(5.0, clock)
    assert (deadline.remaining(), deadline.expired()) == (5.0, False)
    clock.advance(4.0)
    assert (deadline.remaining(), deadline.timeout(), deadline.expired()) == (1.0, 1.0, False)
    clock.advance(1.0)
    assert (deadline.remaining(), deadline.expired()) == (0.0, True)
    clock.advance(9.0)
    assert deadline.remaining() == 0.0


@pytest.mark.parametrize("seconds", [None, math.inf])
def test_deadline_without_an_end_never_expires(seconds: float | None) -> None:
    """No time at all means forever, which selectors and locks know as None."""
    deadline = Deadline.after(seconds, ManualClock())
    assert deadline.timeout() is None
    assert not deadline.expired()
    assert deadline.remaining() == math.inf


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_manual_clock_refuses_to_go_back(seconds: float) -> None:
    """A clock for tests moves forward by a finite time only."""
    with pytest.raises(ValueError, match="forward"):
        ManualClock().advance(seconds)


def test_deadline_refuses_nan() -> None:
    """A deadline that compares with nothing would never expire, so it is refused."""
    with pytest.raises(ValueError, match="NaN"):
        Deadline.after(math.nan)


def test_system_clock_is_monotonic() -> None:
    """Two readings of the system's clock do not go back, and both clocks run."""
    clock = SystemClock()
    first = clock.monotonic()
    assert clock.monotonic() >= first
    assert clock.wall() > 1_600_000_000
