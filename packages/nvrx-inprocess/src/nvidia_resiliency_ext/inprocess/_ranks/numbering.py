# SPDX-License-Identifier: Apache-2.0
"""Numbers of ranks: how many are active, which groups hold together, who replaces a lost one. Pure.

Ranks that are named as terminated but do not exist count for nothing, so the result is always
exactly 0 to the new world size less one.

A whole branch (a node, a rack) is replaced by a whole idle one position by position, so that GPU 3
of the new node does the work of GPU 3 of the lost one and communication keeps to its rails. In all
other cases the one reserve takes the one number.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from .layout import Branch, Layout, above

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Sequence


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


def failing(
    runs: Iterable[tuple[Sequence[str], range]], condition: Callable[[int], bool]
) -> set[int]:
    """Return the ranks of all groups whose size does not fulfil the condition.

    Args:
        runs: Keys, and ranks that have them; keys may come several times.
        condition: Is asked once per size.
    """
    members: dict[tuple[str, ...], list[range]] = {}
    for key, ranks in runs:
        members.setdefault(tuple(key), []).append(ranks)
    sizes = {key: sum(map(len, ranks)) for key, ranks in members.items()}
    holds = {size: bool(condition(size)) for size in sorted(set(sizes.values()))}
    broken = (ranks for key, ranks in members.items() if not holds[sizes[key]])
    return set(chain.from_iterable(chain.from_iterable(broken)))


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


class Plan(Protocol):
    """What is asked about ranks."""

    layout: Layout

    def is_reserve(self, place: int) -> bool:
        """Tell whether the rank lives and is not active."""
        ...


def moves(
    plan: Plan, lost: int, giver: Branch, reserve: int, pending: Container[int]
) -> list[tuple[int, int]]:
    """Return pairs of lost places and the reserves for them, at least one.

    Args:
        plan: Who lives and who is active.
        lost: The lost place to be served next.
        giver: The branch above `lost` that gives a reserve.
        reserve: The reserve below `giver` that is next.
        pending: All lost places that nobody has taken over.
    """
    bottom = plan.layout.bottom
    for depth in range(giver.depth + 1, bottom[lost].depth + 1):
        gone = above(bottom[lost], depth)
        idle = above(bottom[reserve], depth)
        if not gone.living and not idle.active:
            return _pair(plan, gone, idle, pending)
    return [(lost, reserve)]


def _pair(plan: Plan, gone: Branch, idle: Branch, pending: Container[int]) -> list[tuple[int, int]]:
    pairs = _same_positions(plan, gone, idle, pending)
    served = {lost for lost, _ in pairs}
    taken = {reserve for _, reserve in pairs}
    lost_left = [
        place for place in range(gone.start, gone.stop) if place in pending and place not in served
    ]
    idle_left = [
        place
        for place in range(idle.start, idle.stop)
        if plan.is_reserve(place) and place not in taken
    ]
    pairs.extend(zip(lost_left, idle_left, strict=False))
    return pairs


def _same_positions(
    plan: Plan, gone: Branch, idle: Branch, pending: Container[int]
) -> list[tuple[int, int]]:
    if gone.children:
        return [
            pair
            for lost_child, idle_child in zip(gone.children, idle.children, strict=False)
            for pair in _same_positions(plan, lost_child, idle_child, pending)
        ]
    places = zip(range(gone.start, gone.stop), range(idle.start, idle.stop), strict=False)
    return [
        (lost, reserve) for lost, reserve in places if lost in pending and plan.is_reserve(reserve)
    ]
