# SPDX-License-Identifier: Apache-2.0
"""Kernel timing as the detector uses it: whether it is possible, on or off, and what it found."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from nvidia_resiliency_ext.attribution.straggler._errors import CuptiUnavailableError
from nvidia_resiliency_ext.attribution.straggler.cupti import CuptiManager
from nvidia_resiliency_ext.attribution.straggler.statistics import SummaryTable

MODES = ("auto", "require", "off")
"""Values of `cuda_profiling`."""

_SAMPLES_PER_KERNEL = 8192

logger = logging.getLogger("nvrx")


class KernelCapture:
    """Switches kernel capture on and off around entries, and steps aside for torch.profiler.

    CUPTI serves one client: while torch.profiler runs, entries go without kernel timing and are
    counted; the first entry afterwards takes CUPTI back.

    Attributes:
        manager: The shared profiler.
        skipped_entries: Entries of this window that went without because of torch.profiler.
    """

    def __init__(self, manager: CuptiManager) -> None:
        self.manager = manager
        self.skipped_entries = 0
        self._failure = ""
        self._has_lost_callbacks = False

    @property
    def status(self) -> str:
        """`ok`, or why kernels are not timed at present."""
        if self._failure:
            return f"unavailable: {self._failure}"
        return "paused: torch.profiler" if self.skipped_entries else "ok"

    def start(self) -> bool:
        """Switch capture on; False when this entry goes without."""
        if getattr(torch_profiler, "_is_profiler_enabled", False):
            self.skipped_entries += 1
            self._has_lost_callbacks = True
            return False
        if self._failure:
            return False
        try:
            if self._has_lost_callbacks:
                self._has_lost_callbacks = False
                # torch.profiler has put its own in their place.
                self.manager.cupti_ext.register_callbacks()
            self.manager.start_profiling()
        except RuntimeError as error:
            self._fail(error)
            return False
        return True

    def stop(self) -> None:
        """Undo one `start` of kernel profiling."""
        try:
            self.manager.stop_profiling()
        except RuntimeError as error:
            self._fail(error)

    def collect(self) -> tuple[SummaryTable, int]:
        """Return the summaries of the window and how many records were dropped; begin anew."""
        skipped, self.skipped_entries = self.skipped_entries, 0
        if self._failure:
            return kernel_table({}), 0
        try:
            results = self.manager.get_results()
            dropped = self.manager.cupti_ext.dropped_records
            self.manager.reset_results()
        except RuntimeError as error:
            self._fail(error)
            return kernel_table({}), 0
        if skipped:
            logger.info("%d straggler sections ran under torch.profiler, kernels untimed", skipped)
        if dropped:
            logger.warning("CUPTI dropped %d kernel records since the last report", dropped)
        return kernel_table(results), dropped

    def close(self) -> None:
        """Release CUPTI."""
        try:
            self.manager.shutdown()
        except RuntimeError as error:
            logger.warning("straggler: CUPTI could not be released: %s", error)

    def _fail(self, error: RuntimeError) -> None:
        if not self._failure:
            self._failure = str(error)
            logger.warning("straggler: GPU kernels are no longer timed: %s", error)


def open_capture(mode: str) -> tuple[KernelCapture | None, str]:
    """Return kernel timing, or None and the status that says why there is none.

    Args:
        mode: `auto`: a warning where it is impossible; `require`: an error; `off`.

    Raises:
        CuptiUnavailableError: It is impossible, and required.
    """
    if mode == "off":
        return None, "off"
    manager, why = _claim()
    if manager is not None:
        return KernelCapture(manager), "ok"
    if mode == "require":
        raise CuptiUnavailableError(f"GPU kernels cannot be timed: {why}")
    logger.warning("straggler: sections are timed, GPU kernels are not: %s", why)
    return None, f"unavailable: {why}"


def _claim() -> tuple[CuptiManager | None, str]:
    """Return the profiler, or None and why there is none; no error keeps a failed one alive."""
    try:
        manager = CuptiManager(statsMaxLenPerKernel=_SAMPLES_PER_KERNEL)
        manager.initialize()
    except ImportError as error:
        return None, f"the extension nvrx_cupti_module is not installed ({error})"
    except RuntimeError as error:
        has_gpu = torch.cuda.is_available()
        return None, str(error) if has_gpu else f"torch finds no GPU ({error})"
    return manager, ""


def kernel_table(results: Mapping[str, Any]) -> SummaryTable:
    """Return the extension's statistics as a table, times in us."""
    stats = results.values()
    rows = [(s.min, s.max, s.median, s.avg, s.stddev, s.num_calls) for s in stats]
    return SummaryTable(list(results), rows, [s.total_time_us for s in stats])


def synchronize() -> None:
    """Wait for the kernels of the current device, if this process uses one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
