# SPDX-License-Identifier: Apache-2.0
"""A restart budget that refills: restarts count for a time only. Reads no clock."""

from __future__ import annotations


class RefillingBudget:
    """At most `max_restarts` within the last `window_s` seconds. Times are monotonic seconds."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._cycle = 0
        self._times: list[float] = []

    def round_begins(self, cycle: int, ages_s: tuple[float, ...], now: float) -> None:
        """Take note of a round; `ages_s` are all restarts that others know of."""
        if ages_s:
            self._times = [now - age for age in ages_s]
        elif cycle > self._cycle:
            self._times.append(now)
        self._cycle = cycle

    def left(self, now: float) -> int:
        """Return how many restarts are left at `now`."""
        self._times = [at for at in self._times if now - at < self._window_s]
        return max(0, self._max_restarts - len(self._times))

    def next_change(self, now: float) -> float | None:
        """Return when the next restart ceases to count, or None."""
        times = [at + self._window_s for at in self._times if at + self._window_s > now]
        return min(times, default=None)
