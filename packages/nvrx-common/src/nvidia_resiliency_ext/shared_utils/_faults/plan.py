# SPDX-License-Identifier: Apache-2.0
"""Who gets which fault when, drawn alike on every rank; it dispatches nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .kinds import Fault

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FaultPlan", "draw_plan"]


class FaultPlan(NamedTuple):
    """One fault for some ranks.

    Attributes:
        fault: What happens.
        ranks: To whom, in increasing order.
        delay: After how many seconds.
    """

    fault: Fault
    ranks: tuple[int, ...]
    delay: float


def draw_plan(
    faults: Fault | Iterable[Fault],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    world_size: int,
) -> FaultPlan:
    """Draw a plan that depends on the arguments only.

    Args:
        faults: One of these.
        num_faults: How many ranks, or the least and the most; cut to those who may be chosen.
        keep_alive: How many ranks, from 0 on, are never chosen.
        delay: Seconds, or the least and the most.
        seed: Of the generator.
        world_size: Number of ranks.

    Raises:
        ValueError: There is no fault to choose from, or a pair is not in order.
    """
    from random import Random

    choices = (faults,) if isinstance(faults, Fault) else tuple(faults)
    if not choices:
        raise ValueError("there is no fault to choose from")
    draw = Random(seed)  # noqa: S311 - repeatable is the point
    if isinstance(delay, (int, float)):
        seconds = float(delay)
    else:
        seconds = draw.uniform(*_pair("delay", delay))
    low, high = _pair(
        "num_faults", (num_faults, num_faults) if isinstance(num_faults, int) else num_faults
    )
    candidates = range(max(keep_alive, 0), world_size)
    number = min(draw.randint(int(low), int(high)), len(candidates))
    ranks = tuple(sorted(draw.sample(candidates, number)))
    return FaultPlan(draw.choice(choices), ranks, seconds)


def _pair(name: str, values: tuple[float, float]) -> tuple[float, float]:
    low, high = values
    if not 0 <= low <= high:
        raise ValueError(f"{name}: {values!r} is no pair of a least and a most")
    return low, high
