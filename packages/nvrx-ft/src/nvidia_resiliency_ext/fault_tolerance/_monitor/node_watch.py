# SPDX-License-Identifier: Apache-2.0
"""Checks GPUs and network cards while ranks work, in a thread: a driver call may hang."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance._core.infra import has_adapters, has_gpu_driver

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils import health_check


logger = logging.getLogger("nvrx")

STOP_WAIT_S = 0.2


class NodeWatch:
    """Checks the devices of local ranks; `found` gets (local rank, rule, reason) in the thread."""

    def __init__(
        self,
        local_ranks: Sequence[int],
        config: Mapping[str, Any],
        found: Callable[[int, str, str], None],
        *,
        sysfs_root: str = "/sys",
    ) -> None:
        self._local_ranks = tuple(local_ranks)
        self._config = config
        self._interval_s = float(config["node_health_check_interval"])
        self._found = found
        self._sysfs_root = sysfs_root
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="nvrx-node-watch", daemon=True)

    def start(self) -> None:
        """Begin; the first check follows after one interval."""
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.warning("GPUs and network cards are not watched: %s", error)

    def close(self) -> None:
        """End soon; a check that hangs is abandoned."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_WAIT_S)

    def _work(self) -> None:
        # Not at once: the ranks import now, and a node was checked before it joined.
        if self._stopped.wait(self._interval_s):
            return
        gpus = self._gpu_checks() if has_gpu_driver() else {}
        nics = self._nic_checks()
        # Counters of network cards are taken now, and compared from the second check on.
        while gpus or nics:
            for rank, check in gpus.items():
                self._evaluate(rank, "gpu_health", check.check())
            for rank, nic in nics.items():
                result = nic.check()
                self._evaluate(rank, "nic_health", result)
                if not result:
                    # Dealt with: the ranks of the next cycle start from the counters of now.
                    nic.acknowledge()
            if self._stopped.wait(self._interval_s):
                return

    def _gpu_checks(self) -> dict[int, health_check.GPUHealthCheck]:
        from nvidia_resiliency_ext.shared_utils import health_check

        first = health_check.GPUHealthCheck(device_index=self._local_ranks[0])
        if not first.enabled:
            return {}
        rest = {
            rank: health_check.GPUHealthCheck(device_index=rank) for rank in self._local_ranks[1:]
        }
        return {self._local_ranks[0]: first, **rest}

    def _nic_checks(self) -> dict[int, health_check.NicHealthCheck]:
        template = self._config["link_down_path_template"]
        has_any = bool(template) or has_adapters(self._sysfs_root)
        if not self._config["enable_nic_monitor"] or not has_any:
            return {}
        from nvidia_resiliency_ext.shared_utils import health_check

        checks = {}
        for rank in self._local_ranks:
            check = health_check.NicHealthCheck(
                pci_topo_file=self._config["pci_topo_file"],
                link_down_path_template=template,
                sysfs_root=self._sysfs_root,
            )
            check.set_nic_device(rank)
            if check.nic_name is not None:
                checks[rank] = check
        return checks

    def _evaluate(self, local_rank: int, rule: str, result: health_check.HealthResult) -> None:
        if not result and not self._stopped.is_set():
            self._found(local_rank, rule, result.reason)
