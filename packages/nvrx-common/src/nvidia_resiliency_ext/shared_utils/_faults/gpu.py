# SPDX-License-Identifier: Apache-2.0
"""Faults of the GPU. torch is imported when one of them is dispatched, and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .actions import Action, Plain, refusal

if TYPE_CHECKING:
    import threading

__all__ = ["exhaust_gpu_memory", "gpu_assert", "gpu_spin", "gpu_spin_on"]

_FOR_EVER_CYCLES = 1 << 62
_FAR_OUTSIDE = 1 << 40
_LARGEST_BLOCK = 1 << 30
_SMALLEST_BLOCK = 1 << 20


def gpu_assert(due: float, has_callback: bool) -> Action:
    """Prepare an index far outside of its tensor, which the device asserts against."""
    del due, has_callback
    torch, device = _current_device("GPU_ERROR")

    def act(stop: threading.Event) -> None:
        del stop
        with torch.cuda.device(device):
            values = torch.zeros(1, device=device)
            values[torch.full((1,), _FAR_OUTSIDE, dtype=torch.int64, device=device)]

    return Plain(act)


def gpu_spin(due: float, has_callback: bool) -> Action:
    """Prepare a kernel without end on the device that is current now."""
    del due, has_callback
    torch, device = _current_device("GPU_SLEEP")
    return gpu_spin_on(torch, device)


def gpu_spin_on(torch: Any, device: Any) -> Action:
    """Return the action that starts the kernel on the given device."""

    def act(stop: threading.Event) -> None:
        del stop
        with torch.cuda.device(device):
            # The same thread's default stream blocks the other streams of the device.
            torch.cuda._sleep(_FOR_EVER_CYCLES)  # noqa: SLF001 - torch has no other one

    return Plain(act)


def exhaust_gpu_memory(due: float, has_callback: bool) -> Action:
    """Prepare to take the memory of the current device until there is none."""
    del due, has_callback
    torch, device = _current_device("OOM_GPU")

    def act(stop: threading.Event) -> None:
        taken: list[Any] = []
        size = _LARGEST_BLOCK
        while size >= _SMALLEST_BLOCK and not stop.is_set():
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device=device))
            except torch.cuda.OutOfMemoryError:
                size //= 2
        stop.wait()
        taken.clear()

    return Plain(act)


def require_cuda(fault: str) -> Any:
    """Return torch, with CUDA.

    Raises:
        RuntimeError: torch is missing or sees no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise refusal(fault, f"torch cannot be imported ({error})") from error
    if not torch.cuda.is_available():
        raise refusal(fault, "CUDA is not available here")
    return torch


def _current_device(fault: str) -> tuple[Any, int]:
    torch = require_cuda(fault)
    return torch, torch.cuda.current_device()
