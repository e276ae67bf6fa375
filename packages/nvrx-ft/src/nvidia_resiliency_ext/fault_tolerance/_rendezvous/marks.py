# SPDX-License-Identifier: Apache-2.0
"""What is held against hosts and nodes, as decisions carry it for another host of the job. Pure.

A control plane keeps nothing on disk, and launchers bring it the last decision that they know. So
what it has learned of hosts stands in each decision: the newest few, for all nodes read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .blame import BlameRules, Failures
from .records import Marks

__all__ = ["failures_in", "marks_of", "merged"]

MOST_HOSTS = 32
MOST_NODES = 64
MOST_TEXT = 200


def marks_of(
    failures: Failures,
    named: Mapping[str, str],
    unhealthy: Iterable[str],
    now: float,
    rules: BlameRules,
) -> Marks | None:
    """Return what a decision says of hosts and nodes, None where that is nothing.

    Args:
        failures: When hosts failed, by the caller's monotonic clock.
        named: Hosts that somebody outside the job named, and why; the newest first.
        unhealthy: Nodes that said that they are.
        now: The time by that clock.
        rules: Which failures still count.
    """
    since = now - rules.window_s
    recent = {name: [at for at in times if at > since] for name, times in failures.items()}
    newest = sorted((name for name in recent if recent[name]), key=lambda name: -recent[name][-1])
    marks = Marks(
        failures=tuple(
            (name, tuple(round(now - at, 3) for at in recent[name])) for name in newest[:MOST_HOSTS]
        ),
        named=tuple((name, why[:MOST_TEXT]) for name, why in named.items())[:MOST_HOSTS],
        unhealthy=tuple(sorted(unhealthy))[:MOST_NODES],
    )
    return None if marks == Marks() else marks


def merged(told: Iterable[Marks | None]) -> Marks:
    """Return what any of several decisions says: not everybody has heard the last one."""
    failures: dict[str, tuple[float, ...]] = {}
    named: dict[str, str] = {}
    unhealthy: set[str] = set()
    for marks in told:
        if marks is not None:
            for name, ages in marks.failures:
                failures[name] = max(failures.get(name, ()), ages, key=len)
            named.update(marks.named)
            unhealthy.update(marks.unhealthy)
    return Marks(tuple(failures.items()), tuple(named.items()), tuple(sorted(unhealthy)))


def failures_in(marks: Marks, now: float) -> Failures:
    """Return when hosts failed, by a clock that shows `now`: later than they did, never sooner."""
    return {name: tuple(sorted(now - age for age in ages)) for name, ages in marks.failures}
