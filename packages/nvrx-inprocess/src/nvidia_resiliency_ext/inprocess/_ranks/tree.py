# SPDX-License-Identifier: Apache-2.0
"""Update numbers, activity and replacements in a tree of ranks after losses; read-only views of it.

Pure: the same losses give the same result on every rank. State is lists over positions and active
ranks, so a restart costs a few passes over integers.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import compress, count
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.inprocess.state import Mode, State

from .layout import Branch, Layer, LayerFlag, Layout, above, moves

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

INACTIVE = -1


class TreePlan:
    """The numbers of all ranks, as losses change them.

    Attributes:
        layout: Branches and places.
        order: By rank, its place; from the first assignment on in depth-first order.
        alive: By place, whether the rank lives.
        numbers: By place, the active rank, or `INACTIVE`.
        holders: By active rank, its place.

    Args:
        layers: What the user says about each layer.
        layout: The ranks at the call.
    """

    def __init__(self, layers: Sequence[Layer], layout: Layout) -> None:
        self.layout = layout
        self._layers = tuple(layers)
        self._reserve_depth = self._highest(LayerFlag.RESERVE)
        self._domain_depth = self._highest(LayerFlag.BACKFILL)
        size = len(layout.ranks)
        self.order = sorted(range(size), key=layout.ranks.__getitem__)
        self.alive = bytearray(b"\1") * size
        self.numbers = [INACTIVE] * size
        self.holders: list[int] = []
        for span in self._activate(layout.root, size):
            first = len(self.holders)
            self.numbers[span.start : span.stop] = range(first, first + len(span))
            self.holders.extend(span)
        self._add_reserves(place for place in range(size) if self.numbers[place] < 0)
        self._is_first = True

    @property
    def world_size(self) -> int:
        """How many ranks live."""
        return len(self.order)

    @property
    def active_world_size(self) -> int:
        """How many ranks are active."""
        return len(self.holders)

    def lose(
        self,
        terminated: Collection[int],
        world_size_filter: Callable[[int], int] | None = None,
    ) -> None:
        """Go on without some ranks.

        Args:
            terminated: Ranks in the present numbering; others are ignored.
            world_size_filter: Maps the number of active ranks to one that is wanted.

        Raises:
            AssertionError: The filter wants more active ranks than there are, or less than none.
        """
        size = self.world_size
        losses = self._end([self.order[rank] for rank in terminated if 0 <= rank < size])
        self._close(self._backfill(self._call_reserves(losses)))
        self.order = list(compress(range(len(self.alive)), self.alive))
        if world_size_filter is not None and self.order:
            self._retire(world_size_filter(self.active_world_size))

    def _highest(self, flag: LayerFlag) -> int:
        """Return the highest layer that is reached from the last one over layers with the flag."""
        depth = len(self._layers)
        while depth and self._layers[depth - 1].has(flag):
            depth -= 1
        return depth

    def _activate(self, branch: Branch, limit: int) -> list[range]:
        """Count the active ranks below a branch; return their places in spans, ascending."""
        maximum = self._layers[branch.depth].max_ranks
        limit = limit if maximum is None else min(limit, maximum)
        if not branch.children:
            branch.active = min(limit, branch.living)
            return [range(branch.start, branch.start + branch.active)]
        spans: list[range] = []
        for child in branch.children:
            for span in self._activate(child, limit - branch.active):
                if spans and spans[-1].stop == span.start:
                    spans[-1] = range(spans[-1].start, span.stop)
                else:
                    spans.append(span)
            branch.active += child.active
        return spans

    def _add_reserves(self, places: Iterable[int]) -> None:
        if self._reserve_depth == len(self._layers):
            return
        for place in places:
            branch: Branch | None = self.layout.bottom[place]
            while branch is not None and branch.depth >= self._reserve_depth:
                branch.reserves.append(place)
                branch = branch.parent

    def _end(self, places: Iterable[int]) -> dict[int, int]:
        """End ranks, and branches with too few others; return lost numbers by place, ascending."""
        levels = self.layout.levels
        touched = [set(level) if self._is_first else set() for level in levels]
        self._is_first = False
        losses: dict[int, int] = {}

        def end(place: int) -> None:
            self.alive[place] = 0
            number = self.numbers[place]
            if number >= 0:
                self.numbers[place] = INACTIVE
                losses[place] = number
            branch: Branch | None = self.layout.bottom[place]
            while branch is not None:
                branch.living -= 1
                branch.active -= number >= 0
                touched[branch.depth].add(branch)
                branch = branch.parent

        for place in set(places):
            end(place)
        for depth in reversed(range(len(levels))):
            least = self._layers[depth].min_ranks
            for branch in [each for each in touched[depth] if 0 < each.living < least]:
                for place in range(branch.start, branch.stop):
                    if self.alive[place]:
                        end(place)
        return dict(sorted(losses.items()))

    def _call_reserves(self, losses: dict[int, int]) -> dict[int, int]:
        """Let reserves take over lost numbers, one place after the other; return what is left."""
        pending, left = dict(losses), {}
        for place in losses:
            while place in pending:
                found = self._reserve_for(place)
                if found is None:
                    left[place] = pending.pop(place)
                    break
                for lost, reserve in moves(self, place, *found, pending):
                    self._take(reserve, pending.pop(lost))
        return left

    def _reserve_for(self, place: int) -> tuple[Branch, int] | None:
        branch: Branch | None = self.layout.bottom[place]
        while branch is not None and branch.depth >= self._reserve_depth:
            reserves = branch.reserves
            while reserves:
                if self.is_reserve(reserves[-1]):
                    return branch, reserves[-1]
                reserves.pop()
            branch = branch.parent
        return None

    def rank_of(self, place: int) -> int | None:
        """Return the present rank; `None` of one that is lost."""
        return bisect_left(self.order, place) if self.alive[place] else None

    def is_reserve(self, place: int) -> bool:
        """Tell whether the rank lives and is not active."""
        return bool(self.alive[place]) and self.numbers[place] < 0

    def _take(self, place: int, number: int) -> None:
        self.numbers[place] = number
        self.holders[number] = place
        branch: Branch | None = self.layout.bottom[place]
        while branch is not None:
            branch.active += 1
            branch = branch.parent

    def _backfill(self, losses: dict[int, int]) -> list[int]:
        """Let the last active ranks take over lost numbers; return the numbers that nobody has."""
        if self._domain_depth == len(self._layers):
            return list(losses.values())
        domains: dict[Branch, list[int]] = {}
        for place, number in losses.items():
            domain = above(self.layout.bottom[place], self._domain_depth)
            domains.setdefault(domain, []).append(number)
        gaps: list[int] = []
        for domain, lost in domains.items():
            held = [n for n in self.numbers[domain.start : domain.stop] if n >= 0]
            movers = heapq.nlargest(len(lost), held)[::-1]
            lost.sort()
            for number, mover in zip(lost, movers, strict=False):
                place = self.holders[mover]
                self.numbers[place] = number
                self.holders[number] = place
            gaps += movers + lost[len(movers) :]
        return gaps

    def _close(self, gaps: list[int]) -> None:
        """Move everybody up over the gaps."""
        if not gaps:
            return
        for gap in gaps:
            self.holders[gap] = INACTIVE
        first = min(gaps)
        moved = [place for place in self.holders[first:] if place >= 0]
        self.holders[first:] = moved
        for number, place in enumerate(moved, first):
            self.numbers[place] = number

    def _retire(self, wanted: int) -> None:
        """Make reserves of the last active ranks."""
        if not 0 <= wanted <= self.active_world_size:
            raise AssertionError(
                f"world_size_filter must return 0 to {self.active_world_size}, not {wanted!r}"
            )
        retired = sorted(self.holders[wanted:])
        del self.holders[wanted:]
        for place in retired:
            self.numbers[place] = INACTIVE
            branch: Branch | None = self.layout.bottom[place]
            while branch is not None:
                branch.active -= 1
                branch = branch.parent
        self._add_reserves(retired)


class Picture:
    """A tree, and the state of the rank that looks at it.

    Args:
        layers: What the user says about each layer.
        plan: The numbers of all ranks.
        initial_ranks: By rank at the first assignment, the initial rank.
    """

    def __init__(
        self, layers: Sequence[Layer], plan: TreePlan, initial_ranks: Sequence[int]
    ) -> None:
        self.layers = layers
        self.plan = plan
        self.initial_ranks = [initial_ranks[rank] for rank in plan.layout.ranks]
        self.places = dict(zip(self.initial_ranks, count(), strict=False))
        self.iteration = 0

    def state(self, place: int) -> State:
        """Return where the rank of a place stands; a lost one has no rank."""
        plan = self.plan
        is_alive, number = bool(plan.alive[place]), plan.numbers[place]
        mode = Mode.ACTIVE if number >= 0 else Mode.INACTIVE
        return State(
            rank=plan.rank_of(place),
            world_size=plan.world_size,
            active_rank=None if number < 0 else number,
            active_world_size=plan.active_world_size,
            initial_rank=self.initial_ranks[place],
            initial_world_size=len(self.initial_ranks),
            iteration=self.iteration,
            mode=mode if is_alive else Mode.TERMINATED,
        )


class Leaf:
    """One rank in the tree."""

    is_leaf = True
    children: tuple[Node, ...] = ()
    layer = None

    def __init__(self, picture: Picture, place: int) -> None:
        self._picture = picture
        self._place = place

    @property
    def state(self) -> State:
        """Where the rank stands; a copy."""
        return self._picture.state(self._place)

    @property
    def parent(self) -> Node:
        """The branch above."""
        return Node(self._picture, self._picture.plan.layout.bottom[self._place])

    def iter_leaves(self) -> Iterator[Leaf]:
        """Yield the leaf itself."""
        yield self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Leaf):
            return NotImplemented
        return (self._picture, self._place) == (other._picture, other._place)

    def __hash__(self) -> int:
        return hash((id(self._picture), self._place))

    def __repr__(self) -> str:
        return f"Leaf({self.state!r})"


class Node:
    """One branch of the tree."""

    is_leaf = False

    def __init__(self, picture: Picture, branch: Branch) -> None:
        self._picture = picture
        self._branch = branch

    @property
    def name(self) -> str:
        """The key of the branch."""
        return self._branch.key

    @property
    def layer(self) -> Layer:
        """What the user says about branches like this one."""
        return self._picture.layers[self._branch.depth]

    @property
    def parent(self) -> Node | None:
        """The branch above; `None` for the root."""
        parent = self._branch.parent
        return None if parent is None else Node(self._picture, parent)

    @property
    def children(self) -> tuple[Node | Leaf, ...]:
        """The branches below, or the leaves."""
        if self._branch.children:
            return tuple(Node(self._picture, child) for child in self._branch.children)
        return tuple(self.iter_leaves())

    @property
    def living_count(self) -> int:
        """How many of its ranks live."""
        return self._branch.living

    @property
    def active_count(self) -> int:
        """How many of its ranks are active."""
        return self._branch.active

    def iter_leaves(self) -> Iterator[Leaf]:
        """Yield all ranks below, lost ones too, in depth-first order."""
        for place in range(self._branch.start, self._branch.stop):
            yield Leaf(self._picture, place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and other._branch is self._branch

    def __hash__(self) -> int:
        return hash(id(self._branch))

    def __repr__(self) -> str:
        return f"Node({self.name!r}, {self.living_count} living, {self.active_count} active)"


class LeafMap(Mapping[int, Leaf]):
    """Leaves by number; read only.

    Args:
        picture: The tree.
        places: Places by number.
    """

    def __init__(self, picture: Picture, places: Mapping[int, int] | Sequence[int]) -> None:
        self._picture = picture
        self._places = places

    def __getitem__(self, number: int) -> Leaf:
        if not isinstance(self._places, Mapping) and not 0 <= number < len(self._places):
            raise KeyError(number)
        return Leaf(self._picture, self._places[number])

    def __iter__(self) -> Iterator[int]:
        return iter(self._places if isinstance(self._places, Mapping) else range(len(self)))

    def __len__(self) -> int:
        return len(self._places)
