# SPDX-License-Identifier: Apache-2.0
"""The tree as it was at the call: branches over places. It never changes; what does is beside it.

A *place* is the position of a rank in depth-first order, so each branch is a range of places, and
a tree of 100,000 ranks has as many objects as it has branches.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.inprocess._checks import check_integer

if TYPE_CHECKING:
    from nvidia_resiliency_ext.inprocess.state import State


class LayerFlag(enum.Flag):
    """Who takes over the number of a lost active rank.

    Attributes:
        RESERVE: An inactive rank below the same branch of this layer.
        BACKFILL: The active rank with the largest number below the same branch of this layer.
    """

    RESERVE = enum.auto()
    BACKFILL = enum.auto()


@dataclass
class Layer:
    """One layer of the tree; ranks with the same key, below the same branch, are a branch.

    It may be changed until a `Tree` is made of it, which checks it again.

    Args:
        min_ranks: A branch with fewer living ranks is given up as a whole.
        max_ranks: At most so many ranks of a branch are active in the first iteration; `None` for
            no limit. The others are reserves.
        key_or_fn: The key, or what is called with the rank's `State` to get it.
        flag: Who replaces lost active ranks.

    Raises:
        ValueError: A limit is negative, or `min_ranks` is above `max_ranks`.
        TypeError: An argument has another type.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: str | Callable[[State], str] = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse values that make no layer.

        Raises: as the class.
        """
        check_integer("min_ranks", self.min_ranks, least=0)
        if self.max_ranks is not None:
            check_integer("max_ranks", self.max_ranks, least=0)
            if self.min_ranks > self.max_ranks:
                raise ValueError(
                    f"min_ranks must be at most max_ranks: {self.min_ranks} > {self.max_ranks}"
                )
        if not isinstance(self.key_or_fn, str) and not callable(self.key_or_fn):
            raise TypeError(f"key_or_fn must be a str or callable, not {self.key_or_fn!r}")
        if self.flag is not None and not isinstance(self.flag, LayerFlag):
            raise TypeError(f"flag must be a LayerFlag or None, not {self.flag!r}")

    def has(self, flag: LayerFlag) -> bool:
        """Tell whether the flag is set."""
        return self.flag is not None and flag in self.flag


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
