# SPDX-License-Identifier: Apache-2.0
"""The rules of the tree written down plainly: every question is answered by looking at all leaves.

It keeps no counts, ranges or stacks, so it has nothing in common with what it is compared to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class SlowLeaf:
    rank_at_call: int
    keys: tuple[str, ...]
    position: tuple[int, ...] = ()
    rank: int | None = None
    number: int | None = None
    is_alive: bool = True
    retired: tuple[int, tuple[int, ...]] = (0, ())

    @property
    def is_active(self) -> bool:
        return self.is_alive and self.number is not None

    @property
    def is_reserve(self) -> bool:
        return self.is_alive and self.number is None


class SlowTree:
    """A tree of ranks.

    Args:
        layers: min_ranks, max_ranks, has_reserve, has_backfill of each layer.
        keys: By rank, one key per layer.
    """

    def __init__(self, layers: list[tuple[int, int | None, bool, bool]], keys: list[Any]) -> None:
        self.layers = layers
        self.depth = len(layers)
        self.leaves = [SlowLeaf(rank, tuple(each), rank=rank) for rank, each in enumerate(keys)]
        for leaf in self.leaves:
            leaf.position = self._position(leaf)
        self.leaves.sort(key=lambda leaf: leaf.position)
        self.calls = 0
        number = 0
        for leaf in self.leaves:
            leaf.retired = (0, leaf.position)
            if all(self._has_room(leaf, depth) for depth in range(self.depth)):
                leaf.number = number
                number += 1

    def under(self, leaf: SlowLeaf, depth: int) -> list[SlowLeaf]:
        """All leaves below the branch of that layer to which a leaf belongs."""
        return [each for each in self.leaves if each.keys[: depth + 1] == leaf.keys[: depth + 1]]

    def lose(self, terminated: set[int], world_size_filter: Any = None) -> None:
        self.calls += 1
        lost = self._propagate([leaf for leaf in self.leaves if leaf.rank in terminated])
        for leaf in lost:
            leaf.is_alive, leaf.rank = False, None
        losses = {leaf.number: leaf for leaf in lost if leaf.number is not None}
        for leaf in lost:
            leaf.number = None
        self._reserve(losses)
        gaps = self._backfill(losses)
        for leaf in self.leaves:
            if leaf.is_active:
                leaf.number -= sum(gap < leaf.number for gap in gaps)
        if world_size_filter is not None and any(leaf.is_alive for leaf in self.leaves):
            wanted = world_size_filter(sum(leaf.is_active for leaf in self.leaves))
            for leaf in self.leaves:
                if leaf.is_active and leaf.number >= wanted:
                    leaf.number = None
                    leaf.retired = (self.calls, leaf.position)
        for rank, leaf in enumerate(leaf for leaf in self.leaves if leaf.is_alive):
            leaf.rank = rank

    def _position(self, leaf: SlowLeaf) -> tuple[int, ...]:
        """Index among the siblings on each layer, in order of first appearance by rank."""
        found = []
        for depth in range(self.depth):
            siblings = [each for each in self.leaves if each.keys[:depth] == leaf.keys[:depth]]
            names = list(
                dict.fromkeys(
                    each.keys[depth] for each in sorted(siblings, key=lambda e: e.rank_at_call)
                )
            )
            found.append(names.index(leaf.keys[depth]))
        same = sorted(each.rank_at_call for each in self.leaves if each.keys == leaf.keys)
        return (*found, same.index(leaf.rank_at_call))

    def _has_room(self, leaf: SlowLeaf, depth: int) -> bool:
        maximum = self.layers[depth][1]
        active = sum(each.number is not None for each in self.under(leaf, depth))
        return maximum is None or active < maximum

    def _propagate(self, lost: list[SlowLeaf]) -> list[SlowLeaf]:
        gone = set(lost)
        for depth in reversed(range(self.depth)):
            for leaf in self.leaves:
                branch = [e for e in self.under(leaf, depth) if e.is_alive]
                if sum(each not in gone for each in branch) < self.layers[depth][0]:
                    gone.update(branch)
        return [leaf for leaf in self.leaves if leaf in gone]

    def _reserve(self, losses: dict[int, SlowLeaf]) -> None:
        for number in sorted(losses, key=lambda n: losses[n].position):
            while number in losses:
                pairs = self._pairs(losses[number], losses)
                if not pairs:
                    break
                for lost, reserve in pairs:
                    taken = next(n for n, leaf in losses.items() if leaf is lost)
                    del losses[taken]
                    reserve.number = taken

    def _pairs(
        self, lost: SlowLeaf, losses: dict[int, SlowLeaf]
    ) -> list[tuple[SlowLeaf, SlowLeaf]]:
        for depth in reversed(range(self.depth)):
            if not self.layers[depth][2]:
                return []
            reserves = [leaf for leaf in self.under(lost, depth) if leaf.is_reserve]
            if reserves:
                return self._replace(lost, max(reserves, key=lambda e: e.retired), depth, losses)
        return []

    def _replace(
        self, lost: SlowLeaf, reserve: SlowLeaf, giver: int, losses: dict[int, SlowLeaf]
    ) -> list[tuple[SlowLeaf, SlowLeaf]]:
        for depth in range(giver + 1, self.depth):
            gone, idle = self.under(lost, depth), self.under(reserve, depth)
            if any(leaf.is_alive for leaf in gone) or any(leaf.is_active for leaf in idle):
                continue
            wanted = [leaf for leaf in gone if leaf in losses.values()]
            free = [leaf for leaf in idle if leaf.is_reserve]
            tail = depth + 1
            at = {leaf.position[tail:]: leaf for leaf in free}
            pairs = [(w, at[w.position[tail:]]) for w in wanted if w.position[tail:] in at]
            served, taken = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
            rest = [leaf for leaf in wanted if leaf not in served]
            pairs += zip(rest, [leaf for leaf in free if leaf not in taken], strict=False)
            return pairs
        return [(lost, reserve)]

    def _backfill(self, losses: dict[int, SlowLeaf]) -> list[int]:
        depth = self.depth
        while depth and self.layers[depth - 1][3]:
            depth -= 1
        if depth == self.depth:
            return list(losses)
        gaps: list[int] = []
        domains: dict[tuple[str, ...], list[int]] = {}
        for number in sorted(losses):
            domains.setdefault(losses[number].keys[: depth + 1], []).append(number)
        for numbers in domains.values():
            active = [e for e in self.under(losses[numbers[0]], depth) if e.is_active]
            movers = sorted(active, key=lambda e: e.number)[-len(numbers) :]
            gaps += [mover.number for mover in movers] + numbers[len(movers) :]
            for number, mover in zip(numbers, movers, strict=False):
                mover.number = number
        return gaps
