# SPDX-License-Identifier: Apache-2.0
"""What all checks share: result, timing, deadline, the boundary for errors."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from nvidia_resiliency_ext.shared_utils.abandonable import AbandonableCall
from nvidia_resiliency_ext.shared_utils.console import plain

Status = Literal["healthy", "unhealthy", "skipped"]

logger = logging.getLogger("nvrx")

_LONGEST_REASON = 2000
_DEFAULT_NVML_TIMEOUT_S = 10.0
_MAX_TIMEOUT_S = 86400.0
_TRUE = frozenset({"1", "true", "yes", "on"})
_logged: dict[str, object] = {}


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of a check, without its name and duration.

    Attributes:
        status: ``skipped`` where there was nothing to look at; that is not a failure.
        reason: One line for people; empty when healthy and nothing needs to be said.
        evidence: What was read, as JSON values.
        warnings: Lines for the log, where one reason is not enough.
    """

    status: Status
    reason: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HealthResult:
    """Result of one health check; false only when it is unhealthy.

    Attributes:
        name: The check, as the command line names it.
        status: ``healthy``, ``unhealthy`` or ``skipped`` (nothing was there to look at).
        reason: One line for people.
        component: What was looked at, such as ``gpu 3`` or ``mlx5_0``.
        evidence: What was read, as JSON values.
        duration_s: How long it took.
    """

    name: str
    status: Status
    reason: str = ""
    component: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0

    def __bool__(self) -> bool:
        """Return False only when unhealthy."""
        return self.status != "unhealthy"


def log_once(key: str, level: int, message: str) -> None:
    """Log one line for this key in the life of the process."""
    # One step, so that no lock is needed: a fork might find it held.
    mine = object()
    if _logged.setdefault(key, mine) is mine:
        logger.log(level, "%s", message)


def _plain(text: str) -> str:
    """Return one line that is fit for a log: it may quote paths, files and peers."""
    kept = plain(text[:_LONGEST_REASON])
    return kept if len(text) <= _LONGEST_REASON else f"{kept}..."


class Check:
    """A health check: `check` returns the result, a call returns whether all is well.

    `on_failure` is a coroutine function that is called after a failed asynchronous check.

    Attributes:
        name: The check, as the command line names it.
        component: What is looked at, in a few words; default: the name.
        late_status: What `run_checks` takes a check for that has not ended by the deadline:
            unhealthy, because a driver or mount hangs, or skipped where silence proves nothing.
        skip_level: Level of the line that says, once in a process, why there was nothing to check.
    """

    name: ClassVar[str] = ""
    component: str = ""
    late_status: ClassVar[Status] = "unhealthy"
    skip_level = logging.INFO

    def __init__(self, on_failure: Callable[[], Awaitable[object]] | None = None) -> None:
        self.on_failure = on_failure

    def check(self) -> HealthResult:
        """Run the check once and return the result; never raises."""
        start = time.monotonic()
        try:
            finding = self._examine()
        except Exception as error:
            # The boundary: a check that cannot run is not a failed check.
            logger.exception("health check %s could not run", self.name)
            reason = f"the check itself failed: {type(error).__name__}: {error}"
            finding = Finding("skipped", reason)
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
        what = self.component or self.name
        return HealthResult(self.name, finding.status, reason, what, finding.evidence, duration_s)

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


def nvml_timeout_s() -> float:
    value = _number("NVRX_NVML_TIMEOUT_S", f"using {_DEFAULT_NVML_TIMEOUT_S:g}") or 0.0
    return min(value, _MAX_TIMEOUT_S) if value > 0 else _DEFAULT_NVML_TIMEOUT_S


def nvml_in_helper() -> bool:
    """Return whether driver calls run in a process of their own, which can be killed."""
    return os.environ.get("NVRX_NVML_SUBPROCESS", "").strip().lower() in _TRUE


def count_of(name: str) -> int | None:
    """Return the variable `name` as a number of 0 or more; `None` without one."""
    value = _number(name, "ignored")
    return None if value is None or value < 0 else int(value)


def job_start_s() -> float | None:
    """Return when Slurm started the job, in seconds since the epoch."""
    return _number("SLURM_JOB_START_TIME", "ignored")


def _number(name: str, instead: str) -> float | None:
    given = os.environ.get(name, "").strip()
    if not given:
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return value
    message = f"{name}={given[:64]!r} is not a number: {instead}"
    log_once(f"setting {name}", logging.WARNING, message)
    return None


def run_checks(checks: Sequence[Check], deadline_s: float) -> list[HealthResult]:
    """Run `checks` at the same time, within `deadline_s` seconds; return results in their order.

    One that has not ended by then gets its `late_status` and is abandoned.
    """
    start = time.monotonic()
    # Their threads are daemons: a check that never ends must not keep the interpreter from ending.
    running = [
        AbandonableCall(f"check-{check.name}", partial(_in_thread, check, start))
        for check in checks
    ]
    results = []
    for check, call in zip(checks, running, strict=True):
        if call.ended.wait(max(0.0, start + deadline_s - time.monotonic())):
            results.append(call.result())
        else:
            reason = f"the check has not ended within {deadline_s:g} s"
            logger.warning("health check %s: %s", check.name, reason)
            results.append(_cut_short(check, check.late_status, reason, start))
    return results


def _in_thread(check: Check, start: float) -> HealthResult:
    """Run a check; an error that would end the thread, as `sys.exit`, becomes a result."""
    try:
        return check.check()
    except BaseException as error:
        logger.exception("health check %s has ended its thread", check.name)
        reason = _plain(f"the check has ended its thread: {type(error).__name__}: {error}")
        return _cut_short(check, "unhealthy", reason, start)


def _cut_short(check: Check, status: Status, reason: str, start: float) -> HealthResult:
    took_s = time.monotonic() - start
    return HealthResult(check.name, status, reason, check.component or check.name, {}, took_s)
