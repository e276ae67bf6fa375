# SPDX-License-Identifier: Apache-2.0
"""Older names for choosing active ranks; `rank_assignment` has the current ones."""

from __future__ import annotations

import abc
import warnings
from typing import Any

from . import rank_assignment
from .state import State

__all__ = ["ActiveWorldSizeDivisibleBy", "MaxActiveWorldSize", "RankFilter", "WorldSizeDivisibleBy"]


class RankFilter(abc.ABC):
    """Deprecated: chooses active ranks, by changing the state that it is called with."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        """Make the filter, with a warning."""
        message = f"rank_filter.{cls.__name__} is deprecated: use nvidia_resiliency_ext.inprocess."
        warnings.warn(f"{message}rank_assignment", DeprecationWarning, stacklevel=2)
        return super().__new__(cls)

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Set mode, active rank and active world size of `state`; subclasses implement it."""
        raise NotImplementedError


class MaxActiveWorldSize(RankFilter):
    """Deprecated: limit the number of active ranks.

    Args:
        max_active_world_size: The limit; `None` for none.

    Raises:
        ValueError: It is less than 1.

    Example:
        >>> from nvidia_resiliency_ext.inprocess.rank_filter import MaxActiveWorldSize
        >>> from nvidia_resiliency_ext.inprocess.state import State
        >>> state = MaxActiveWorldSize(4)(State(rank=5, world_size=8))
        >>> state.active_rank is None, state.active_world_size
        (True, 4)
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self._present = rank_assignment.MaxActiveWorldSize(max_active_world_size)
        self.max_active_world_size = max_active_world_size

    def __call__(self, state: State) -> State:
        """Activate the first ranks: change `state`, and return it."""
        return _apply(self._present, state)


class ActiveWorldSizeDivisibleBy(RankFilter):
    """Deprecated: the number of active ranks is a multiple of a divisor.

    Args:
        divisor: The divisor.

    Raises:
        ValueError: It is less than 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        self._present = rank_assignment.ActiveWorldSizeDivisibleBy(divisor)
        self.divisor = divisor

    def __call__(self, state: State) -> State:
        """Activate the first ranks: change `state`, and return it."""
        return _apply(self._present, state)


class WorldSizeDivisibleBy(ActiveWorldSizeDivisibleBy):
    """Deprecated: the same as `ActiveWorldSizeDivisibleBy`."""


def _apply(present: rank_assignment.RankFilter, state: State) -> State:
    """Apply a filter of the present kind to a state."""
    ctx = present(rank_assignment.RankAssignmentCtx(state, None, set()))
    state.copy_from(ctx.state)
    return state
