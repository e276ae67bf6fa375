# SPDX-License-Identifier: Apache-2.0
"""New numbers for the ranks that live on: pure arithmetic, alike on every rank.

Ranks that are named as terminated but do not exist count for nothing, so the result is always
exactly 0 to the new world size less one.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


def shift(rank: int, world_size: int, terminated: Collection[int]) -> tuple[int | None, int]:
    """Return the new rank and world size when everybody moves up and keeps the order.

    Returns:
        The rank, `None` for one that is terminated, and how many live on.
    """
    lost = _existing(world_size, terminated)
    below = bisect_left(lost, rank)
    is_lost = below < len(lost) and lost[below] == rank
    return None if is_lost else rank - below, world_size - len(lost)


def fill(rank: int, world_size: int, terminated: Collection[int]) -> tuple[int | None, int]:
    """Return the new rank and world size when the last ranks take the numbers that got free.

    Returns:
        The rank, `None` for one that is terminated, and how many live on.
    """
    lost = _existing(world_size, terminated)
    remaining = world_size - len(lost)
    below = bisect_left(lost, rank)
    if below < len(lost) and lost[below] == rank:
        return None, remaining
    if rank < remaining:
        return rank, remaining
    # The n-th survivor beyond the new end takes the n-th free number below it.
    free_below_end = bisect_left(lost, remaining)
    return lost[rank - remaining - (below - free_below_end)], remaining


def _existing(world_size: int, terminated: Collection[int]) -> list[int]:
    return sorted(rank for rank in set(terminated) if 0 <= rank < world_size)
