# SPDX-License-Identifier: Apache-2.0
"""Owns what all checks share: timing, the boundary for errors, logging, the endless coroutine.

A check is a class with `_examine`, which looks at the hardware and returns a finding. It may block
for as long as its own deadline, so coroutines run it in an executor.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, ClassVar

from nvidia_resiliency_ext.shared_utils.console import plain

from .result import Finding, HealthResult, Status, skipped

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Check", "PeriodicCheck", "log_once"]

logger = logging.getLogger("nvrx")

_LONGEST_REASON = 2000

_logged: dict[str, object] = {}


def log_once(key: str, level: int, message: str) -> None:
    """Log one line for this key in the life of the process."""
    # One step, so that no lock is needed: a fork might find it held.
    mine = object()
    if _logged.setdefault(key, mine) is mine:
        logger.log(level, "%s", message)


def forget_logged() -> None:
    """Let every line be logged anew; for tests."""
    _logged.clear()


def _plain(text: str) -> str:
    """Return one line that is fit for a log: it may quote paths, files and peers."""
    kept = plain(text[:_LONGEST_REASON])
    return kept if len(text) <= _LONGEST_REASON else f"{kept}..."


class Check:
    """A health check: `check` tells what was found, calling it tells whether all is well.

    `on_failure` is a coroutine function that is called after a failed asynchronous check.

    Attributes:
        name: The check, as the command line names it.
        late_status: What `run_checks` takes a check for that has not ended by the deadline:
            unhealthy, because a driver or mount hangs, or skipped where silence proves nothing.
        skip_level: Level of the line that says, once in a process, why there was nothing to check.
    """

    name: ClassVar[str] = ""
    late_status: ClassVar[Status] = "unhealthy"
    skip_level = logging.INFO

    def __init__(self, on_failure: Callable[[], Awaitable[object]] | None = None) -> None:
        self.on_failure = on_failure

    @property
    def component(self) -> str:
        """What is looked at, in a few words."""
        return self.name

    def check(self) -> HealthResult:
        """Look once and say what was found; never raises."""
        start = time.monotonic()
        try:
            finding = self._examine()
        except Exception as error:
            # The boundary: a check that cannot run is not a failed check.
            logger.exception("health check %s could not run", self.name)
            finding = skipped(f"the check itself failed: {type(error).__name__}: {error}")
        return self._result(finding, time.monotonic() - start)

    def __call__(self) -> bool:
        """Look once; return False when unhealthy."""
        return bool(self.check())

    def _result(self, finding: Finding, duration_s: float) -> HealthResult:
        reason = _plain(finding.reason)
        if finding.status == "unhealthy":
            for line in map(_plain, finding.warnings or (finding.reason,)):
                logger.warning("health check %s: %s", self.name, line)
        elif finding.status == "skipped":
            message = f"health check {self.name} is skipped: {reason}"
            log_once(f"skipped {self.name} {self.skip_level}", self.skip_level, message)
        return HealthResult(
            self.name,
            finding.status,
            reason,
            self.component,
            finding.evidence,
            duration_s,
        )

    def _examine(self) -> Finding:
        raise NotImplementedError


class PeriodicCheck(Check):
    """A check that can also run for ever as a coroutine."""

    def __init__(
        self, interval: float, on_failure: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        super().__init__(on_failure)
        self.interval = interval

    async def async_check(self) -> None:
        """Sleep `interval` seconds, look, await `on_failure` when unhealthy; for ever."""
        import asyncio

        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.interval)
            # In a thread: a driver or a mount may take seconds, and the loop has other duties.
            is_healthy = await loop.run_in_executor(None, self)
            if not is_healthy and self.on_failure is not None:
                await self.on_failure()
