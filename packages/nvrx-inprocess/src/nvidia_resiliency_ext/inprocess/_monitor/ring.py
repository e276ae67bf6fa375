# SPDX-License-Identifier: Apache-2.0
"""Decides from leases which nodes are lost; no I/O.

A lease is a counter. What counts is whether it changed between our own looks, never its value
and never another host's clock. Time in which we could not look does not count against anybody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = ["Ring"]


@dataclass(slots=True)
class _Lease:
    value: int
    unchanged_s: float = 0.0


class Ring:
    """The nodes of a call, each of which watches the next.

    Args:
        interval_s: How often leases are looked at.
        timeout_s: How long one may stay unchanged.
        unknown_s: How long a participant may be on no node that is known.
    """

    def __init__(self, interval_s: float, timeout_s: float, unknown_s: float = math.inf) -> None:
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._unknown_limit_s = unknown_s
        self._unknown_s: dict[int, float] = {}
        self._asked_s = -math.inf
        self._nodes: dict[int, frozenset[int]] = {}
        self._leases: dict[int, _Lease] = {}
        self._lost: set[int] = set()
        self._looked_s = -math.inf
        self._is_suspicious = False

    def update(self, nodes: Mapping[int, Iterable[int]]) -> None:
        """Take in the nodes with their initial ranks."""
        self._nodes = {node_id: frozenset(ranks) for node_id, ranks in nodes.items()}

    def covers(self, ranks: Collection[int]) -> bool:
        """Whether the node of each of the ranks is known."""
        return self._known.issuperset(ranks)

    def unknown(self, ranks: Collection[int], now: float) -> list[int]:
        """Take in that all nodes were asked for; return ranks that are on none for too long.

        They ended after all had met, and before any monitor heard of them.
        """
        passed_s = min(now - self._asked_s, 2 * self._interval_s)
        self._asked_s = now
        known, before = self._known, self._unknown_s
        self._unknown_s = {
            rank: before[rank] + passed_s if rank in before else 0.0
            for rank in sorted(ranks)
            if rank not in known
        }
        return [rank for rank, for_s in self._unknown_s.items() if for_s >= self._unknown_limit_s]

    @property
    def _known(self) -> frozenset[int]:
        """The ranks of all nodes."""
        return frozenset[int]().union(*self._nodes.values())

    def to_read(self, own_id: int, participants: Collection[int]) -> list[int]:
        """Return the nodes whose leases must be read: the next, or all when that is late."""
        others = [
            node_id
            for node_id, ranks in sorted(self._nodes.items())
            if node_id != own_id
            and node_id not in self._lost
            and not ranks.isdisjoint(participants)
        ]
        if self._is_suspicious or not others:
            return others
        return [next((node_id for node_id in others if node_id > own_id), others[0])]

    def looked(self, values: Mapping[int, int], now: float) -> list[int]:
        """Take in one look and return the ranks of the nodes that are lost by it."""
        # A look that took long shows that the store was slow: for the others, too.
        passed_s = min(now - self._looked_s, 2 * self._interval_s)
        self._looked_s = now
        self._is_suspicious = False
        lost_ranks: list[int] = []
        for node_id, value in values.items():
            lease = self._leases.get(node_id)
            if lease is None or lease.value != value:
                self._leases[node_id] = _Lease(value)
                continue
            lease.unchanged_s += passed_s
            if lease.unchanged_s >= self._timeout_s:
                self._lost.add(node_id)
                lost_ranks += sorted(self._nodes.get(node_id, ()))
            elif lease.unchanged_s >= self._timeout_s / 2:
                self._is_suspicious = True
        for node_id in [each for each in self._leases if each not in values]:
            del self._leases[node_id]
        return lost_ranks
