# SPDX-License-Identifier: Apache-2.0
"""Number ranks and lay them out in a tree. Pure.

A *position* is a rank's index in depth-first order, so each branch is a range of positions and a
tree of 100,000 ranks has as many objects as it has branches. Terminated ranks that do not exist
are ignored.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from nvidia_resiliency_ext.inprocess._inputs import check_integer
from nvidia_resiliency_ext.inprocess.state import State

Members = dict[tuple[str, ...], list[Iterable[int]]]


class LayerFlag(enum.Flag):
    """The rank that takes over the number of a lost active rank.

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
        """Raise as the class does for values that make no layer."""
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
        return self.flag is not None and flag in self.flag


class Branch:
    """Ranks that have their keys in common down to one layer.

    `reserves` are positions of inactive ranks, the one to take first last; also some that were.
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
    """Branches and positions of all ranks.

    `levels` has the branches of each layer, `ranks` by position the rank at the call, and `bottom`
    by position the branch on the last layer.
    """

    def __init__(self, depth: int, runs: Iterable[tuple[Sequence[str], Iterable[int]]]) -> None:
        # In order of first appearance by rank, like the children of each branch.
        members: Members = {}
        for keys, ranks in runs:
            members.setdefault(tuple(keys), []).append(ranks)
        for keys in members:
            if len(keys) != depth:
                raise ValueError(f"{depth} layers need {depth} keys, not {len(keys)}: {keys}")
        roots = sorted({keys[0] for keys in members})
        if len(roots) != 1:
            shown = ", ".join(map(repr, roots[:8]))
            raise RuntimeError(
                f"all ranks must have the same key on layer 0, there are {len(roots)}: {shown}"
            )
        self.levels: list[list[Branch]] = [[] for _ in range(depth)]
        self.ranks: list[int] = []
        self.bottom: list[Branch] = []
        self._lay(*_grow(members))

    @property
    def root(self) -> Branch:
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
    return next(each for each in lineage(branch) if each.depth <= depth)


def lineage(branch: Branch | None) -> Iterator[Branch]:
    """Yield the branch and those above it, up to the root."""
    while branch is not None:
        yield branch
        branch = branch.parent


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


def clamp_active(world_size: int, active_world_size: int | None, maximum: int | None) -> int:
    """Return how many ranks are active when at most `maximum` may be."""
    active = world_size if active_world_size is None else min(active_world_size, world_size)
    return active if maximum is None else min(active, maximum)


def round_down(world_size: int, active_world_size: int | None, divisor: int) -> int:
    """Return how many ranks are active when their number must be a multiple of `divisor`."""
    active = clamp_active(world_size, active_world_size, None)
    return active - active % divisor


def failing(
    runs: Iterable[tuple[Sequence[str], Sequence[int]]], condition: Callable[[int], bool]
) -> set[int]:
    """Return the ranks of all groups whose size does not fulfil the condition."""
    members: dict[tuple[str, ...], list[Sequence[int]]] = {}
    for key, ranks in runs:
        members.setdefault(tuple(key), []).append(ranks)
    sizes = {key: sum(map(len, ranks)) for key, ranks in members.items()}
    holds = {size: bool(condition(size)) for size in sorted(set(sizes.values()))}
    broken = (ranks for key, ranks in members.items() if not holds[sizes[key]])
    return set(chain.from_iterable(chain.from_iterable(broken)))


def shift(rank: int, world_size: int, terminated: Collection[int]) -> tuple[int | None, int]:
    """Return rank and world size when survivors move up in order; no rank for a terminated one."""
    lost = _existing(world_size, terminated)
    below = bisect_left(lost, rank)
    is_lost = below < len(lost) and lost[below] == rank
    return None if is_lost else rank - below, world_size - len(lost)


def fill(rank: int, world_size: int, terminated: Collection[int]) -> tuple[int | None, int]:
    """Return rank and world size when the last ranks take the free numbers; None for a lost one."""
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
