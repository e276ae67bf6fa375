# SPDX-License-Identifier: Apache-2.0
"""Starts workers from standbys where it can, from fresh interpreters where it must."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nvidia_resiliency_ext.shared_utils.clock import Clock

from .chronicle import Chronicle
from .loop import EventLoop
from .plan import LaunchPlan
from .workers import ColdStarter, Started, WorkerSpec


class StandbyStarter:
    def __init__(self, plan: LaunchPlan, base_env: Mapping[str, str], loop: EventLoop, clock: Clock, chronicle: Chronicle, running_pids: Callable[[], list[int]]) -> None:
        self._cold = ColdStarter()

    def hold_first_cycle(self) -> None: ...
    def good_step(self) -> None: ...
    def close(self) -> None: ...
    def start(self, spec: WorkerSpec, stdout_fd: int | None, stderr_fd: int | None) -> Started:
        return self._cold.start(spec, stdout_fd, stderr_fd)
