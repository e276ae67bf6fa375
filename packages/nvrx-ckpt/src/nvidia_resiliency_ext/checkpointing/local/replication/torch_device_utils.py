# SPDX-License-Identifier: Apache-2.0
"""Devices by their type, and what stays of a tensor when its data is elsewhere."""

from __future__ import annotations

import torch

__all__ = ["TensorPlaceholder", "get_default_device_from_type"]


def get_default_device_from_type(device_type: str) -> torch.device:
    """Return the CPU, or the current CUDA device.

    Args:
        device_type: `"cpu"` or `"cuda"`.

    Raises:
        ValueError: Another type of device.
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
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._meta = torch.empty_like(tensor, device="meta")
        self._device_type = tensor.device.type

    @property
    def device(self) -> torch.device:
        """Return the default device of the tensor's device type."""
        return get_default_device_from_type(self._device_type)

    def empty_like(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Return an uninitialised tensor of this shape and dtype; by default on its device."""
        return torch.empty_like(self._meta, device=self.device if device is None else device)

    def restore(self, data: torch.Tensor | None = None) -> torch.Tensor:
        """Return `data`, moved to the tensor's device, or an uninitialised tensor.

        Raises:
            AssertionError: Shape or dtype of the data differ from those of the tensor.
        """
        if data is None:
            return self.empty_like()
        if data.shape != self._meta.shape or data.dtype != self._meta.dtype:
            raise AssertionError(
                f"expected {tuple(self._meta.shape)} {self._meta.dtype}, "
                f"got {tuple(data.shape)} {data.dtype}"
            )
        return data.to(self.device)
