# SPDX-License-Identifier: Apache-2.0
"""What do counters and states of ports mean? Pure judgement."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["WINDOW_S", "grown", "is_active", "rebased", "too_fast"]

WINDOW_S = 60.0
"""How long growth is watched before it is compared with a limit per minute anew."""


def is_active(state: str) -> bool:
    """Return whether a port's state, such as `4: ACTIVE` or `ACTIVE`, is the one that works."""
    return state.rpartition(":")[2].strip().upper() == "ACTIVE"


def grown(baseline: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return by how much each counter that has a baseline grew."""
    return {
        key: value - baseline[key]
        for key, value in now.items()
        if key in baseline and value > baseline[key]
    }


def rebased(baseline: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return the baseline for the next look: counters that went down were reset."""
    lowest = {key: min(value, baseline.get(key, value)) for key, value in now.items()}
    return {**baseline, **lowest}


def too_fast(
    before: Mapping[str, int], now: Mapping[str, int], limits: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Return the counters (`port/name`) that grew faster than allowed, with growth per minute.

    Less than a minute counts as a whole one: two looks in a row would make a flood of one error.
    """
    found = {}
    for key, growth in grown(before, now).items():
        rate = growth * WINDOW_S / max(seconds, WINDOW_S)
        limit = limits.get(key.rpartition("/")[2])
        if limit is not None and rate > limit:
            found[key] = round(rate, 1)
    return found
