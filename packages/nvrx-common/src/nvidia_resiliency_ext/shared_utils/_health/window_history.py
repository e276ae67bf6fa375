# SPDX-License-Identifier: Apache-2.0
"""Owns the history of NVLink error counters over windows; pure, it reads no hardware.

A window of a port is flagged when any one of its counters grew since its own value one window
before. A counter that appears, vanishes or goes down (a reset) never flags.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PortHistory", "WindowHistory"]

PortKey = tuple[str, int]


class PortHistory:
    """The last windows of one port.

    Args:
        window_count: How many windows are kept.
    """

    def __init__(self, window_count: int) -> None:
        self._previous: Mapping[str, int] | None = None
        self._flags: deque[bool] = deque(maxlen=max(1, window_count))

    @property
    def flagged(self) -> int:
        """How many of the windows kept are flagged."""
        return sum(self._flags)

    @property
    def windows(self) -> int:
        """How many windows are kept so far."""
        return len(self._flags)

    def add(self, counters: Mapping[str, int]) -> None:
        """Take the counters of now; none at all is a failed read, which is no window."""
        if not counters:
            return
        previous, self._previous = self._previous, dict(counters)
        if previous is not None:
            self._flags.append(
                any(value > previous.get(name, value) for name, value in counters.items())
            )


class WindowHistory:
    """The last windows of all ports of all GPUs.

    Args:
        window_count: How many windows are kept per port.
        threshold: A port with more flagged windows than this is bad.
        gpu_ports_threshold: A GPU with this many bad ports is unhealthy.
    """

    def __init__(self, window_count: int, threshold: int, gpu_ports_threshold: int) -> None:
        self._window_count = window_count
        self._threshold = threshold
        self._gpu_ports_threshold = gpu_ports_threshold
        self._ports: dict[PortKey, PortHistory] = {}

    def add(self, gpu: str, port: int, counters: Mapping[str, int]) -> None:
        """Take the counters of one port of one GPU."""
        history = self._ports.get((gpu, port))
        if history is None:
            history = self._ports[gpu, port] = PortHistory(self._window_count)
        history.add(counters)

    def bad_ports(self) -> dict[str, dict[int, int]]:
        """Return, of each unhealthy GPU, its bad ports with their number of flagged windows."""
        bad: dict[str, dict[int, int]] = {}
        for (gpu, port), history in self._ports.items():
            if history.flagged > self._threshold:
                bad.setdefault(gpu, {})[port] = history.flagged
        return {gpu: ports for gpu, ports in bad.items() if len(ports) >= self._gpu_ports_threshold}

    def evidence(self) -> dict[str, dict[str, int]]:
        """Return the flagged windows of each port that has any."""
        found: dict[str, dict[str, int]] = {}
        for (gpu, port), history in self._ports.items():
            if history.flagged:
                found.setdefault(gpu, {})[str(port)] = history.flagged
        return found
