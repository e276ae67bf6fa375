# SPDX-License-Identifier: Apache-2.0
"""Whose wall clock is off. Pure.

Nothing is decided by comparing wall clocks of two nodes: leases, rounds and budgets go by the
monotonic clock of whoever looks. But people read logs and records of many nodes side by side, and a
scheduler names the end of a job as a wall time. So clocks that are off are found and named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Reading", "off_by", "read", "sentence"]

# Beyond what a slow store or a busy node adds between stamping an arrival and writing it.
TOLERANCE_S = 5.0
MAX_SHOWN = 5

_Name = TypeVar("_Name", str, int)


@dataclass(frozen=True, slots=True)
class Reading:
    """By how much a clock is ahead of the one that it was read with: `ahead_s`, give or take."""

    ahead_s: float
    give_or_take_s: float = 0.0


def read(stamp: float, not_before: float, not_after: float) -> Reading:
    """Return what a stamp tells that was written between two moments of the reader's clock."""
    return Reading(
        ahead_s=stamp - (not_before + not_after) / 2,
        give_or_take_s=(not_after - not_before) / 2,
    )


def off_by(
    readings: Mapping[_Name, Reading], tolerance_s: float = TOLERANCE_S
) -> dict[_Name, float]:
    """Return by name how far clocks are ahead (below 0: behind) of those that agree.

    The time is what most of them say; of two parties as large, the one nearer to the reader's own
    clock is right.
    """
    ordered = sorted(reading.ahead_s for reading in readings.values())
    agreeing, right_s, first = 0, 0.0, 0
    # The longest run of clocks within the tolerance.
    for last, ahead_s in enumerate(ordered):
        while ahead_s - ordered[first] > tolerance_s:
            first += 1
        count, middle_s = last - first + 1, ordered[(first + last) // 2]
        if (count, -abs(middle_s)) > (agreeing, -abs(right_s)):
            agreeing, right_s = count, middle_s
    return {
        name: reading.ahead_s - right_s
        for name, reading in readings.items()
        if abs(reading.ahead_s - right_s) - reading.give_or_take_s > tolerance_s
    }


def sentence(off: Iterable[tuple[str, float]]) -> str:
    """Return whose clock is off, as a line for people; empty when nobody's is."""
    worst = sorted(off, key=lambda item: (-abs(item[1]), item[0]))
    if not worst:
        return ""
    told = [
        f"{name} is {abs(off_s):.1f} s {'ahead' if off_s > 0 else 'behind'}"
        for name, off_s in worst[:MAX_SHOWN]
    ]
    more = f" and {len(worst) - MAX_SHOWN} more" if len(worst) > MAX_SHOWN else ""
    return f"clocks are off, by the others' time: {', '.join(told)}{more}; synchronise them"
