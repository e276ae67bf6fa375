# SPDX-License-Identifier: Apache-2.0
"""The base class of callbacks on a rank that leaves."""

from __future__ import annotations

import abc

from .state import FrozenState

__all__ = ["Terminate"]


class Terminate(abc.ABC):
    """Called once on a rank that leaves the wrapper with an exception.

    Example:
        >>> from nvidia_resiliency_ext.inprocess.terminate import Terminate
        >>> class SayBye(Terminate):
        ...     def __call__(self, state):
        ...         print(f"rank {state.rank} leaves: {state.fn_exception!r}")
        ...         return state
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Run on a rank that leaves, and return `state` unchanged; subclasses implement it."""
        raise NotImplementedError
