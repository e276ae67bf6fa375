# SPDX-License-Identifier: Apache-2.0
"""Older names for choosing active ranks; `rank_assignment` has the present ones."""

from __future__ import annotations

import abc
import warnings
from typing import Any

from ._checks import check_integer
from ._ranks.activate import clamp_active, round_down
from .state import Mode, State

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
        """Set mode, active rank and active world size, and return the state."""
        raise NotImplementedError


class MaxActiveWorldSize(RankFilter):
    """Deprecated: at most so many ranks are active.

    Args:
        max_active_world_size: The limit; `None` for none.

    Raises:
        ValueError: It is less than 1.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        if max_active_world_size is not None:
            check_integer("max_active_world_size", max_active_world_size, least=1)
        self.max_active_world_size = max_active_world_size

    def __call__(self, state: State) -> State:
        """Activate the first ranks, and return the state."""
        active = clamp_active(state.world_size, state.active_world_size, self.max_active_world_size)
        return _activate(state, active)


class ActiveWorldSizeDivisibleBy(RankFilter):
    """Deprecated: as many ranks are active as make a multiple of a number.

    Args:
        divisor: The number.

    Raises:
        ValueError: It is less than 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        check_integer("divisor", divisor, least=1)
        self.divisor = divisor

    def __call__(self, state: State) -> State:
        """Activate the first ranks, and return the state."""
        return _activate(state, round_down(state.world_size, state.active_world_size, self.divisor))


class WorldSizeDivisibleBy(ActiveWorldSizeDivisibleBy):
    """Deprecated: the same as `ActiveWorldSizeDivisibleBy`."""


def _activate(state: State, active_world_size: int) -> State:
    is_active = state.rank is not None and state.rank < active_world_size
    state.mode = Mode.ACTIVE if is_active else Mode.INACTIVE
    state.active_rank = state.rank if is_active else None
    state.active_world_size = active_world_size
    return state
