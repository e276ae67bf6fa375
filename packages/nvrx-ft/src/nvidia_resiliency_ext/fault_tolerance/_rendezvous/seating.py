# SPDX-License-Identifier: Apache-2.0
"""Ranks in blocks for nodes that stand in order: who keeps an earlier rank, who fills a hole.

Pure. Nodes are known by their index in that order. A block is `size` ranks in a row, whose nodes
are of one domain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

__all__ = ["by_domain", "seat"]


def by_domain(domains: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of the nodes of each domain; the domain of the first node comes first."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, domain in enumerate(domains):
        members[domain].append(index)
    return dict(members)


def seat(
    domains: Sequence[str], earlier_ranks: Sequence[int | None], *, size: int, blocks: int
) -> list[int]:
    """Return the nodes that get a rank, in rank order.

    A node keeps its earlier rank if its domain keeps the block. Domains that have lost nodes keep
    the blocks with the most survivors; the other blocks go to the domains in order. Holes are
    filled by nodes of the domain, those with an earlier rank before others.

    Args:
        domains: The domain of each node.
        earlier_ranks: The rank that each node had; None for none.
        size: Ranks in a block.
        blocks: How many blocks to give out; the domains can fill as many.
    """
    return _Seating(domains, earlier_ranks, size=size, blocks=blocks).assign()


class _Seating:
    def __init__(
        self, domains: Sequence[str], earlier_ranks: Sequence[int | None], *, size: int, blocks: int
    ) -> None:
        self._domains = domains
        self._earlier_ranks = earlier_ranks
        self._size = size
        self._blocks = blocks
        self._members = by_domain(domains)
        self._room = {domain: len(nodes) // size for domain, nodes in self._members.items()}
        # Who had each rank that still exists; of two that claim one rank the first has it.
        self._holders: dict[int, int] = {}
        for index, rank in enumerate(earlier_ranks):
            if rank is not None and 0 <= rank < blocks * size:
                self._holders.setdefault(rank, index)

    def assign(self) -> list[int]:
        homes = self._keep_homes()
        self._find_homes(homes)
        ranks: dict[str, list[int]] = {domain: [] for domain in self._members}
        for block in range(self._blocks):
            ranks[homes[block]].extend(range(block * self._size, (block + 1) * self._size))
        seats: dict[int, int] = {}
        for domain, members in self._members.items():
            seats.update(self._fill(domain, members, ranks[domain]))
        return [seats[rank] for rank in range(self._blocks * self._size)]

    def _keep_homes(self) -> dict[int, str]:
        """Leave blocks to the domains of those who had their ranks, as far as there is room."""
        claims = Counter(
            (rank // self._size, self._domains[index]) for rank, index in self._holders.items()
        )
        homes: dict[int, str] = {}
        for (block, domain), _ in sorted(claims.items(), key=lambda item: (-item[1], item[0])):
            if block not in homes and self._room[domain]:
                homes[block] = domain
                self._room[domain] -= 1
        return homes

    def _find_homes(self, homes: dict[int, str]) -> None:
        """Give the other blocks to the domains, the first ones first."""
        free = (domain for domain in self._members for _ in range(self._room[domain]))
        for block in range(self._blocks):
            if block not in homes:
                homes[block] = next(free)

    def _fill(self, domain: str, members: list[int], ranks: list[int]) -> dict[int, int]:
        seats = {
            rank: self._holders[rank]
            for rank in ranks
            if rank in self._holders and self._domains[self._holders[rank]] == domain
        }
        seated = set(seats.values())
        holes = [rank for rank in ranks if rank not in seats]
        # Whoever trained before goes on training, if not at the old rank.
        waiting = sorted(
            (index for index in members if index not in seated),
            key=lambda index: (self._earlier_ranks[index] is None, index),
        )
        return {**seats, **dict(zip(holes, sorted(waiting[: len(holes)]), strict=True))}
