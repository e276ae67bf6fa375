# SPDX-License-Identifier: Apache-2.0
"""NVLink: links that are down, error counters, and their growth in a window."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from .check import Finding
from .devices import DeviceCheck, device_label, session
from .nvml import NvmlCallError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


# Field ids, with the port as scope: recovery events, PLR retry blocks, receive errors.
_SCOPED_FIELDS = {"recovery_events": 215, "plr_retry_blocks": 295, "receive_errors": 208}
_LANE_REPLAY_BASE = 46
_LANE_RECOVERY_BASE = 53
_LANE_PORTS = 6
_DL_COUNTERS = {"dl_replay": 0, "dl_recovery": 1}
_UNSUPPORTED = frozenset({NvmlCallError.INVALID_ARGUMENT, NvmlCallError.NOT_SUPPORTED})

Counters = dict[str, int]


class CounterReader:
    """Remembers per GPU and port which method works, and which ports are not there."""

    def __init__(self) -> None:
        self._methods: dict[tuple[int | str, int], int] = {}
        self._absent: set[tuple[int | str, int]] = set()

    def read(self, device: int | str, port: int) -> Counters:
        """Return the counters by name; none when they cannot be read."""
        key = (device, port)
        if key in self._absent:
            return {}
        known = self._methods.get(key)
        order = range(len(_METHODS)) if known is None else (known,)
        is_absent = known is None
        for number in order:
            counters = _METHODS[number](device, port)
            if counters:
                self._methods[key] = number
                return counters
            is_absent = is_absent and counters is not None
        if is_absent:
            self._absent.add(key)
        return {}


def _scoped(device: int | str, port: int) -> Counters | None:
    wanted = [[number, port] for number in _SCOPED_FIELDS.values()]
    return _fields(device, list(_SCOPED_FIELDS), wanted)


def _per_lane(device: int | str, port: int) -> Counters | None:
    if port >= _LANE_PORTS:
        return {}
    wanted = [[_LANE_REPLAY_BASE + port, 0], [_LANE_RECOVERY_BASE + port, 0]]
    return _fields(device, ["lane_replay", "lane_recovery"], wanted)


def _fields(device: int | str, names: list[str], wanted: list[list[int]]) -> Counters | None:
    """Return what could be read: nothing when unsupported, `None` when it failed for now."""
    try:
        values = session().ask("fields", device, wanted)
    except NvmlCallError as error:
        if error.is_unsupported:
            return {}
        raise
    found = {name: value for name, (code, value) in zip(names, values, strict=True) if code == 0}
    if not found and any(code not in _UNSUPPORTED for code, _ in values):
        return None
    return found


def _data_link(device: int | str, port: int) -> Counters | None:
    found: Counters = {}
    has_failed = False
    for name, counter in _DL_COUNTERS.items():
        try:
            found[name] = session().ask("link_error_counter", device, port, counter)
        except NvmlCallError as error:
            is_unsupported = error.is_unsupported or error.code in _UNSUPPORTED
            has_failed = has_failed or not is_unsupported
    return None if has_failed and not found else found


_METHODS: tuple[Callable[[int | str, int], Counters | None], ...] = (_scoped, _per_lane, _data_link)


class WindowHistory:
    """The last windows of all ports of all GPUs.

    Args:
        window_count: How many windows are kept per port.
        threshold: A port with more flagged windows than this is bad.
        gpu_ports_threshold: A GPU with this many bad ports is unhealthy.
    """

    def __init__(self, window_count: int, threshold: int, gpu_ports_threshold: int) -> None:
        self._window_count = max(1, window_count)
        self._threshold = threshold
        self._gpu_ports_threshold = gpu_ports_threshold
        self._previous: dict[tuple[str, int], Counters] = {}
        self.windows: dict[tuple[str, int], deque[bool]] = {}
        """Of each port, which of its windows are flagged, oldest first."""

    def add(self, gpu: str, port: int, counters: Counters) -> None:
        """Take the counters of now; none at all is a failed read, which is no window."""
        if not counters:
            return
        windows = self.windows.setdefault((gpu, port), deque(maxlen=self._window_count))
        previous = self._previous.get((gpu, port))
        self._previous[gpu, port] = counters
        if previous is not None:
            windows.append(any(now > previous.get(name, now) for name, now in counters.items()))

    def bad_ports(self) -> dict[str, dict[int, int]]:
        """Return, of each unhealthy GPU, its bad ports with their number of flagged windows."""
        bad: dict[str, dict[int, int]] = {}
        for (gpu, port), windows in self.windows.items():
            if sum(windows) > self._threshold:
                bad.setdefault(gpu, {})[port] = sum(windows)
        return {gpu: ports for gpu, ports in bad.items() if len(ports) >= self._gpu_ports_threshold}

    def evidence(self) -> dict[str, dict[str, int]]:
        """Return the flagged windows of each port that has any."""
        found: dict[str, dict[str, int]] = {}
        for (gpu, port), windows in self.windows.items():
            if any(windows):
                found.setdefault(gpu, {})[str(port)] = sum(windows)
        return found


_MAX_LINKS = 36
_COUNT_FIELD = 91  # NVML_FI_DEV_NVLINK_LINK_COUNT


def link_count(device: int | str) -> int:
    """Return how many links a GPU has, or how many any may have where it does not tell."""
    try:
        code, value = session().ask("fields", device, [[_COUNT_FIELD, 0]])[0]
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
        evidence: dict[str, Any] = {}
        for device in devices:
            _look(device, problems, evidence)
        if problems:
            return Finding("unhealthy", "; ".join(problems), evidence)
        if not any(evidence.values()):
            return Finding("skipped", "no NVLink is there", evidence)
        return Finding("healthy", evidence=evidence)


def _look(device: int | str, problems: list[str], evidence: dict[str, Any]) -> None:
    label = device_label(device)
    states: dict[str, str] = {}
    evidence[label] = states
    try:
        for link in range(link_count(device)):
            state = _state(device, link)
            if state is not None:
                states[str(link)] = "up" if state else "disabled"
    except NvmlCallError as error:
        problems.append(f"{label}: {error}")
        return
    disabled = [link for link, state in states.items() if state == "disabled"]
    if disabled:
        problems.append(f"{label}: links {', '.join(disabled)} are disabled")


def _state(device: int | str, link: int) -> int | None:
    try:
        state: int = session().ask("link_state", device, link)
    except NvmlCallError as error:
        # A link beyond the last one is an invalid argument, once the device itself was found.
        if error.is_unsupported or error.code == NvmlCallError.INVALID_ARGUMENT:
            return None
        raise
    return state


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
        self._history = WindowHistory(window_count, threshold, gpu_ports_threshold)
        self._reader = CounterReader()
        self._links: dict[int | str, int] = {}

    def _examine_devices(self, devices: list[int | str]) -> Finding:
        lost = [device for device in self._links if device not in devices]
        problems = [f"{device_label(device)} has vanished" for device in lost]
        has_data = False
        for device in devices:
            try:
                has_data = self._look(device) or has_data
            except NvmlCallError as error:
                if device in self._links or not error.is_unsupported:
                    problems.append(f"{device_label(device)}: {error}")
        problems += [
            f"{gpu}: error counters of NVLink ports {', '.join(map(str, ports))} grew in more than "
            f"{self.threshold} of the last {self.window_count} windows"
            for gpu, ports in self._history.bad_ports().items()
        ]
        evidence: dict[str, Any] = {"flagged_windows": self._history.evidence()}
        if problems:
            return Finding("unhealthy", "; ".join(problems), evidence, tuple(problems))
        if not has_data:
            return Finding("skipped", "no NVLink counters are there")
        return Finding("healthy", evidence=evidence)

    def _look(self, device: int | str) -> bool:
        if device not in self._links:
            self._links[device] = link_count(device)
        has_data = False
        for port in range(self._links[device]):
            counters = self._reader.read(device, port)
            self._history.add(device_label(device), port, counters)
            has_data = has_data or bool(counters)
        return has_data
