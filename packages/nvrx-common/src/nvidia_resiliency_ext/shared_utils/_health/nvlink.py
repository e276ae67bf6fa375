# SPDX-License-Identifier: Apache-2.0
"""NVLink: links that are down, error counters, and their growth in a window."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from .check import Finding
from .devices import DeviceCheck, ask, device_label
from .nvml import UNSUPPORTED, NvmlCallError

# Field ids, with the port as scope: recovery events, PLR retry blocks, receive errors.
_SCOPED_FIELDS = {"recovery_events": 215, "plr_retry_blocks": 295, "receive_errors": 208}
# Field ids of port 0; the ids of ports 1 to 5 follow.
_LANE_FIELDS = {"lane_replay": 46, "lane_recovery": 53}
_LANE_PORTS = 6
_DL_COUNTERS = {"dl_replay": 0, "dl_recovery": 1}

Counters = dict[str, int]
_MAX_LINKS = 36
_COUNT_FIELD = 91  # NVML_FI_DEV_NVLINK_LINK_COUNT


def _scoped(device: int | str, port: int) -> Counters | None:
    return _fields(device, {name: [number, port] for name, number in _SCOPED_FIELDS.items()})


def _per_lane(device: int | str, port: int) -> Counters | None:
    if port >= _LANE_PORTS:
        return {}
    return _fields(device, {name: [base + port, 0] for name, base in _LANE_FIELDS.items()})


def _fields(device: int | str, wanted: dict[str, list[int]]) -> Counters | None:
    """Return the readable counters: none when unsupported, `None` when reading failed for now."""
    try:
        values = ask("fields", device, list(wanted.values()))
    except NvmlCallError as error:
        if error.is_unsupported:
            return {}
        raise
    found = {name: value for name, (code, value) in zip(wanted, values, strict=True) if code == 0}
    if not found and any(code not in UNSUPPORTED for code, _ in values):
        return None
    return found


def _data_link(device: int | str, port: int) -> Counters | None:
    found: Counters = {}
    has_failed = False
    for name, counter in _DL_COUNTERS.items():
        try:
            found[name] = ask("link_error_counter", device, port, counter)
        except NvmlCallError as error:
            has_failed = has_failed or error.code not in UNSUPPORTED
    return None if has_failed and not found else found


_METHODS: tuple[Callable[[int | str, int], Counters | None], ...] = (_scoped, _per_lane, _data_link)


class Port:
    """One NVLink port: its last counters, and which of its last windows were flagged."""

    def __init__(self, device: int | str, number: int, window_count: int) -> None:
        self.device = device
        self.number = number
        self.counters: Counters = {}
        self.windows: deque[bool] = deque(maxlen=max(1, window_count))
        self._methods = _METHODS

    def add(self, counters: Counters) -> None:
        """Take the counters of now; none at all is a failed read, which is no window."""
        if not counters:
            return
        before, self.counters = self.counters, counters
        if before:
            self.windows.append(any(now > before.get(name, now) for name, now in counters.items()))

    def read(self) -> Counters:
        """Read by the first method that works, from then on by that one only."""
        is_absent = len(self._methods) > 1
        for method in self._methods:
            counters = method(self.device, self.number)
            if counters:
                self._methods = (method,)
                return counters
            is_absent = is_absent and counters is not None
        if is_absent:
            self._methods = ()
        return {}


def link_count(device: int | str) -> int:
    """Return how many links a GPU has, or how many any may have where it does not tell."""
    try:
        code, value = ask("fields", device, [[_COUNT_FIELD, 0]])[0]
    except NvmlCallError as error:
        if not error.is_unsupported:
            raise
        return _MAX_LINKS
    return min(value, _MAX_LINKS) if code == 0 else _MAX_LINKS


class NVLHealthCheck(DeviceCheck):
    """Is every NVLink of the GPUs enabled?"""

    name = "nvlink"

    def _examine_devices(self, devices: list[int | str]) -> Finding:
        problems: list[str] = []
        evidence: dict[str, dict[str, str]] = {}
        for device in devices:
            label = device_label(device)
            states = evidence.setdefault(label, {})
            try:
                for link in range(link_count(device)):
                    state = _state(device, link)
                    if state is not None:
                        states[str(link)] = state
            except NvmlCallError as error:
                problems.append(f"{label}: {error}")
                continue
            disabled = [link for link, state in states.items() if state == "disabled"]
            if disabled:
                problems.append(f"{label}: links {', '.join(disabled)} are disabled")
        if problems:
            return Finding("unhealthy", "; ".join(problems), evidence)
        if not any(evidence.values()):
            return Finding("skipped", "no NVLink is there", evidence)
        return Finding("healthy", evidence=evidence)


def _state(device: int | str, link: int) -> str | None:
    try:
        return "up" if ask("link_state", device, link) else "disabled"
    except NvmlCallError as error:
        # A link beyond the last one is an invalid argument, once the device itself was found.
        if error.code in UNSUPPORTED:
            return None
        raise


class NVLinkWindowHealthCheck(DeviceCheck):
    """Do error counters of NVLink ports grow in too many of the last looks?

    The first look only takes the counters; each one after it is a window.

    Args:
        device_index, interval, on_failure: As for `DeviceCheck`.
        window_count: How many windows are evaluated together.
        threshold: A port is bad when its counters grew in more windows than this.
        gpu_ports_threshold: A GPU is unhealthy from this many bad ports on.
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
        super().__init__(device_index, interval, on_failure)
        self.window_count = window_count
        self.threshold = threshold
        self.gpu_ports_threshold = gpu_ports_threshold
        self._ports: dict[int | str, list[Port]] = {}

    def _examine_devices(self, devices: list[int | str]) -> Finding:
        lost = [device for device in self._ports if device not in devices]
        problems = [f"{device_label(device)} has vanished" for device in lost]
        has_data = False
        for device in devices:
            try:
                has_data = self._look(device) or has_data
            except NvmlCallError as error:
                if device in self._ports or not error.is_unsupported:
                    problems.append(f"{device_label(device)}: {error}")
        problems += self._bad_gpus()
        evidence: dict[str, Any] = {"flagged_windows": self._flagged_windows()}
        if problems:
            return Finding("unhealthy", "; ".join(problems), evidence, tuple(problems))
        if not has_data:
            return Finding("skipped", "no NVLink counters are there")
        return Finding("healthy", evidence=evidence)

    def _look(self, device: int | str) -> bool:
        if device not in self._ports:
            numbers = range(link_count(device))
            self._ports[device] = [Port(device, number, self.window_count) for number in numbers]
        has_data = False
        for port in self._ports[device]:
            counters = port.read()
            port.add(counters)
            has_data = has_data or bool(counters)
        return has_data

    def _bad_gpus(self) -> list[str]:
        """Return a line for each GPU with too many ports that have too many flagged windows."""
        problems = []
        for device, ports in self._ports.items():
            bad = [port for port in ports if port.counters and sum(port.windows) > self.threshold]
            if bad and len(bad) >= self.gpu_ports_threshold:
                numbers = ", ".join(str(port.number) for port in bad)
                problems.append(
                    f"{device_label(device)}: error counters of NVLink ports {numbers} grew in more"
                    f" than {self.threshold} of the last {self.window_count} windows"
                )
        return problems

    def _flagged_windows(self) -> dict[str, dict[str, int]]:
        """Return the number of flagged windows of each port that has any, as evidence."""
        found: dict[str, dict[str, int]] = {}
        for device, ports in self._ports.items():
            own = {str(port.number): sum(port.windows) for port in ports if any(port.windows)}
            if own:
                found[device_label(device)] = own
        return found
