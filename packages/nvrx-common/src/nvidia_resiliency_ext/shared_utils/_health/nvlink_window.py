# SPDX-License-Identifier: Apache-2.0
"""Owns the check of NVLink errors over time: each look is one window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .check import PeriodicCheck
from .devices import PynvmlMixin, device_label, selected_devices, whose
from .nvlink import link_count
from .nvlink_counters import CounterReader
from .nvml_errors import NvmlCallError, NvmlError, NvmlUnavailableError
from .result import Finding, healthy, skipped, unhealthy
from .window_history import WindowHistory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["NVLinkWindowHealthCheck"]


class NVLinkWindowHealthCheck(PeriodicCheck, PynvmlMixin):
    """Do error counters of NVLink ports grow in too many of the last looks?

    The first look only takes the counters; each one after it is a window.

    Args:
        device_index: Local rank whose GPU is looked at; `None` looks at all of the node.
        interval: Seconds between two looks of `async_check`.
        window_count: How many windows are judged together.
        threshold: A port is bad when its counters grew in more windows than this.
        gpu_ports_threshold: A GPU is unhealthy from this many bad ports on.
        on_failure: Awaited by `async_check` after an unhealthy look.
    """

    name = "nvlink_window"

    def __init__(
        self,
        device_index: int | None = None,
        interval: float = 60,
        window_count: int = 30,
        threshold: int = 15,
        gpu_ports_threshold: int = 1,
        on_failure: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__(interval, on_failure)
        self.device_index = device_index
        self.window_count = window_count
        self.threshold = threshold
        self.gpu_ports_threshold = gpu_ports_threshold
        self._history = WindowHistory(window_count, threshold, gpu_ports_threshold)
        self._reader = CounterReader()
        self._links: dict[int | str, int] = {}

    @property
    def component(self) -> str:
        """What is looked at."""
        return f"NVLinks of {whose(self.device_index)}"

    def _examine(self) -> Finding:
        problems: list[str] = []
        has_data = False
        try:
            devices = selected_devices(self.device_index)
            lost = [device for device in self._links if device not in devices]
            problems += [f"{device_label(device)} has vanished" for device in lost]
            for device in devices:
                try:
                    has_data = self._look(device) or has_data
                except NvmlCallError as error:
                    if device in self._links or not error.is_unsupported:
                        problems.append(f"{device_label(device)}: {error}")
        except NvmlUnavailableError as error:
            return skipped(str(error))
        except NvmlError as error:
            return unhealthy(str(error))
        problems += [
            f"{gpu}: error counters of NVLink ports {', '.join(map(str, ports))} grew in more than "
            f"{self.threshold} of the last {self.window_count} windows"
            for gpu, ports in self._history.bad_ports().items()
        ]
        evidence: dict[str, Any] = {"flagged_windows": self._history.evidence()}
        if problems:
            return unhealthy("; ".join(problems), evidence, tuple(problems))
        return healthy(evidence=evidence) if has_data else skipped("no NVLink counters are there")

    def _look(self, device: int | str) -> bool:
        if device not in self._links:
            self._links[device] = link_count(device)
        has_data = False
        for port in range(self._links[device]):
            counters = self._reader.read(device, port)
            self._history.add(device_label(device), port, counters)
            has_data = has_data or bool(counters)
        return has_data
