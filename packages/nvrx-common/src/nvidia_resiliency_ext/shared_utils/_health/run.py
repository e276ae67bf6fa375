# SPDX-License-Identifier: Apache-2.0
"""Runs several checks at once, under one deadline that holds whatever a check does."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.abandonable import AbandonableCall

from .result import HealthResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .check import Check

__all__ = ["run_checks"]

logger = logging.getLogger("nvrx")


def run_checks(checks: Sequence[Check], deadline_s: float) -> list[HealthResult]:
    """Run checks at the same time and return their results in the same order.

    A check that has not ended by the deadline is unhealthy, or skipped where its `late_status` says
    so; it is left behind.

    Args:
        checks: What to look at.
        deadline_s: Time for all of them together.
    """
    start = time.monotonic()
    # Their threads are daemons: a check that never ends must not keep the interpreter from ending.
    running = [AbandonableCall(f"check-{check.name}", check.check) for check in checks]
    results = []
    for check, call in zip(checks, running, strict=True):
        if call.ended.wait(max(0.0, start + deadline_s - time.monotonic())):
            results.append(call.result())
        else:
            results.append(_late(check, deadline_s, time.monotonic() - start))
    return results


def _late(check: Check, deadline_s: float, took_s: float) -> HealthResult:
    reason = f"the check has not ended within {deadline_s:g} s"
    logger.warning("health check %s: %s", check.name, reason)
    return HealthResult(check.name, check.late_status, reason, check.component, {}, took_s)
