# SPDX-License-Identifier: Apache-2.0
"""Network adapters: those near the GPUs, their link counters and their state."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from nvidia_resiliency_ext.shared_utils.abandonable import DeadlineCaller, StuckError
from nvidia_resiliency_ext.shared_utils.console import plain

from . import pci
from .check import Check, Finding, PeriodicCheck
from .devices import PynvmlMixin, resolve_device
from .nvml import NvmlError
from .pci import PciMixin, TopologyError, natural_key, read_topology

WINDOW_S = 60.0  # how long growth is watched before it is compared with a limit per minute anew
_READ_TIMEOUT_S = 10.0
_EVIDENCE = (
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_GONE = "gone"
_LONGEST_STATE = 40

logger = logging.getLogger("nvrx")


def match_nics(
    gpus: Mapping[int, Sequence[str]], nics: Mapping[str, Sequence[str]]
) -> dict[int, str]:
    """Return an adapter for each GPU that has a PCI ancestor in common with one.

    The closest pairs are joined first, each adapter once; GPUs that are left share the closest.
    """
    distances = {
        (gpu, nic): distance
        for gpu, above_gpu in gpus.items()
        for nic, above_nic in nics.items()
        if (distance := _distance(above_gpu, above_nic)) is not None
    }
    ordered = sorted(
        distances, key=lambda pair: (distances[pair], pair[0], natural_key(pair[1]), pair[1])
    )
    matched: dict[int, str] = {}
    used: set[str] = set()
    for gpu, nic in ordered:
        if gpu not in matched and nic not in used:
            matched[gpu] = nic
            used.add(nic)
    for gpu, nic in ordered:
        matched.setdefault(gpu, nic)
    return dict(sorted(matched.items()))


def _distance(above_gpu: Sequence[str], above_nic: Sequence[str]) -> int | None:
    """Return the bridges between two devices below their nearest common one."""
    places = {bridge: steps for steps, bridge in enumerate(above_nic)}
    for steps, bridge in enumerate(above_gpu):
        if bridge in places:
            return steps + places[bridge]
    return None


def is_active(state: str) -> bool:
    """Return whether a port's state, such as `4: ACTIVE` or `ACTIVE`, is the one that works."""
    return state.rpartition(":")[2].strip().upper() == "ACTIVE"


def grown(baseline: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return by how much each counter that has a baseline grew."""
    return {
        key: value - baseline[key]
        for key, value in now.items()
        if key in baseline and value > baseline[key]
    }


def rebased(baseline: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return the baseline for the next look: counters that went down were reset."""
    lowest = {key: min(value, baseline.get(key, value)) for key, value in now.items()}
    return {**baseline, **lowest}


def too_fast(
    before: Mapping[str, int], now: Mapping[str, int], limits: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Return the counters (`port/name`) that grew faster than allowed, with growth per minute.

    Less than a minute counts as a whole one: two looks in a row would make a flood of one error.
    """
    found = {}
    for key, growth in grown(before, now).items():
        rate = growth * WINDOW_S / max(seconds, WINDOW_S)
        limit = limits.get(key.rpartition("/")[2])
        if limit is not None and rate > limit:
            found[key] = round(rate, 1)
    return found


class NicHealthCheck(PeriodicCheck, PynvmlMixin, PciMixin):
    """Has a link of the GPU's adapter gone down since the baseline was taken?

    Args:
        device_index: Local rank whose adapter is looked at; `None` waits for `set_nic_device`.
        interval: Seconds between two looks of `async_check`.
        pci_topo_file: XML file that says which PCI devices sit together; default: /sys says it.
        link_down_path_template: Path of the counter, with ``{nic}`` and perhaps ``{port}``.
        on_failure: Awaited by `async_check` after an unhealthy look.
        sysfs_root: Folder to take for /sys.
        counter_limits: Further counters that may not grow by more than this per minute, by the
            name of their file in ``counters`` or ``hw_counters``, such as ``{"symbol_error": 10}``.
            Without a limit, the error counters that InfiniBand has are evidence.
    """

    name = "nic"

    def __init__(  # noqa: PLR0913 - the contract's signature, and ours behind it
        self,
        device_index: int | None = None,
        interval: float = 60,
        pci_topo_file: str | None = None,
        link_down_path_template: str | None = None,
        on_failure: Callable[[], Awaitable[object]] | None = None,
        *,
        sysfs_root: str | os.PathLike[str] = "/sys",
        counter_limits: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(interval, on_failure)
        self.device_index = device_index
        self.pci_topo_file = pci_topo_file
        self._sysfs_root = os.fspath(sysfs_root).rstrip("/")
        self._has_default_template = link_down_path_template is None
        default = f"{self._sysfs_root}/class/infiniband/{{nic}}/ports/{{port}}/counters/link_downed"
        self.link_down_path_template = link_down_path_template or default
        self.nic_name: str | None = None
        self.component = "no adapter"
        self._baseline: dict[str, int] = {}
        self._limits = dict(counter_limits or {})
        self._sample: tuple[float, dict[str, int]] = (0.0, {})
        self._was_there = False
        self._caller = DeadlineCaller()
        if device_index is not None:
            self.set_nic_device(device_index)

    @property
    def _prev_link_downed(self) -> int | None:
        """The baseline, over all ports; `None` without one."""
        return sum(self._baseline.values()) if self._baseline else None

    @_prev_link_downed.setter
    def _prev_link_downed(self, value: int | None) -> None:
        first = next(iter(self._baseline), "")
        self._baseline = {} if value is None else {first: value}

    def set_nic_device(self, local_rank: int) -> None:
        """Select the adapter nearest to the GPU of `local_rank`; read its counters as baseline."""
        self.nic_name, self._baseline, self._was_there = None, {}, False
        mapping = self._gpu_to_nic()
        if not mapping:
            return
        self.nic_name = mapping.get(self._gpu_of(local_rank))
        self.component = self.nic_name or "no adapter"
        if self.nic_name is None:
            logger.error("no adapter is known for local rank %d: not checked", local_rank)
            return
        self.acknowledge()

    def acknowledge(self) -> None:
        """Take the counters of now as the new baseline, after an increment has been dealt with."""
        try:
            self._baseline, counters = self._read()
        except StuckError as error:
            logger.warning("no baseline for adapter %s: %s", self.nic_name, error)
        else:
            self._sample = (time.monotonic(), counters)
            self._was_there = bool(self._baseline or counters)

    def _examine(self) -> Finding:
        if self.nic_name is None:
            return Finding("skipped", "no adapter belongs to this GPU")
        try:
            now, counters = self._read()
        except StuckError as error:
            return Finding("unhealthy", f"{self.nic_name}: {error}")
        evidence: dict[str, Any] = {"nic": self.nic_name, "link_downed": now, **counters}
        is_evaluated = bool(now) or any(key.rpartition("/")[2] in self._limits for key in counters)
        if not is_evaluated:
            folder = f"{self._sysfs_root}/class/infiniband/{self.nic_name}"
            is_known = self._was_there and self._has_default_template
            if is_known and not os.path.exists(folder):
                return Finding("unhealthy", f"{self.nic_name} has vanished", evidence)
            return Finding("skipped", f"{self.nic_name} has no counter that is evaluated", evidence)
        self._was_there = True
        problems = [*self._broken_links(now), *self._fast_counters(counters)]
        if problems:
            return Finding("unhealthy", "; ".join(problems), evidence)
        return Finding("healthy", evidence=evidence)

    def _broken_links(self, now: Mapping[str, int]) -> list[str]:
        baseline, self._baseline = self._baseline, rebased(self._baseline, now)
        nic = self.nic_name
        return [
            f"{nic}: {f'port {port}' if port else 'its link'} went down {count} more times"
            for port, count in grown(baseline, now).items()
        ]

    def _fast_counters(self, counters: dict[str, int]) -> list[str]:
        (since, before), now = self._sample, time.monotonic()
        fast = too_fast(before, counters, self._limits, now - since)
        if fast or now - since >= WINDOW_S:
            self._sample = (now, counters)
        else:
            self._sample = (since, rebased(before, counters))
        return [f"{self.nic_name}: {key} grew by {rate:g} per minute" for key, rate in fast.items()]

    def _read(self) -> tuple[dict[str, int], dict[str, int]]:
        # Some of these files ask the adapter's firmware, which may hang.
        found: tuple[dict[str, int], dict[str, int]]
        found = self._caller.run("reading counters", self._read_files, _READ_TIMEOUT_S)
        return found

    def _read_files(self) -> tuple[dict[str, int], dict[str, int]]:
        nic = self.nic_name or ""
        paths = pci.expand(self.link_down_path_template, nic)
        counts = {port: pci.read_count(path) for port, path in paths.items()}
        downed = {port: count for port, count in counts.items() if count is not None}
        wanted = list(dict.fromkeys([*_EVIDENCE, *self._limits]))
        return downed, pci.read_counters(self._sysfs_root, nic, wanted)

    def _gpu_of(self, local_rank: int) -> int:
        try:
            device = resolve_device(local_rank)
        except NvmlError:
            return local_rank
        return device if isinstance(device, int) else local_rank

    def _gpu_to_nic(self) -> dict[int, str]:
        gpus = self.get_gpu_pci_mapping()
        nics = self.get_ib_pci_mapping()
        matched: dict[int, str] = {}
        if gpus and nics:
            above = self._ancestors([*gpus.values(), *nics.values()])
            matched = match_nics(
                {gpu: above.get(bus_id, []) for gpu, bus_id in gpus.items()},
                {nic: above.get(bus_id, []) for nic, bus_id in nics.items()},
            )
        if not matched and gpus and self.is_gb200_platform():
            return self.get_gb200_static_mapping()
        return matched

    def _ancestors(self, bus_ids: list[str]) -> dict[str, list[str]]:
        if self.pci_topo_file is None:
            return {bus_id: self.get_pci_ancestor(bus_id) for bus_id in bus_ids}
        try:
            return read_topology(self.pci_topo_file)
        except TopologyError as error:
            logger.error("adapters cannot be matched to GPUs: %s", error)  # noqa: TRY400
            return {}


class NicLinkStateHealthCheck(Check):
    """Is every port that was ACTIVE at construction still ACTIVE?

    Without a template it also looks whether network devices of RoCE adapters keep their carrier.

    Args:
        link_state_path_template: Path of the state, with ``{nic}`` and perhaps ``{port}``.
        on_failure: Kept for the caller.
        sysfs_root: Folder to take for /sys.
        expected_ports: Fewer active ports are unhealthy, whatever they were at construction.
    """

    name = "nic_state"

    def __init__(
        self,
        link_state_path_template: str | None = None,
        on_failure: Callable[[], Awaitable[object]] | None = None,
        *,
        sysfs_root: str | os.PathLike[str] = "/sys",
        expected_ports: int | None = None,
    ) -> None:
        super().__init__(on_failure)
        self.expected_ports = expected_ports
        self._sysfs_root = os.fspath(sysfs_root).rstrip("/")
        self._has_default_template = link_state_path_template is None
        default = f"{self._sysfs_root}/class/infiniband/{{nic}}/ports/{{port}}/state"
        self.link_state_path_template = link_state_path_template or default
        self._caller = DeadlineCaller()
        try:
            first = self._read()
        except StuckError:
            first = {}
        self._active = {key for key, state in first.items() if is_active(state)}
        adapters = sorted({key.partition(" ")[0] for key in self._active})
        self.component = ", ".join(adapters) or "no adapter"

    def _examine(self) -> Finding:
        try:
            now = self._read()
        except StuckError as error:
            return Finding("unhealthy", str(error))
        down = {key: now.get(key, _GONE) for key in sorted(self._active)}
        down = {key: state for key, state in down.items() if not is_active(state)}
        evidence = {"states": {**now, **down}}
        problems = [f"{key} was ACTIVE and is {state or 'empty'}" for key, state in down.items()]
        active = sum(" port " in key and is_active(state) for key, state in now.items())
        if self.expected_ports is not None and active < self.expected_ports:
            problems.insert(0, f"{active} ports are active, {self.expected_ports} are expected")
        if problems:
            return Finding("unhealthy", "; ".join(problems), evidence)
        if not now:
            return Finding("skipped", "no adapter is there")
        if not self._active and self.expected_ports is None:
            return Finding("skipped", "no port was active at the start", evidence)
        return Finding("healthy", evidence=evidence)

    def _read(self) -> dict[str, str]:
        found: dict[str, str]
        found = self._caller.run("reading the state of ports", self._read_files, _READ_TIMEOUT_S)
        return found

    def _read_files(self) -> dict[str, str]:
        states = {}
        for nic in pci.names(self.link_state_path_template, self._sysfs_root):
            for port, path in pci.expand(self.link_state_path_template, nic).items():
                try:
                    state = plain(pci.read_first(path)[:_LONGEST_STATE])
                except FileNotFoundError:
                    continue
                except OSError as error:
                    state = f"unreadable: {error.strerror}"
                states[f"{nic} port {port or '1'}"] = state
            if self._has_default_template:
                for device, has_carrier in pci.carriers(self._sysfs_root, nic).items():
                    states[f"{nic} netdev {device}"] = "ACTIVE" if has_carrier else "NO CARRIER"
        return states
