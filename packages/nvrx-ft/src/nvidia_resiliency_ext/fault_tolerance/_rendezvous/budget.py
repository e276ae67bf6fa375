# SPDX-License-Identifier: Apache-2.0
"""How many restarts a job has left: one count for the job; it may refill with time. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .records import Entry


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


@dataclass(frozen=True, slots=True)
class Budget:
    """At most `max_restarts`, in all or within the last `window_s` seconds."""

    max_restarts: int
    window_s: float | None = None

    def left(self, entry: Entry, since_entry_s: float = 0.0) -> int:
        """Return how many restarts are left, `since_entry_s` after `entry` was written.

        The number of a round is the number of restarts so far.
        """
        if self.window_s is None:
            return max(0, self.max_restarts - entry.round)
        recent = [age for age in entry.restart_ages_s if age + since_entry_s <= self.window_s]
        return max(0, self.max_restarts - len(recent))
