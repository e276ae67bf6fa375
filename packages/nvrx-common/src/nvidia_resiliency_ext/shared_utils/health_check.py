# SPDX-License-Identifier: Apache-2.0
"""Health checks of a node: GPUs, NVLinks, network adapters, storage and a site's daemon.

Each check is an object. `check()` returns a `HealthResult` (healthy, unhealthy, or skipped if there
is nothing to check), calling it returns a bool, and `async_check()` repeats the check. No check
raises because of missing hardware, and each has a deadline, which holds even if a driver call or a
mount never returns. ``python -m nvidia_resiliency_ext.shared_utils.health_check`` runs
them once. Everything is loaded when first asked for.

Example:
    >>> from nvidia_resiliency_ext.shared_utils.health_check import StoragePathHealthCheck
    >>> StoragePathHealthCheck(["/"])()
    True
"""

from __future__ import annotations

from .lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._health.check import Check, Finding, HealthResult, run_checks
    from ._health.cli import main
    from ._health.devices import PynvmlMixin, set_nvml, with_pynvml_lock
    from ._health.gpu import GPUHealthCheck
    from ._health.nic import NicHealthCheck, NicLinkStateHealthCheck
    from ._health.node_daemon import NodeHealthCheck
    from ._health.nvlink import NVLHealthCheck, NVLinkWindowHealthCheck
    from ._health.pci import PciMixin
    from ._health.probes import abandoned_probes
    from ._health.storage import DistributedStorageHealthCheck, StoragePathHealthCheck
    from .attribution_client import AttributionService

__all__ = [
    "AttributionService", "Check", "DistributedStorageHealthCheck", "Finding", "GPUHealthCheck",
    "HealthResult", "NVLHealthCheck", "NVLinkWindowHealthCheck", "NicHealthCheck",
    "NicLinkStateHealthCheck", "NodeHealthCheck", "PciMixin", "PynvmlMixin",
    "StoragePathHealthCheck", "abandoned_probes", "main", "run_checks", "set_nvml",
    "with_pynvml_lock",
]  # fmt: skip

_NAMES = {
    "_health.check": ("Check", "Finding", "HealthResult", "run_checks"),
    "_health.cli": ("main",),
    "_health.devices": ("PynvmlMixin", "set_nvml", "with_pynvml_lock"),
    "_health.gpu": ("GPUHealthCheck",),
    "_health.nic": ("NicHealthCheck", "NicLinkStateHealthCheck"),
    "_health.node_daemon": ("NodeHealthCheck",),
    "_health.nvlink": ("NVLHealthCheck", "NVLinkWindowHealthCheck"),
    "_health.pci": ("PciMixin",),
    "_health.probes": ("abandoned_probes",),
    "_health.storage": ("DistributedStorageHealthCheck", "StoragePathHealthCheck"),
    "attribution_client": ("AttributionService",),
}
_load, __dir__ = lazy_names(globals(), _NAMES)


def __getattr__(name: str) -> object:
    """Load a check on first use."""
    if name != "_nvml_lock":
        return _load(name)
    # Never kept: a forked child gets another one.
    from ._health.devices import lock

    return lock


if __name__ == "__main__":
    import sys

    from ._health.cli import main

    sys.exit(main())
