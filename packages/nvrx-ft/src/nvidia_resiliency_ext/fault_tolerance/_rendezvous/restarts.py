# SPDX-License-Identifier: Apache-2.0
"""How many restarts a job has left, and which hosts are blamed for them. Pure."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance._core.infra import short_host

from .records import Entry


class RefillingBudget:
    """At most `max_restarts` within the last `window_s` seconds. Times are monotonic seconds."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._cycle = 0
        self._times: list[float] = []

    def round_begins(self, cycle: int, ages_s: tuple[float, ...], now: float) -> None:
        """Record a round; `ages_s` are all restarts that others know of."""
        if ages_s:
            self._times = [now - age for age in ages_s]
        elif cycle > self._cycle:
            self._times.append(now)
        self._cycle = cycle

    def left(self, now: float) -> int:
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
        """Return how many restarts are left, `since_entry_s` after `entry` was written."""
        if self.window_s is None:
            # The number of a round is the number of restarts so far.
            return max(0, self.max_restarts - entry.round)
        recent = [age for age in entry.restart_ages_s if age + since_entry_s < self.window_s]
        return max(0, self.max_restarts - len(recent))


Failures = Mapping[str, tuple[float, ...]]  # By host: when they were, on one monotonic clock.
OF_THE_NODE = frozenset(
    {
        "killed", "exited", "exception", "hang_section", "hang_heartbeat", "node_lost",
        "unhealthy", "start",
    }
)  # fmt: skip
"""The kinds of causes that count against the host that they name."""


@dataclass(frozen=True, slots=True)
class BlameRules:
    """A host with `limit` failures within `window_s` is to blame; a limit of 0 blames nobody."""

    limit: int = 3
    window_s: float = 3600.0


def record_failure(failures: Failures, host: str, now: float, rules: BlameRules) -> Failures:
    """Return the failures with one more; those before the window are forgotten."""
    since = now - rules.window_s
    kept = {name: tuple(at for at in times if at > since) for name, times in failures.items()}
    kept[host] = (*kept.get(host, ()), now)[-max(1, rules.limit) :]
    return {name: times for name, times in kept.items() if times}


def blamed(failures: Failures, now: float, rules: BlameRules) -> frozenset[str]:
    if rules.limit < 1:
        return frozenset()
    since = now - rules.window_s
    return frozenset(
        host for host, times in failures.items() if sum(at > since for at in times) >= rules.limit
    )


class Denylist:
    """The named hosts of one job; any thread. They stay named until the job ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.why: Mapping[str, str] = {}  # Replaced as a whole: who reads it holds one state.

    def add(self, hosts: Iterable[str], why: str) -> None:
        """Add hosts to the denylist; existing entries keep their reason."""
        with self._lock:
            new = [host for host in hosts if host not in self.why]
            self.why = {**dict.fromkeys(new, why), **self.why}


def is_named(host: str, addr: str, named: Iterable[str]) -> bool:
    own = {short_host(host.lower()), short_host(addr.lower())}
    return any(short_host(name.lower()) in own for name in named)
