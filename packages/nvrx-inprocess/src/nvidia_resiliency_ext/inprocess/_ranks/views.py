# SPDX-License-Identifier: Apache-2.0
"""The tree to look at: nodes, leaves and states, made when somebody looks. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.inprocess.state import Mode, State

from .layout import Branch, Layer
from .tree import TreePlan

if TYPE_CHECKING:
    from collections.abc import Sequence


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
