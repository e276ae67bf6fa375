# SPDX-License-Identifier: Apache-2.0
"""Callbacks at the start of every iteration: the base class, and the limit of restarts."""

from __future__ import annotations

import abc

from ._inputs import check_integer
from .exception import RestartAbort
from .state import FrozenState

__all__ = ["Initialize", "RetryController"]


class Initialize(abc.ABC):
    """Called on each rank at the start of every iteration, including the first.

    An `Exception` makes all ranks restart, any other exception makes this rank leave.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Prepare the iteration that begins, and return `state`; subclasses implement it."""
        raise NotImplementedError


class RetryController(Initialize):
    """End the job when there were too many restarts or too few ranks are left.

    Args:
        max_iterations: Maximum number of runs of the function; `None` for any number.
        min_world_size: Minimum number of surviving ranks.
        min_active_world_size: Minimum number of ranks that run the function.

    Raises:
        TypeError: An argument is not an integer.

    Example:
        >>> from nvidia_resiliency_ext.inprocess.initialize import RetryController
        >>> initialize = RetryController(max_iterations=10, min_world_size=6)
    """

    def __init__(
        self,
        max_iterations: int | None = None,
        min_world_size: int = 1,
        min_active_world_size: int = 1,
    ) -> None:
        if max_iterations is not None:
            check_integer("max_iterations", max_iterations)
        check_integer("min_world_size", min_world_size)
        check_integer("min_active_world_size", min_active_world_size)
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: FrozenState) -> FrozenState:
        """Check the limits and return `state`; `RestartAbort` where one is exceeded."""
        active = state.world_size if state.active_world_size is None else state.active_world_size
        if (
            state.world_size < self.min_world_size
            or active < self.min_active_world_size
            or (self.max_iterations is not None and state.iteration >= self.max_iterations)
        ):
            raise RestartAbort(
                f"{state.iteration=} {self.max_iterations=} "
                f"{state.world_size=} {self.min_world_size=} "
                f"{state.active_world_size=} {self.min_active_world_size=}"
            )
        return state
