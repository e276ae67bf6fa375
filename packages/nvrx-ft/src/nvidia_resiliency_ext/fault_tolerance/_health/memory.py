# SPDX-License-Identifier: Apache-2.0
"""Waits until stopped workers have given the memory of their GPUs back; in a thread, as it blocks.

A process that was killed gives it back a little later: new workers would run out of memory before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._core.infra import has_gpu_driver
from nvidia_resiliency_ext.fault_tolerance._core.local_world import count_gpus, count_visible
from nvidia_resiliency_ext.shared_utils import health_check
from nvidia_resiliency_ext.shared_utils.clock import Clock

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig

logger = logging.getLogger("nvrx")


class GpuMemory:
    """How much memory of this node's workers' GPUs is in use. It may block; one thread only."""

    def __init__(
        self, nproc: int, environ: Mapping[str, str], config: FaultToleranceConfig
    ) -> None:
        self._nproc = nproc
        self._environ = environ
        self._config = config
        self._is_silent = False

    def ranks(self) -> Sequence[int]:
        """Return the local ranks that have a GPU."""
        if not has_gpu_driver():
            return ()
        present = len(health_check.PynvmlMixin().get_gpu_pci_mapping())
        if present == 0 and count_gpus(self._environ):
            self._say_unknown("the driver does not tell which GPUs there are")
        return range(min(self._nproc, count_visible(self._environ, present)))

    def used_mb(self, ranks: Sequence[int]) -> dict[int, float] | None:
        """Return the megabytes in use by local rank, or None when the driver does not say."""
        from nvidia_resiliency_ext.shared_utils.memory import GPUMemoryLogger

        used: dict[int, float] = {}
        for rank in ranks:
            found = GPUMemoryLogger().get_gpu_memory(device_index=rank)
            if found is None:
                self._say_unknown(f"the GPU of local rank {rank} cannot be read")
                return None
            used[rank] = found["used_mb"]
        return used

    def _say_unknown(self, why: str) -> None:
        if not self._is_silent:
            self._is_silent = True
            logger.warning("restarts do not wait for GPU memory, it is unknown: %s", why)

    def wait(self, clock: Clock, stopped: threading.Event) -> float | None:
        """Wait until the memory is free; return the seconds, None where there is no such memory."""
        config, ranks = self._config, self.ranks()
        if not ranks:
            return None
        began = clock.monotonic()
        while True:
            used = self.used_mb(ranks)
            if used is None:
                return None
            tolerated_mb = config.gpu_memory_tolerance_mb
            waiting_for = {rank: mb for rank, mb in used.items() if mb > tolerated_mb}
            waited_s = clock.monotonic() - began
            if not waiting_for:
                return waited_s
            left_s = config.gpu_memory_reclaim_timeout - waited_s
            if left_s <= 0:
                which = ", ".join(f"rank {rank}: {mb:.0f} MB" for rank, mb in waiting_for.items())
                logger.error(
                    "GPU memory is still in use after %.0f s (%s; %.0f MB are tolerated): "
                    "the workers start all the same",
                    *(waited_s, which, tolerated_mb),
                )
                return waited_s
            if stopped.wait(min(config.gpu_memory_poll_interval, left_s)):
                return waited_s
