# SPDX-License-Identifier: Apache-2.0
"""Read the used memory of a GPU from the driver; never raises."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["GPUMemoryLogger"]

logger = logging.getLogger("nvrx")

_MIB = float(1 << 20)


class GPUMemoryLogger:
    """Asks the driver for the memory of a GPU; one object per process.

    Example:
        >>> GPUMemoryLogger().get_gpu_memory(device_index=0)  # without a driver
    """

    def __new__(cls) -> GPUMemoryLogger:  # noqa: PYI034 - Self is newer than Python 3.10
        """Return the one object."""
        return _the_one

    def get_gpu_memory(
        self, device_index: int | None = None, log_memory: bool = False, context: str = ""
    ) -> dict[str, float] | None:
        """Return `total_mb`, `used_mb` and `free_mb` (of 2**20 bytes); `None` when unknown.

        What the driver reserves for itself is not counted as used.

        Args:
            device_index: Local rank, counted within CUDA_VISIBLE_DEVICES; default ``LOCAL_RANK``.
            log_memory: Log them too.
            context: Text before the values in the log line.
        """
        from ._health.check import count_of

        rank = count_of("LOCAL_RANK") if device_index is None else device_index
        if rank is None:
            logger.error("GPU memory is asked for without device_index, and LOCAL_RANK is not set")
            return None
        found = _ask(rank)
        if found is None:
            return None
        total, used, free = (int(value) / _MIB for value in found)
        if log_memory:
            text = "%sGPU %d memory: %.0f MB used of %.0f MB, %.0f MB free"
            logger.info(text, f"{context}: " if context else "", rank, used, total, free)
        return {"total_mb": total, "used_mb": used, "free_mb": free}


def _ask(rank: int) -> Any:
    from ._health.check import log_once
    from ._health.devices import ask, resolve_device
    from ._health.nvml import NvmlError, NvmlUnavailableError

    try:
        device = resolve_device(rank)
        return None if device is None else ask("memory", device)
    except NvmlUnavailableError as error:
        log_once("memory", logging.WARNING, f"GPU memory cannot be told: {error}")
    except NvmlError as error:
        logger.warning("memory of GPU %d cannot be told: %s", rank, error)
    return None


# Made here, so that two threads cannot make two.
_the_one = object.__new__(GPUMemoryLogger)
