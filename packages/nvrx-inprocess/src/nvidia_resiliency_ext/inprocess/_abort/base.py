# SPDX-License-Identifier: Apache-2.0
"""The base class of what unblocks a main thread."""

from __future__ import annotations

import abc

from nvidia_resiliency_ext.inprocess.state import FrozenState

__all__ = ["Abort"]


class Abort(abc.ABC):
    """Called on a helper thread after an interruption; it must unblock the main thread."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Unblock the main thread of this rank; subclasses implement it.

        Args:
            state: The rank's state when the fault was seen.

        Returns:
            The state, unchanged.
        """
        raise NotImplementedError
