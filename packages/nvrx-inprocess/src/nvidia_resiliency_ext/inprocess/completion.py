# SPDX-License-Identifier: Apache-2.0
"""The base class of what runs after success."""

from __future__ import annotations

import abc

from .state import FrozenState

__all__ = ["Completion"]


class Completion(abc.ABC):
    """Called once on each rank when the function has completed; what it raises is logged."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Do it, and return the state."""
        raise NotImplementedError
