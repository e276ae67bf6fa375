# SPDX-License-Identifier: Apache-2.0
"""Is this node fit to join a round? Owns which checks are asked, and what their answers mean.

The checks themselves are nvrx-common's. Everything here may block for as long as a driver or a
mount does, within limits, so the launcher asks in a thread (see `gate.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._infra.hardware import has_adapters, has_gpu_driver

from .cause import Cause
from .errors import UnhealthyNodeException

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig
    from nvidia_resiliency_ext.shared_utils.health_check import (
        Check,
        HealthResult,
        NodeHealthCheck,
    )

__all__ = [
    "NodeChecks",
    "ensure_node_is_healthy",
    "get_node_health_check",
    "init_node_health_check",
    "injected_failure",
    "unfit",
]

logger = logging.getLogger("nvrx")

# Each check has a tighter limit of its own; this one holds whatever they do.
DEADLINE_S = 30.0
SERVICE_DEADLINE_S = 75.0
MAX_EVIDENCE_CHARS = 2000


class NodeChecks:
    """The checks of one node, kept over its rounds: some compare with what they saw first.

    Args:
        config: Which checks are wanted.
        endpoint: Socket of a service that judges this node; None asks none.
        environ: The launcher's environment.
    """

    def __init__(
        self, config: FaultToleranceConfig, endpoint: str | None, environ: Mapping[str, str]
    ) -> None:
        self._config = config
        self._endpoint = endpoint
        self._environ = environ
        self._must_have_gpus = bool(environ.get(_env.EXPECTED_GPUS))
        self._checks: dict[str, Check] = {}

    def run(self) -> list[HealthResult]:
        """Ask all checks for which there is something to look at. May block, and never raises."""
        checks = self._wanted()
        if not checks:
            return []
        from nvidia_resiliency_ext.shared_utils.health_check import run_checks

        deadline_s = SERVICE_DEADLINE_S if "service" in self._checks else DEADLINE_S
        return run_checks(checks, deadline_s)

    def _wanted(self) -> list[Check]:
        """Return the checks to ask, made when they are first needed."""
        config, checks = self._config, self._checks
        if "gpu" not in checks and (self._must_have_gpus or has_gpu_driver()):
            from nvidia_resiliency_ext.shared_utils.health_check import GPUHealthCheck

            checks["gpu"] = GPUHealthCheck()
        template = config.link_state_path_template
        if "nic" not in checks and config.enable_nic_healthcheck and (template or has_adapters()):
            from nvidia_resiliency_ext.shared_utils.health_check import NicLinkStateHealthCheck

            checks["nic"] = NicLinkStateHealthCheck(template)
        if "storage" not in checks and config.enable_dist_storage_healthcheck:
            from nvidia_resiliency_ext.shared_utils.health_check import (
                DistributedStorageHealthCheck,
            )

            checks["storage"] = DistributedStorageHealthCheck()
        if "paths" not in checks and config.storage_healthcheck_path:
            from nvidia_resiliency_ext.shared_utils.health_check import StoragePathHealthCheck

            checks["paths"] = StoragePathHealthCheck(config.storage_healthcheck_path.split(","))
        if "segment" not in checks and config.segment_health_check_dir:
            from nvidia_resiliency_ext.fault_tolerance._infra.segment_health import (
                SegmentHealthCheck,
            )

            checks["segment"] = SegmentHealthCheck(config.segment_health_check_dir, self._environ)
        if "service" not in checks:
            service = _service_of(self._endpoint)
            if service is not None:
                checks["service"] = service
        return list(checks.values())


def unfit(results: Sequence[HealthResult], host: str) -> Cause | None:
    """Return why a node must not join, or None when nothing is wrong."""
    bad = [result for result in results if not result]
    if not bad:
        return None
    said = "; ".join(f"health check {result.name}: {result.reason}" for result in bad)
    evidence = json.dumps({result.name: dict(result.evidence) for result in bad}, default=str)
    return Cause(
        "unhealthy",
        f"host {host} is unhealthy: {said}",
        host=host,
        detected_by="health check",
        detail={"check": bad[0].name, "evidence": evidence[:MAX_EVIDENCE_CHARS]},
    )


def injected_failure(
    cycle: int, infra_rank: int, host: str, environ: Mapping[str, str]
) -> Cause | None:
    """Return a failure that the environment wants in this cycle on this node; for tests."""
    if not environ.get(_env.INJECT_GPU_FAILURE):
        return None
    from nvidia_resiliency_ext.testing_utils import health_check_injector

    for kind in health_check_injector.KINDS:
        if health_check_injector.should_inject_failure(cycle, infra_rank, kind):
            said = f"health check {kind}: failed on purpose, see {_env.INJECT_GPU_FAILURE}"
            return Cause(
                "unhealthy",
                f"host {host} is unhealthy: {said}",
                host=host,
                detected_by="health check",
                detail={"check": kind},
            )
    return None


def ensure_node_is_healthy(
    config: FaultToleranceConfig | None = None, endpoint: str | None = None
) -> None:
    """Run the checks that a node must pass before it joins a rendezvous; may block.

    Args:
        config: Which checks are wanted; None takes the defaults.
        endpoint: Socket of a service that judges this node; None takes that of
            `init_node_health_check`, if it was called.

    Raises:
        UnhealthyNodeException: One of them failed; the message says which and why.
    """
    import os

    from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig

    wanted = FaultToleranceConfig() if config is None else config
    results = NodeChecks(wanted, endpoint, os.environ).run()
    cause = unfit(results, os.uname().nodename.split(".", 1)[0])
    if cause is not None:
        raise UnhealthyNodeException(cause.what)


# The service that programs name for the launches of this process.
_service: NodeHealthCheck | None = None


def init_node_health_check(endpoint: str | None) -> None:
    """Name the service that judges this node, for all launches of this process.

    Args:
        endpoint: Path of its Unix socket, or the same as `unix://...`; None forgets it.
    """
    global _service  # noqa: PLW0603 - the one object of the process
    _service = _service_at(endpoint) if endpoint else None


def get_node_health_check() -> NodeHealthCheck | None:
    """Return the check that asks the service named last, or None."""
    return _service


def _service_of(endpoint: str | None) -> NodeHealthCheck | None:
    return _service_at(endpoint) if endpoint else _service


def _service_at(endpoint: str) -> NodeHealthCheck:
    from nvidia_resiliency_ext.shared_utils.health_check import NodeHealthCheck

    return NodeHealthCheck(endpoint=endpoint)
