# SPDX-License-Identifier: Apache-2.0
"""Owns what the self-check says of the hardware: one look of each health check."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .finding import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["hardware_findings"]

_DEADLINE_S = 20.0
_LEVELS: dict[str, Level] = {"healthy": "ok", "skipped": "info", "unhealthy": "error"}


def hardware_findings() -> Iterator[Finding]:
    """Yield one finding per health check; a check that does not end in time is an error."""
    from nvidia_resiliency_ext.shared_utils import health_check

    # What the checks would log is printed as findings.
    logger = logging.getLogger("nvrx")
    silent = logging.NullHandler()
    logger.addHandler(silent)
    try:
        checks = [
            health_check.GPUHealthCheck(),
            health_check.NVLHealthCheck(),
            health_check.NicLinkStateHealthCheck(),
            health_check.DistributedStorageHealthCheck(),
        ]
        results = health_check.run_checks(checks, _DEADLINE_S)
    finally:
        logger.removeHandler(silent)
    for result in results:
        topic = f"{result.name.replace('_', ' ')} health"
        yield Finding(_LEVELS[result.status], topic, result.reason or result.status)
