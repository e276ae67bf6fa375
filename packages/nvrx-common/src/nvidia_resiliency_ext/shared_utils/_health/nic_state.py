# SPDX-License-Identifier: Apache-2.0
"""Owns the check that ports which worked at the start still work."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.abandonable import DeadlineCaller, StuckError
from nvidia_resiliency_ext.shared_utils.console import plain

from . import nic_ports
from .check import Check
from .nic_judge import is_active
from .result import Finding, healthy, skipped, unhealthy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["NicLinkStateHealthCheck"]

_READ_TIMEOUT_S = 10.0
_GONE = "gone"
_LONGEST_STATE = 40


class NicLinkStateHealthCheck(Check):
    """Is every port that was ACTIVE at construction still ACTIVE?

    Also looked at, unless a template is given: whether the network devices of RoCE adapters keep
    their carrier.

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

    @property
    def component(self) -> str:
        """What is looked at."""
        return ", ".join(sorted({key.partition(" ")[0] for key in self._active})) or "no adapter"

    def _examine(self) -> Finding:
        try:
            now = self._read()
        except StuckError as error:
            return unhealthy(str(error))
        down = {key: now.get(key, _GONE) for key in sorted(self._active)}
        down = {key: state for key, state in down.items() if not is_active(state)}
        evidence = {"states": {**now, **down}}
        problems = [f"{key} was ACTIVE and is {state or 'empty'}" for key, state in down.items()]
        active = sum(" port " in key and is_active(state) for key, state in now.items())
        if self.expected_ports is not None and active < self.expected_ports:
            problems.insert(0, f"{active} ports are active, {self.expected_ports} are expected")
        if problems:
            return unhealthy("; ".join(problems), evidence)
        if not now:
            return skipped("no adapter is there")
        if not self._active and self.expected_ports is None:
            return skipped("no port was active at the start", evidence)
        return healthy(evidence=evidence)

    def _read(self) -> dict[str, str]:
        found: dict[str, str]
        found = self._caller.run("reading the state of ports", self._read_files, _READ_TIMEOUT_S)
        return found

    def _read_files(self) -> dict[str, str]:
        states = {}
        for nic in nic_ports.names(self.link_state_path_template, self._sysfs_root):
            for port, path in nic_ports.expand(self.link_state_path_template, nic).items():
                try:
                    states[f"{nic} port {port or '1'}"] = _plain(nic_ports.read_first(path))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    states[f"{nic} port {port or '1'}"] = f"unreadable: {error.strerror}"
            if self._has_default_template:
                for device, has_carrier in nic_ports.carriers(self._sysfs_root, nic).items():
                    states[f"{nic} netdev {device}"] = "ACTIVE" if has_carrier else "NO CARRIER"
        return states


def _plain(state: str) -> str:
    return plain(state[:_LONGEST_STATE])
