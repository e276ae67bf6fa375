# SPDX-License-Identifier: Apache-2.0
"""The tree as it was at the call: branches over places. It never changes; what does is beside it.

A *place* is the position of a rank in depth-first order, so each branch is a range of places, and
a tree of 100,000 ranks has as many objects as it has branches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Members = dict[tuple[str, ...], list[Iterable[int]]]


class Branch:
    """Ranks that have their keys in common down to one layer.

    Attributes:
        depth: Its layer; 0 is the root.
        key: Its key in that layer.
        parent: The branch above; `None` for the root.
        children: The branches below, none on the last layer.
        start: Its first place.
        stop: The place after its last one.
        living: How many of its ranks live.
        active: How many of its ranks are active.
        reserves: Places of inactive ranks, the one to take first last; also some that were.
    """

    __slots__ = (
        "active",
        "children",
        "depth",
        "key",
        "living",
        "parent",
        "reserves",
        "start",
        "stop",
    )

    def __init__(self, depth: int, key: str, parent: Branch | None) -> None:
        self.depth = depth
        self.key = key
        self.parent = parent
        self.children: list[Branch] = []
        self.start = self.stop = 0
        self.living = self.active = 0
        self.reserves: list[int] = []


class Layout:
    """Branches and places of all ranks.

    Attributes:
        levels: The branches of each layer in depth-first order.
        ranks: By place, the rank at the call.
        bottom: By place, the branch on the last layer.

    Args:
        depth: Number of layers.
        runs: Keys, one per layer, and ranks that have them; ranks ascending over all runs.

    Raises:
        ValueError: Somebody has another number of keys.
        RuntimeError: Not all ranks have the same key on layer 0.
    """

    def __init__(self, depth: int, runs: Iterable[tuple[Sequence[str], Iterable[int]]]) -> None:
        # In order of first appearance by rank, like the children of each branch.
        members: Members = {}
        for keys, ranks in runs:
            members.setdefault(tuple(keys), []).append(ranks)
        for keys in members:
            if len(keys) != depth:
                raise ValueError(f"{depth} layers need {depth} keys, not {len(keys)}: {keys}")
        _check_root(members)
        self.levels: list[list[Branch]] = [[] for _ in range(depth)]
        self.ranks: list[int] = []
        self.bottom: list[Branch] = []
        self._lay(*_grow(members))

    @property
    def root(self) -> Branch:
        """The branch of all ranks."""
        return self.levels[0][0]

    def _lay(self, branch: Branch, leaves: Mapping[Branch, list[Iterable[int]]]) -> None:
        self.levels[branch.depth].append(branch)
        branch.start = len(self.ranks)
        for child in branch.children:
            self._lay(child, leaves)
        for ranks in leaves.get(branch, ()):
            self.ranks.extend(ranks)
        branch.stop = len(self.ranks)
        branch.living = branch.stop - branch.start
        if not branch.children:
            self.bottom.extend([branch] * branch.living)


def above(branch: Branch, depth: int) -> Branch:
    """Return the branch, or the one above it, that stands on that layer."""
    while branch.depth > depth and branch.parent is not None:
        branch = branch.parent
    return branch


def _check_root(members: Iterable[tuple[str, ...]]) -> None:
    roots = sorted({keys[0] for keys in members})
    if len(roots) != 1:
        shown = ", ".join(map(repr, roots[:8]))
        raise RuntimeError(
            f"all ranks must have the same key on layer 0, there are {len(roots)}: {shown}"
        )


def _grow(members: Members) -> tuple[Branch, dict[Branch, list[Iterable[int]]]]:
    """Return the root, and the ranks of each branch of the last layer."""
    first = next(iter(members))
    root = Branch(0, first[0], None)
    grown: dict[tuple[Branch, str], Branch] = {}
    leaves: dict[Branch, list[Iterable[int]]] = {}
    for keys, ranks in members.items():
        branch = root
        for depth in range(1, len(keys)):
            key = keys[depth]
            child = grown.get((branch, key))
            if child is None:
                child = grown[branch, key] = Branch(depth, key, branch)
                branch.children.append(child)
            branch = child
        leaves[branch] = ranks
    return root, leaves
