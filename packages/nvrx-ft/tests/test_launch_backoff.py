# SPDX-License-Identifier: Apache-2.0
"""The pause of a crash loop, as a pure function of how cycles ended."""

import signal

import pytest

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._health.admission import crashes_after, delay_s


def loop_of(*cycles):
    """Return the delays after cycles given as (kind, seconds lived, has stepped)."""
    crashes, delays = 0, []
    for kind, lived_s, has_stepped in cycles:
        crashes = crashes_after(crashes, Cause(kind, ""), lived_s, has_stepped=has_stepped)
        delays.append(delay_s(crashes, 30.0))
    return delays


def test_a_crash_loop_waits_longer_and_longer():
    """The first restart is immediate; the next wait 1, 2, 4 ... 30 s."""
    assert loop_of(*[("exited", 0.5, False)] * 8) == [0, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(
    "cycle", [("killed", 10.0, False), ("killed", 0.5, True), ("node_lost", 60.0, False)]
)
def test_a_cycle_that_worked_ends_the_loop(cycle):
    """A cycle that lived long or made a step starts the count anew."""
    crash = ("exception", 1.0, False)
    assert loop_of(crash, crash, crash, cycle, crash) == [0, 1, 2, 0, 0]


def test_other_machines_are_no_crash_of_the_program():
    """A short cycle that ended because a machine went is not counted, nor forgotten."""
    crash, lost = ("exited", 1.0, False), ("node_lost", 1.0, False)
    assert loop_of(crash, lost, crash) == [0, 0, 1]
    assert loop_of(*[("drained", 0.1, False), ("unhealthy", 0.1, False)] * 4) == [0] * 8


def test_a_limit_of_zero_never_waits():
    """The limit bounds every pause; zero switches it off, and nothing overflows."""
    assert delay_s(50, 0.0) == 0.0
    assert delay_s(10**6, 3.0) == 3.0


@pytest.mark.parametrize(
    ("signum", "crashes"),
    [(signal.SIGKILL, 0), (signal.SIGTERM, 0), (signal.SIGSEGV, 1), (signal.SIGABRT, 1)],
)
def test_a_rank_that_somebody_kills_did_not_crash(signum, crashes):
    """Signals that come from outside are no crash of the program; those that it causes are."""
    cause = Cause("killed", "rank 0 died", signal=signum)
    assert crashes_after(0, cause, 0.5, has_stepped=False) == crashes
