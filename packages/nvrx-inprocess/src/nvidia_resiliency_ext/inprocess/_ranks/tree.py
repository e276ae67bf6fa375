# SPDX-License-Identifier: Apache-2.0
"""Update numbers, activity and replacements in a tree of ranks after losses; read-only views of it.

Pure: the same losses give the same result on every rank, in a few passes over lists of integers. A
whole branch (a node, a rack) is replaced by a whole idle one position by position, so that GPU 3 of
the new node does the work of GPU 3 of the lost one; else one reserve takes one number.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count

from nvidia_resiliency_ext.inprocess.state import Mode, State

from .layout import Branch, Layer, LayerFlag, Layout, above, lineage

INACTIVE = -1


class TreePlan:
    """The numbers of all ranks, as losses change them.

    `order` has by rank its position; `numbers` by position the active rank, or `INACTIVE`.
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
        self.active_positions: list[int] = []
        for span in self._activate(layout.root, size):
            first = len(self.active_positions)
            self.numbers[span.start : span.stop] = range(first, first + len(span))
            self.active_positions.extend(span)
        self._add_reserves(position for position in range(size) if self.numbers[position] < 0)
        self._is_first = True

    @property
    def world_size(self) -> int:
        return len(self.order)

    @property
    def active_world_size(self) -> int:
        return len(self.active_positions)

    def lose(
        self, terminated: Collection[int], world_size_filter: Callable[[int], int] | None = None
    ) -> None:
        """Go on without ranks; the filter maps the number of active ranks to one that is wanted."""
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
        """Count the active ranks below a branch; return their positions in spans, ascending."""
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

    def _add_reserves(self, positions: Iterable[int]) -> None:
        if self._reserve_depth == len(self._layers):
            return
        for position in positions:
            for branch in lineage(self.layout.bottom[position]):
                if branch.depth >= self._reserve_depth:
                    branch.reserves.append(position)

    def _end(self, positions: Iterable[int]) -> dict[int, int]:
        """End ranks, and branches with too few others; return lost numbers by position."""
        levels = self.layout.levels
        touched = [set(level) if self._is_first else set() for level in levels]
        self._is_first = False
        losses: dict[int, int] = {}

        def end(position: int) -> None:
            self.alive[position] = 0
            number = self.numbers[position]
            if number >= 0:
                self.numbers[position] = INACTIVE
                losses[position] = number
            for branch in lineage(self.layout.bottom[position]):
                branch.living -= 1
                branch.active -= number >= 0
                touched[branch.depth].add(branch)

        for position in set(positions):
            end(position)
        for depth in reversed(range(len(levels))):
            least = self._layers[depth].min_ranks
            for branch in [each for each in touched[depth] if 0 < each.living < least]:
                for position in range(branch.start, branch.stop):
                    if self.alive[position]:
                        end(position)
        return dict(sorted(losses.items()))

    def _call_reserves(self, losses: dict[int, int]) -> dict[int, int]:
        """Let reserves take over lost numbers, position by position; return the losses left."""
        pending, left = dict(losses), {}
        for position in losses:
            while position in pending:
                found = self._reserve_for(position)
                if found is None:
                    left[position] = pending.pop(position)
                    break
                for lost, reserve in self._moves(position, *found, pending):
                    self._take(reserve, pending.pop(lost))
        return left

    def _reserve_for(self, position: int) -> tuple[Branch, int] | None:
        for branch in lineage(self.layout.bottom[position]):
            # Above, and on layers without the flag, there are none.
            while branch.reserves:
                if self.is_reserve(branch.reserves[-1]):
                    return branch, branch.reserves[-1]
                branch.reserves.pop()
        return None

    def rank_of(self, position: int) -> int | None:
        """Return the present rank; `None` of one that is lost."""
        return bisect_left(self.order, position) if self.alive[position] else None

    def is_reserve(self, position: int) -> bool:
        """Return whether the rank lives and is not active."""
        return bool(self.alive[position]) and self.numbers[position] < 0

    def _moves(
        self, lost: int, giver: Branch, reserve: int, pending: Container[int]
    ) -> list[tuple[int, int]]:
        """Return pairs of lost positions and the reserves for them, at least one."""
        bottom = self.layout.bottom
        for depth in range(giver.depth + 1, bottom[lost].depth + 1):
            gone = above(bottom[lost], depth)
            idle = above(bottom[reserve], depth)
            if not gone.living and not idle.active:
                return self._pair(gone, idle, pending)
        return [(lost, reserve)]

    def _pair(self, gone: Branch, idle: Branch, pending: Container[int]) -> list[tuple[int, int]]:
        """Pair the positions of a lost branch with those of an idle one, like with like first."""
        pairs = self._same_positions(gone, idle, pending)
        served, taken = {lost for lost, _ in pairs}, {reserve for _, reserve in pairs}
        lost_left = (p for p in range(gone.start, gone.stop) if p in pending and p not in served)
        idle_left = (
            p for p in range(idle.start, idle.stop) if self.is_reserve(p) and p not in taken
        )
        return [*pairs, *zip(lost_left, idle_left, strict=False)]

    def _same_positions(
        self, gone: Branch, idle: Branch, pending: Container[int]
    ) -> list[tuple[int, int]]:
        if gone.children:
            return [
                pair
                for children in zip(gone.children, idle.children, strict=False)
                for pair in self._same_positions(*children, pending)
            ]
        positions = zip(range(gone.start, gone.stop), range(idle.start, idle.stop), strict=False)
        return [pair for pair in positions if pair[0] in pending and self.is_reserve(pair[1])]

    def _take(self, position: int, number: int) -> None:
        self.numbers[position] = number
        self.active_positions[number] = position
        for branch in lineage(self.layout.bottom[position]):
            branch.active += 1

    def _backfill(self, losses: dict[int, int]) -> list[int]:
        """Give lost numbers to the last active ranks; return the numbers that stay free."""
        if self._domain_depth == len(self._layers):
            return list(losses.values())
        domains: dict[Branch, list[int]] = {}
        for position, number in losses.items():
            domain = above(self.layout.bottom[position], self._domain_depth)
            domains.setdefault(domain, []).append(number)
        gaps: list[int] = []
        for domain, lost in domains.items():
            held = [n for n in self.numbers[domain.start : domain.stop] if n >= 0]
            movers = heapq.nlargest(len(lost), held)[::-1]
            lost.sort()
            for number, mover in zip(lost, movers, strict=False):
                position = self.active_positions[mover]
                self.numbers[position] = number
                self.active_positions[number] = position
            gaps += movers + lost[len(movers) :]
        return gaps

    def _close(self, gaps: list[int]) -> None:
        """Close the gaps: later active ranks get smaller numbers."""
        if not gaps:
            return
        for gap in gaps:
            self.active_positions[gap] = INACTIVE
        first = min(gaps)
        moved = [position for position in self.active_positions[first:] if position >= 0]
        self.active_positions[first:] = moved
        for number, position in enumerate(moved, first):
            self.numbers[position] = number

    def _retire(self, wanted: int) -> None:
        """Make reserves of the last active ranks."""
        if not 0 <= wanted <= self.active_world_size:
            raise AssertionError(
                f"world_size_filter must return 0 to {self.active_world_size}, not {wanted!r}"
            )
        retired = sorted(self.active_positions[wanted:])
        del self.active_positions[wanted:]
        for position in retired:
            self.numbers[position] = INACTIVE
            for branch in lineage(self.layout.bottom[position]):
                branch.active -= 1
        self._add_reserves(retired)


class TreeView:
    """A tree, and the state of the rank that looks at it."""

    def __init__(
        self, layers: Sequence[Layer], plan: TreePlan, initial_ranks: Sequence[int]
    ) -> None:
        self.layers = layers
        self.plan = plan
        self.initial_ranks = [initial_ranks[rank] for rank in plan.layout.ranks]
        self.positions = dict(zip(self.initial_ranks, count(), strict=False))
        self.iteration = 0

    def state(self, position: int) -> State:
        """Return where the rank of a position stands; a lost one has no rank."""
        plan = self.plan
        is_alive, number = bool(plan.alive[position]), plan.numbers[position]
        mode = Mode.ACTIVE if number >= 0 else Mode.INACTIVE
        return State(
            rank=plan.rank_of(position),
            world_size=plan.world_size,
            active_rank=None if number < 0 else number,
            active_world_size=plan.active_world_size,
            initial_rank=self.initial_ranks[position],
            initial_world_size=len(self.initial_ranks),
            iteration=self.iteration,
            mode=mode if is_alive else Mode.TERMINATED,
        )


@dataclass(slots=True, unsafe_hash=True, repr=False)
class Leaf:
    """One rank in the tree."""

    _view: TreeView
    _position: int

    @property
    def state(self) -> State:
        """Where the rank stands; a copy."""
        return self._view.state(self._position)

    @property
    def parent(self) -> Node:
        """The branch above."""
        return Node(self._view, self._view.plan.layout.bottom[self._position])

    def __repr__(self) -> str:
        return f"Leaf({self.state!r})"


@dataclass(slots=True, unsafe_hash=True, repr=False)
class Node:
    """One branch of the tree."""

    _view: TreeView
    _branch: Branch

    @property
    def name(self) -> str:
        """The key of the branch."""
        return self._branch.key

    @property
    def layer(self) -> Layer:
        """The user's settings of this branch's layer."""
        return self._view.layers[self._branch.depth]

    @property
    def parent(self) -> Node | None:
        """The branch above; `None` for the root."""
        parent = self._branch.parent
        return None if parent is None else Node(self._view, parent)

    @property
    def children(self) -> tuple[Node | Leaf, ...]:
        """The branches below, or the leaves."""
        if self._branch.children:
            return tuple(Node(self._view, child) for child in self._branch.children)
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
        for position in range(self._branch.start, self._branch.stop):
            yield Leaf(self._view, position)

    def __repr__(self) -> str:
        return f"Node({self.name!r}, {self.living_count} living, {self.active_count} active)"


class LeafMap(Mapping[int, Leaf]):
    """Leaves by number; read only."""

    def __init__(self, view: TreeView, positions: Mapping[int, int]) -> None:
        self._view = view
        self._positions = positions

    def __getitem__(self, number: int) -> Leaf:
        return Leaf(self._view, self._positions[number])

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)
