# SPDX-License-Identifier: Apache-2.0
"""Clocks and deadlines, passed as arguments. This module never sleeps and never waits."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Clock", "Deadline", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Source of time, so that tests can replace it."""

    def monotonic(self) -> float:
        """Return seconds of a clock that never goes back and that all local processes share."""
        ...

    def wall(self) -> float:
        """Return seconds since the epoch; for people and records, never for durations."""
        ...


class SystemClock:
    """The machine's clocks; it has no state and may be shared by all threads."""

    def monotonic(self) -> float:
        """Return `CLOCK_MONOTONIC` in seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds since the epoch."""
        return time.time()


class ManualClock:
    """A clock that only `advance` moves; for tests and simulations.

    `monotonic_s` and `wall_s` are the first readings of both clocks, in seconds.

    Example:
        >>> clock = ManualClock()
        >>> deadline = Deadline.after(5.0, clock)
        >>> clock.advance(6.0)
        >>> deadline.expired()
        True
    """

    def __init__(self, monotonic_s: float = 1000.0, wall_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s

    def monotonic(self) -> float:
        """Return the seconds reached so far."""
        return self._monotonic_s

    def wall(self) -> float:
        """Return the wall time reached so far."""
        return self._wall_s

    def advance(self, seconds: float) -> None:
        """Move both clocks forward.

        Raises:
            ValueError: `seconds` is negative or not finite.
        """
        if not 0.0 <= seconds < math.inf:
            raise ValueError(f"a clock moves forward by a finite time, not by {seconds!r} s")
        self._monotonic_s += seconds
        self._wall_s += seconds


_SYSTEM_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment `at` (infinite: never) on the monotonic `clock` by which something must happen."""

    at: float
    clock: Clock = _SYSTEM_CLOCK

    @classmethod
    def after(cls, seconds: float | None, clock: Clock = _SYSTEM_CLOCK) -> Deadline:
        """Return the deadline `seconds` from now; `None` and infinity never expire.

        Raises:
            ValueError: `seconds` is not a number.
        """
        if seconds is None:
            return cls(math.inf, clock)
        if math.isnan(seconds):
            raise ValueError("a deadline needs a number of seconds, not NaN")
        return cls(clock.monotonic() + seconds, clock)

    def remaining(self) -> float:
        """Return the seconds left, never below zero; infinite when it never expires."""
        return max(0.0, self.at - self.clock.monotonic())

    def expired(self) -> bool:
        """Return whether the moment has passed."""
        return self.clock.monotonic() >= self.at

    def timeout(self) -> float | None:
        """Return the seconds left as selectors, locks and sockets want them (`None`: forever)."""
        return None if self.at == math.inf else self.remaining()
