# SPDX-License-Identifier: Apache-2.0
"""Which reserve stands in for which lost rank once it is known where the next reserve is.

A whole branch (a node, a rack) is replaced by a whole idle one position by position, so that GPU 3
of the new node does the work of GPU 3 of the lost one and communication keeps to its rails. In all
other cases the one reserve takes the one number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .layout import Branch, Layout, above

if TYPE_CHECKING:
    from collections.abc import Container


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
