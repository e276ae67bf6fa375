# SPDX-License-Identifier: Apache-2.0
"""Rank assignment: which ranks continue after a restart, their numbers, and the active ranks.

Each class is called with a `RankAssignmentCtx` on every surviving rank, makes the same decision on
all of them, and changes the context for the calling rank. The decisions are made in `_ranks`; a
rank that is not in the result raises `RankDiscarded`.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from nvidia_resiliency_ext.inprocess._inputs import check_callable, check_duration, check_integer
from nvidia_resiliency_ext.inprocess._ranks import gather
from nvidia_resiliency_ext.inprocess._ranks.layout import (
    Layer,
    LayerFlag,
    Layout,
    clamp_active,
    failing,
    fill,
    round_down,
    shift,
)
from nvidia_resiliency_ext.inprocess._ranks.tree import LeafMap, Node, TreePlan, TreeView
from nvidia_resiliency_ext.inprocess.exception import InternalError, RestartError
from nvidia_resiliency_ext.inprocess.state import Mode, State

__all__ = [
    "ActivateAllRanks",
    "ActiveWorldSizeDivisibleBy",
    "FillGaps",
    "FilterCountGroupedByKey",
    "FilterGroupedByKey",
    "Layer",
    "LayerFlag",
    "MaxActiveWorldSize",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "RankFilter",
    "ShiftRanks",
    "Tree",
]

logger = logging.getLogger("nvrx")

# Ranks build the tree right after the initial barrier.
_TREE_TIMEOUT = timedelta(seconds=120)


class RankDiscarded(RestartError):  # noqa: N818 - the name that users catch
    """This rank takes no part in the next iteration: it leaves the wrapper, the others continue."""


@dataclass
class RankAssignmentCtx:
    """Argument and result of a rank assignment.

    Attributes:
        state: State of the calling rank.
        store: The store of the call.
        terminated_ranks: Ranks that do not continue, in the numbering of the state.
    """

    state: State
    store: Any
    terminated_ranks: set[int]


class RankAssignment(abc.ABC):
    """Base of all rank assignments.

    Example:
        >>> from nvidia_resiliency_ext.inprocess import Compose
        >>> from nvidia_resiliency_ext.inprocess.rank_assignment import (
        ...     MaxActiveWorldSize, ShiftRanks)
        >>> # 4 of the ranks train, the others are reserves.
        >>> assignment = Compose(MaxActiveWorldSize(4), ShiftRanks())
    """

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with new state and terminated ranks, or raise `RankDiscarded` to leave."""
        raise NotImplementedError


class RankFilter(RankAssignment):
    """Base of rank assignments that choose ranks but do not renumber them."""


class _Renumber(RankAssignment):
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Renumber the rank of `ctx.state`; `RankDiscarded` if it is terminated."""
        old = _rank_of(ctx.state)
        rank, world_size = self._renumber(old, ctx.state.world_size, ctx.terminated_ranks)
        if rank is None:
            raise RankDiscarded(f"rank {old} was terminated")
        if rank != old:
            moved = (old, ctx.state.world_size, rank, world_size)
            logger.info("rank %d of %d is now %d of %d", *moved)
        ctx.state = dataclasses.replace(
            ctx.state,
            rank=rank,
            world_size=world_size,
            mode=Mode.INITIALIZED,
            active_rank=None,
            active_world_size=None,
        )
        ctx.terminated_ranks = set()
        return ctx

    @staticmethod
    @abc.abstractmethod
    def _renumber(
        rank: int, world_size: int, terminated: Collection[int]
    ) -> tuple[int | None, int]: ...


class ShiftRanks(_Renumber):
    """Survivors keep their order and move up: of 8 without {1, 4, 5}, 2, 3, 6, 7 become 1 to 4."""

    _renumber = staticmethod(shift)


class FillGaps(_Renumber):
    """Survivors keep their number if possible; the last ones take the free numbers, ascending.

    Of 8 without {1, 4, 5}: 0, 2 and 3 stay, 6 becomes 1 and 7 becomes 4.
    """

    _renumber = staticmethod(fill)


class ActivateAllRanks(RankFilter):
    """Every rank is active."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Activate the rank of `ctx.state`."""
        return _activate(ctx, ctx.state.world_size)


class MaxActiveWorldSize(RankFilter):
    """Activate at most this number of ranks, the first ones; the others are reserve ranks.

    Args:
        max_active_world_size: The limit; `None` for none.

    Raises:
        ValueError: It is less than 1.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        if max_active_world_size is not None:
            check_integer("max_active_world_size", max_active_world_size, least=1)
        self.max_active_world_size = max_active_world_size

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Activate the rank of `ctx.state`, or make it a reserve."""
        state = ctx.state
        limit = self.max_active_world_size
        return _activate(ctx, clamp_active(state.world_size, state.active_world_size, limit))


class ActiveWorldSizeDivisibleBy(RankFilter):
    """Activate a number of ranks that is a multiple of a divisor; the others are reserve ranks.

    Args:
        divisor: The divisor.

    Raises:
        ValueError: It is less than 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        check_integer("divisor", divisor, least=1)
        self.divisor = divisor

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Activate the rank of `ctx.state`, or make it a reserve."""
        state = ctx.state
        return _activate(ctx, round_down(state.world_size, state.active_world_size, self.divisor))


class FilterCountGroupedByKey(RankFilter):
    """Terminate the ranks of groups with a wrong size; a renumbering step must follow.

    All surviving ranks call it together and exchange their keys through the store.

    Args:
        key_or_fn: The key of the group, or a function of the rank's `State` that returns it.
        condition: Called with the number of surviving ranks of a group; the group stays if true.
        timeout: How long ranks wait for each other, a `timedelta` of at least 0; default: 60 s.

    Raises:
        TypeError: An argument has another type.
    """

    def __init__(
        self,
        key_or_fn: str | Callable[[State], str],
        condition: Callable[[int], bool],
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        if not isinstance(key_or_fn, str) and not callable(key_or_fn):
            raise TypeError(f"key_or_fn must be a str or callable, not {key_or_fn!r}")
        check_callable("condition", condition)
        check_duration("timeout", timeout)
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Add ranks of failing groups to `ctx.terminated_ranks`; all surviving ranks call it."""
        state, terminated = ctx.state, ctx.terminated_ranks
        if _rank_of(state) not in terminated:
            living = [rank for rank in range(state.world_size) if rank not in terminated]
            keys = [_key_of(self.key_or_fn, state)]
            runs = gather.gather(ctx.store, state, keys, living, self.timeout)
            ctx.terminated_ranks = set(terminated) | failing(runs, self.condition)
        return ctx


FilterGroupedByKey = FilterCountGroupedByKey


class Tree(RankAssignment):
    """Arrange ranks in a tree of topology or groups; close reserve ranks replace lost ranks.

    It counts, activates, replaces and renumbers ranks in one step; do not put it into a `Compose`.
    The guide "Reserve ranks and topology" explains it with examples.

    Args:
        layers: From the root, to which all ranks belong, down to the layer above the ranks.
        world_size_filter: Maps the number of active ranks to the wanted number, which must not be
            larger; the others become reserve ranks.

    Raises:
        ValueError: There are no layers.
        TypeError: An argument has another type.
    """

    def __init__(
        self, layers: list[Layer], world_size_filter: Callable[[int], int] | None = None
    ) -> None:
        if not isinstance(layers, (list, tuple)):
            raise TypeError(f"layers must be a list of Layer objects, not {layers!r}")
        if not layers:
            raise ValueError("a tree needs at least one layer: layers is empty")
        for layer in layers:
            if not isinstance(layer, Layer):
                raise TypeError(f"layers must be Layer objects, not {layer!r}")
            layer.check()
        if world_size_filter is not None:
            check_callable("world_size_filter", world_size_filter)
        self.layers = list(layers)
        self.world_size_filter = world_size_filter
        self._view: TreeView | None = None
        self._store: weakref.ref[Any] | None = None

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Remove `ctx.terminated_ranks` from the tree, and renumber the rank of `ctx.state`.

        Raises:
            exception.TimeoutError: In the first call some ranks did not report their keys in time.
        """
        if self._begins(ctx):
            self._view = self._build(ctx.state, ctx.store)
            self._store = _reference(ctx.store)
        view, state = self._drawn(), ctx.state
        plan = view.plan
        plan.lose(ctx.terminated_ranks, self.world_size_filter)
        view.iteration = state.iteration
        position = view.positions.get(-1 if state.initial_rank is None else state.initial_rank)
        if position is None or not plan.alive[position]:
            raise RankDiscarded(
                f"initial rank {state.initial_rank} (was rank {state.rank}) is lost"
            )
        new = view.state(position)
        ctx.state = dataclasses.replace(
            state,
            rank=new.rank,
            world_size=new.world_size,
            mode=new.mode,
            active_rank=new.active_rank,
            active_world_size=new.active_world_size,
        )
        ctx.terminated_ranks = set()
        return ctx

    @property
    def init_rank_map(self) -> LeafMap:
        """Leaves by initial rank, lost ones too; each has a `state`."""
        view = self._drawn()
        return LeafMap(view, view.positions)

    @property
    def rank_map(self) -> LeafMap:
        """Leaves by current rank."""
        view = self._drawn()
        return LeafMap(view, dict(enumerate(view.plan.order)))

    @property
    def tree(self) -> Node:
        """The root."""
        view = self._drawn()
        return Node(view, view.plan.layout.root)

    def _drawn(self) -> TreeView:
        if self._view is None:
            raise InternalError("the tree is built in the first call; there was none")
        return self._view

    def _begins(self, ctx: RankAssignmentCtx) -> bool:
        """Return whether the wrapped function has been called anew.

        The state is then one that no assignment has touched. A program that calls a tree itself
        may pass the first state each time, with losses and the same store: that goes on.
        """
        if self._view is None or self._store is None:
            return True
        if ctx.state.mode is not Mode.INITIALIZED:
            return False
        return not ctx.terminated_ranks or self._store() is not ctx.store

    def _build(self, state: State, store: Any) -> TreeView:
        keys = [_key_of(layer.key_or_fn, state) for layer in self.layers]
        if gather.can_gather(store):
            initial_ranks: Sequence[int] = range(state.world_size)
            if state.rank != state.initial_rank:
                raise InternalError("a Tree gives numbers itself; it stands in no Compose")
            runs = gather.gather(store, state, keys, initial_ranks, _TREE_TIMEOUT)
            layout = Layout(len(self.layers), runs)
        else:
            initial_ranks, all_keys = _exchange(store, state, keys)
            each_keys = (tuple(map(str, keys)) for keys in all_keys)
            layout = Layout(len(self.layers), ((keys, (r,)) for r, keys in enumerate(each_keys)))
        if layout.ranks != list(range(state.world_size)):
            warnings.warn(
                "ranks are not numbered in the depth-first order of the tree; active ranks are",
                UserWarning,
                stacklevel=3,
            )
        return TreeView(self.layers, TreePlan(self.layers, layout), initial_ranks)


def _exchange(
    store: Any, state: State, keys: list[str]
) -> tuple[list[int], Sequence[Iterable[Any]]]:
    """Return all initial ranks and keys by rank, from a store that has the four methods only."""
    rank, ranks = _rank_of(state), list(range(state.world_size))
    store.send_state(state, rank)
    store.send_key(keys, rank)
    states = store.get_states(ranks)
    initial_ranks = [
        each.rank if each.initial_rank is None else each.initial_rank for each in states
    ]
    return initial_ranks, store.get_keys(ranks)


def _activate(ctx: RankAssignmentCtx, active_world_size: int) -> RankAssignmentCtx:
    rank = _rank_of(ctx.state)
    is_active = rank < active_world_size
    ctx.state = dataclasses.replace(
        ctx.state,
        mode=Mode.ACTIVE if is_active else Mode.INACTIVE,
        active_rank=rank if is_active else None,
        active_world_size=active_world_size,
    )
    return ctx


def _key_of(key_or_fn: str | Callable[[State], str], state: State) -> str:
    return str(key_or_fn(state) if callable(key_or_fn) else key_or_fn)


def _rank_of(state: Any) -> int:
    if state.rank is None:
        raise InternalError(f"{state} has no rank")
    return int(state.rank)


def _reference(store: Any) -> weakref.ref[Any] | None:
    # No strong one: a call leaves no store behind.
    try:
        return weakref.ref(store)
    except TypeError:
        return None
