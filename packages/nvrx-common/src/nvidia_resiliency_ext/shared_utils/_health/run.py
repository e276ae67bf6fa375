# SPDX-License-Identifier: Apache-2.0
"""Runs several checks at once, under one deadline that holds whatever a check does."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from .result import HealthResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .check import Check

__all__ = ["run_checks"]

logger = logging.getLogger("nvrx")


class _Running:
    def __init__(self, check: Check) -> None:
        self.check = check
        self.result: HealthResult | None = None
        self.ended = threading.Event()
        name = f"nvrx-check-{check.name}"
        # A daemon: a check that never ends must not keep the interpreter from ending.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self.check.check()
        finally:
            self.ended.set()


def run_checks(checks: Sequence[Check], deadline_s: float) -> list[HealthResult]:
    """Run checks at the same time and return their results in the same order.

    A check that has not ended by the deadline is unhealthy, or skipped where its `late_status` says
    so; it is left behind.

    Args:
        checks: What to look at.
        deadline_s: Time for all of them together.
    """
    start = time.monotonic()
    running = [_Running(check) for check in checks]
    results = []
    for each in running:
        each.ended.wait(max(0.0, start + deadline_s - time.monotonic()))
        result = each.result
        if result is None:
            result = _late(each.check, deadline_s, time.monotonic() - start)
        results.append(result)
    return results


def _late(check: Check, deadline_s: float, took_s: float) -> HealthResult:
    reason = f"the check has not ended within {deadline_s:g} s"
    logger.warning("health check %s: %s", check.name, reason)
    return HealthResult(check.name, check.late_status, reason, check.component, {}, took_s)
