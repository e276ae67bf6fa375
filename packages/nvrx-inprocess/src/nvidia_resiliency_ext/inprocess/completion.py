# SPDX-License-Identifier: Apache-2.0
"""The base class of callbacks after success."""

from __future__ import annotations

import abc

from .state import FrozenState

__all__ = ["Completion"]


class Completion(abc.ABC):
    """Called once on each rank when the function has completed; exceptions are only logged.

    Example:
        >>> from nvidia_resiliency_ext.inprocess.completion import Completion
        >>> class SayDone(Completion):
        ...     def __call__(self, state):
        ...         print(f"rank {state.rank}: done after {state.iteration} restarts")
        ...         return state
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Run after success, and return `state` unchanged; subclasses implement it."""
        raise NotImplementedError
