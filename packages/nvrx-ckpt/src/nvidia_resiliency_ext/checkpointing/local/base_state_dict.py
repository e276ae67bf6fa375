# SPDX-License-Identifier: Apache-2.0
"""The interface between a training framework's state and local checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, ValuesView
from typing import Any

import torch

__all__ = ["TensorAwareStateDict"]


class TensorAwareStateDict(ABC):
    """A state that can be split into its tensors and a hollow rest without tensors.

    Subclass it to save a framework's own state with `LocalCheckpointManager`; plain nested
    dicts and lists need no subclass, see `BasicTensorAwareStateDict`. Subclasses may be plain
    classes or dataclasses.

    Example:
        >>> from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
        ...     BasicTensorAwareStateDict)
        >>> state = BasicTensorAwareStateDict({"weight": torch.ones(2)})
        >>> tensors = state.pop_tensors()
        >>> state.is_hollow
        True
        >>> state.insert_tensors(tensors)
    """

    @abstractmethod
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out and return them; the state is hollow afterwards.

        Raises:
            Exception: The state is already hollow.
        """

    @property
    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """Yield the tensors in the order of `pop_tensors`, and leave them in."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Return whether the tensors have been taken out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors into a hollow state, in the order of `pop_tensors`.

        Args:
            tensor_data: As many tensors as `pop_tensors` returned.
        """

    @abstractmethod
    def init_tensors(self) -> None:
        """Fill a hollow state with empty tensors of the recorded shapes, types and devices."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Move the tensors to the CPU and remember the devices that they came from.

        Args:
            non_blocking: Return before the copies have ended; the caller synchronises. Default
                False.
        """

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors back to the devices that `copy_tensors_to_cpu` remembered.

        Args:
            non_blocking: Return before the copies have ended, in the order of the current stream.
                Default True.
        """

    def values(self) -> ValuesView[Any]:
        """Return the values of the object's attributes."""
        return vars(self).values()
