# SPDX-License-Identifier: Apache-2.0
"""Announced preemption on one node: deadlines, the signal to workers, the call at which all save.

Every rank shows the count of its calls before it looks whether saving is asked for; once it is, the
rank waits in its next call until the call is agreed. So counts that are read after all were asked
are those of the last calls that any rank can have left: the highest plus one is a call that all
ranks still have before them, and no rank that waits is needed by another one on the way there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._core.machine import (
    Cause,
    GraceOver,
    Preempted,
    RanksHeld,
)
from nvidia_resiliency_ext.fault_tolerance._env import SLURM_JOB_END_TIME
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import SAVE_ASKED
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

if TYPE_CHECKING:
    from .job import Job

logger = logging.getLogger("nvrx")

# What a rank stored in a call is seen by others within nanoseconds, or at a switch of context.
SETTLE_S = 0.02
# A scheduler may reach a launcher twice, directly and through whoever started it.
SAME_SIGNAL_S = 1.0


def end_of_job(deadline: str | None, environ: Mapping[str, str], now: float) -> float | None:
    """Return when the job's time is over, from `preempt_deadline` and its start `now` (unix s).

    Raises ConfigError: Slurm is to be asked, and gave no answer.
    """
    if deadline is None:
        return None
    if deadline.startswith("+"):
        return now + float(deadline)
    if deadline != "slurm":
        return float(deadline)
    try:
        return float(environ.get(SLURM_JOB_END_TIME, ""))
    except ValueError:
        raise ConfigError(
            f"--ft-preempt-deadline slurm: {SLURM_JOB_END_TIME} is"
            f" {environ.get(SLURM_JOB_END_TIME, 'not set')!r}; Slurm sets it from version 22.05 on,"
            " elsewhere give the time itself"
        ) from None


class PreemptionController:
    """Announced preemption on one node; waits for a deadline from the start. Loop's thread only.

    Raises ConfigError: the job's end is to be asked of Slurm, and it gave none.
    """

    def __init__(self, job: Job) -> None:
        config = job.plan.fault_tol_cfg
        self._job = job
        self._loop, self._clock = job.loop, job.clock
        # It announces preemption, and is passed to workers that handle it.
        self._signum: signal.Signals | None = config.preempt_signal
        self._grace_s = config.preempt_grace  # For ranks to save and leave.
        self._is_asked = False
        self._asked_ranks = 0
        self._has_word = False
        self._is_reported = False
        self._signalled_at: float | None = None
        self._is_over = False
        self._end = end_of_job(config.preempt_deadline, job.environ, self._clock.wall())
        if self._end is not None:
            left_s = self._end - self._grace_s - self._clock.wall()
            self._loop.call_at(self._clock.monotonic() + max(0.0, left_s), self._announce_end)

    def announced(self, signum: int) -> bool:
        """Take a signal that announces preemption, or ends the grace time; False for all others."""
        if signum != self._signum or self._is_over:
            return False
        name, now = signal.Signals(signum).name, self._clock.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            self._announce("preempted", f"host {self._job.paths.host} must go: {name} was received")
        elif now - self._signalled_at > SAME_SIGNAL_S:
            self._is_over = True
            logger.warning("%s was received again: ranks have no more time to save", name)
            self._job.post(GraceOver())
        return True

    def _announce_end(self) -> None:
        left_s = (self._end or 0.0) - self._clock.wall()
        self._announce(
            "time_limit", f"host {self._job.paths.host} must go: its time is over in {left_s:.0f} s"
        )

    def _announce(self, kind: str, what: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            logger.warning("%s; ranks have %g s to save and leave", what, self._grace_s)
            cause = Cause(kind, what, host=self._job.paths.host, detected_by="scheduler")
            self._job.post(Preempted(cause))
            at = self._clock.monotonic() + self._grace_s
            self._loop.call_at(at, lambda: self._job.post(GraceOver()))

    def acknowledged(self) -> None:
        """Record that the slots hold the newest save word."""
        if self._is_asked and self._job.monitor.is_save_acknowledged:
            self._loop.call_at(self._clock.monotonic() + SETTLE_S, self._report)

    def cycle_begins(self) -> None:
        """Withdraw the request to save that the ranks of an earlier cycle received."""
        if self._has_word:
            self._has_word = self._is_asked = False
            self._job.monitor.save(0)

    def ask(self, cause: Cause) -> None:
        """Hold ranks at `should_checkpoint`; pass the signal to workers that handle it."""
        logger.warning("ranks are asked to save and leave: %s", cause.what)
        self._is_asked = self._has_word = True
        self._asked_ranks = len(self._job.monitor.save_calls())
        self._job.monitor.save(SAVE_ASKED)
        self._pass_on()
        self.acknowledged()

    def release(self, at: int) -> None:
        if self._has_word:
            logger.info("all ranks save at call %d of should_checkpoint", at)
            self._job.monitor.save(at)

    def _report(self) -> None:
        """Report the furthest call of the ranks, once all wait in `should_checkpoint`."""
        if not self._is_asked or not self._job.monitor.is_save_acknowledged:
            return
        calls = self._job.monitor.save_calls()
        # Ranks whose monitor died are seen when the next one has them. The grace time ends that.
        if len(calls) < min(self._asked_ranks, len(self._job.running_pids())):
            self._loop.call_at(self._clock.monotonic() + SETTLE_S, self._report)
            return
        self._is_asked = False
        self._job.post(RanksHeld(max(calls.values(), default=0)))

    def _pass_on(self) -> None:
        """Send the signal to workers that handle it: others would die of it unsaved."""
        if self._signum is None:
            return
        pids = self._job.running_pids()
        handling = [pid for pid in pids if procfs.catches_signal(pid, self._signum)]
        logger.info("%s is passed to %d of %d workers", self._signum.name, len(handling), len(pids))
        for pid in handling:
            with contextlib.suppress(ProcessLookupError):  # It has just left.
                os.kill(pid, self._signum)
