# SPDX-License-Identifier: Apache-2.0
"""When reports are due."""

import itertools
import math
import sys

from nvidia_resiliency_ext.attribution.straggler import interval_tracker
from nvidia_resiliency_ext.attribution.straggler._session.settings import Settings
from nvidia_resiliency_ext.attribution.straggler.interval_tracker import (
    NEVER,
    ReportIntervalTracker,
    iterations_in,
)


def run_steps(tracker, monkeypatch, times):
    """Count iterations at these times and return when reports were due."""
    clock = iter(times)
    monkeypatch.setattr(interval_tracker.time, "monotonic", lambda: now)
    due, step_time = [], 0.0
    for now in clock:
        tracker.iter_increase()
        if tracker.current_iter == tracker.settling_iter:
            tracker.settle(int(iterations_in(tracker.time_interval, step_time)))
        if tracker.is_interval_elapsed():
            due.append(now)
            step_time = tracker.take_step_time()
            tracker.expect_correction()
    return due


def test_interval_is_known_in_the_17th_call(monkeypatch):
    """The median of sixteen step times gives the interval, at least the profiling interval."""
    tracker = ReportIntervalTracker(time_interval=10.0, profiling_interval=3)
    run_steps(tracker, monkeypatch, [float(i) for i in range(16)])
    assert tracker.iter_interval is None
    assert len(tracker.step_times) == 15
    run_steps(tracker, monkeypatch, [40.0])  # one slow step
    assert (tracker.current_iter, tracker.iter_interval, list(tracker.step_times)) == (17, 10, [])
    short = ReportIntervalTracker(time_interval=0.0, profiling_interval=3)
    run_steps(short, monkeypatch, [float(i) for i in range(17)])
    assert short.iter_interval == 3


def test_a_failed_estimate_is_repeated_ever_more_rarely(monkeypatch):
    """After an estimate without an agreement the next one comes 16, 32, 64 iterations later."""
    asked = []

    def reduce_max(wanted):
        asked.append(tracker.current_iter)
        return wanted if len(asked) == 4 else math.inf

    tracker = ReportIntervalTracker(time_interval=10.0, reduce_max=reduce_max)
    run_steps(tracker, monkeypatch, [float(i) for i in range(128)])
    assert (asked, tracker.iter_interval, len(tracker.step_times)) == ([17, 33, 65], None, 16)
    run_steps(tracker, monkeypatch, [128.0])
    assert (asked, tracker.iter_interval) == ([17, 33, 65, 129], 10)


def test_zero_step_time_gives_a_number(monkeypatch):
    """Steps that take no time at all do not give an infinite interval."""
    tracker = ReportIntervalTracker(time_interval=1.0)
    run_steps(tracker, monkeypatch, [0.0] * 17)
    assert tracker.iter_interval == 1_000_000


def test_an_interval_beyond_all_numbers_is_never_over(monkeypatch):
    """The longest time between reports gives a number of iterations, at first and corrected."""
    longest = sys.float_info.max
    tracker = ReportIntervalTracker(time_interval=longest)
    run_steps(tracker, monkeypatch, [0.01 * i for i in range(17)])
    assert tracker.iter_interval == NEVER
    assert Settings(report_time_interval=longest).iterations_between_reports(0.01) == NEVER


def test_period_follows_the_step_time(monkeypatch):
    """After the step time has doubled, the period is within 10 % of what was asked for."""
    tracker = ReportIntervalTracker(time_interval=60.0)
    fast = [0.5 * i for i in range(1000)]
    slow = [fast[-1] + 1.0 * i for i in range(1, 1500)]
    due = run_steps(tracker, monkeypatch, fast + slow)
    periods = [b - a for a, b in itertools.pairwise(due)]
    assert all(abs(period - 60) <= 6 for period in periods[-8:])
    assert max(periods) <= 120
