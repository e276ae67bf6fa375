# SPDX-License-Identifier: Apache-2.0
"""Describe tensors without their data, and find devices by their type."""

from __future__ import annotations

import torch


def get_default_device_from_type(device_type: str) -> torch.device:
    """Return the CPU, or the current CUDA device.

    Args:
        device_type: `"cpu"` or `"cuda"`.

    Raises:
        ValueError: Another type of device.

    Example:
        >>> get_default_device_from_type("cpu")
        device(type='cpu')
    """
    if device_type == "cpu":
        return torch.device("cpu")
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    raise ValueError(f"device type {device_type!r} is not supported; use 'cpu' or 'cuda'")


class TensorPlaceholder:
    """Shape, dtype and device type of a tensor, without its data.

    Args:
        tensor: The tensor to describe.
        same_as: In a hollow state: number of the popped tensor that this one is, when it occurs
            more than once.

    Attributes:
        shape: The shape of the tensor.
        dtype: Its dtype.
        same_as: As given.
    """

    def __init__(self, tensor: torch.Tensor, same_as: int | None = None) -> None:
        # A hollow state is pickled for other ranks: plain fields, and no tensor, travel with it.
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.same_as = same_as
        self._stride = torch.empty_like(tensor, device="meta").stride()
        self._device_type = tensor.device.type

    @property
    def device(self) -> torch.device:
        """The default device of the tensor's device type."""
        return get_default_device_from_type(self._device_type)

    def init_tensor(self) -> torch.Tensor:
        """Return an uninitialised tensor on the current device of the recorded type."""
        return self.empty_like()

    def empty_like(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Return an uninitialised tensor of this shape and dtype; by default on its device.

        Args:
            device: The device; None: the one recorded here.
        """
        where = self.device if device is None else device
        return torch.empty_strided(self.shape, self._stride, dtype=self.dtype, device=where)

    def restore(self, data: torch.Tensor | None = None) -> torch.Tensor:
        """Return `data`, moved to the tensor's device, or an uninitialised tensor.

        Raises:
            AssertionError: Shape or dtype of the data differ from those of the tensor.
        """
        if data is None:
            return self.empty_like()
        if data.shape != self.shape or data.dtype != self.dtype:
            raise AssertionError(
                f"expected {tuple(self.shape)} {self.dtype}, got {tuple(data.shape)} {data.dtype}"
            )
        return data.to(self.device)
