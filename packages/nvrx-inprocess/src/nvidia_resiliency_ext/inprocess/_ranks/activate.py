# SPDX-License-Identifier: Apache-2.0
"""How many ranks run the function: pure arithmetic, alike on every rank."""

from __future__ import annotations


def clamp_active(world_size: int, active_world_size: int | None, maximum: int | None) -> int:
    """Return how many ranks are active when at most `maximum` may be.

    Args:
        world_size: How many ranks live; never more than these are active.
        active_world_size: How many an earlier step left active; `None` means all.
        maximum: The limit; `None` means none.
    """
    active = world_size if active_world_size is None else min(active_world_size, world_size)
    return active if maximum is None else min(active, maximum)


def round_down(world_size: int, active_world_size: int | None, divisor: int) -> int:
    """Return how many ranks are active when their number must be a multiple of `divisor`.

    Args:
        world_size: How many ranks live; never more than these are active.
        active_world_size: How many an earlier step left active; `None` means all.
        divisor: At least 1.
    """
    active = clamp_active(world_size, active_world_size, None)
    return active - active % divisor
