# SPDX-License-Identifier: Apache-2.0
"""The base class of what runs on a rank that leaves."""

from __future__ import annotations

import abc

from .state import FrozenState

__all__ = ["Terminate"]


class Terminate(abc.ABC):
    """Called once on a rank that leaves the wrapper with an exception."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Do it, and return the state."""
        raise NotImplementedError
