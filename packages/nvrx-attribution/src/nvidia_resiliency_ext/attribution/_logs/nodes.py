# SPDX-License-Identifier: Apache-2.0
"""Which node each rank runs on, from what the log says; a node is named only when that holds."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MOST_RANKS", "NodeMap"]

MOST_RANKS = 1 << 17


@dataclass(slots=True)
class NodeMap:
    """Rank -> node; contradictions take both away.

    Attributes:
        given: As the caller gave it; it wins.
        seen: As the log says.
        ranks_per_node: As the log says, or None.
    """

    given: dict[int, str] = field(default_factory=dict)
    seen: dict[int, str] = field(default_factory=dict)
    ranks_per_node: int | None = None
    _conflicting: set[int] = field(default_factory=set)
    _first_ranks: dict[str, set[int]] = field(default_factory=dict)

    def add(self, rank: int, node: str, first_rank: int | None = None) -> None:
        """Take in that a rank ran on a node, and the node's first rank if that was said."""
        if first_rank is not None and len(self.seen) < MOST_RANKS:
            self._first_ranks.setdefault(node, set()).add(first_rank)
        known = self.seen.get(rank)
        if known is None:
            if len(self.seen) < MOST_RANKS and rank not in self._conflicting:
                self.seen[rank] = node
        elif known != node:
            del self.seen[rank]
            self._conflicting.add(rank)

    def node_of(self, rank: int | None) -> str | None:
        """Return the node of a rank, or None when nothing supports one."""
        if rank is None:
            return None
        found = self.given.get(rank) or self.seen.get(rank)
        if found is not None:
            return found
        size = self.ranks_per_node or self._even_size()
        if not size:
            return None
        first = rank - rank % size
        neighbours = {
            node
            for other in range(first, first + size)
            if (node := self.given.get(other) or self.seen.get(other)) is not None
        }
        return neighbours.pop() if len(neighbours) == 1 else None

    def ranks_on(self, node: str) -> list[int]:
        """Return the ranks that are known to run on a node."""
        return sorted(rank for rank, name in {**self.seen, **self.given}.items() if name == node)

    def rank_of(self, node: str | None, local_rank: int | None) -> int | None:
        """Return the rank with a number on a node, when the nodes' ranks follow each other."""
        if node is None or local_rank is None:
            return None
        first = self._first_ranks.get(node, ())
        if len(first) == 1:
            return next(iter(first)) + local_rank
        size = self.ranks_per_node or self._even_size()
        known = self.ranks_on(node)
        if not known or not size:
            return None
        return known[0] - known[0] % size + local_rank

    def _even_size(self) -> int | None:
        """Return the number of ranks per node, if all known ranks fit one number."""
        known = {**self.seen, **self.given}
        by_node: dict[str, list[int]] = {}
        for rank, node in known.items():
            by_node.setdefault(node, []).append(rank)
        if len(by_node) < 2:  # noqa: PLR2004 - one node shows no boundary
            return None
        for size in (8, 4, 2, 16, 6, 1):
            blocks = {node: {rank // size for rank in ranks} for node, ranks in by_node.items()}
            is_whole = all(len(numbers) == 1 for numbers in blocks.values())
            if is_whole and len(set().union(*blocks.values())) == len(by_node):
                return size
        return None
