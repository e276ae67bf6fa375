# SPDX-License-Identifier: Apache-2.0
"""Announced preemption on one node: deadlines, the signal to workers, the call at which all save.

Every rank counts its calls and shows the count before it looks whether saving is asked for. Once
that is asked of a rank, it waits in its next call until the call is agreed. So the counts that are
read after it was asked of everybody are those of the last calls that any rank can have left: the
highest plus one is a call that all ranks still have before them, and no rank that waits is needed
by another one on the way to be read. A rank that has not called yet counts 0.

What follows is decided in `_agent/decide.py`, and for all nodes by the coordinator.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._core.cause import Cause
from nvidia_resiliency_ext.fault_tolerance._core.machine import GraceOver, Preempted, RanksHeld
from nvidia_resiliency_ext.fault_tolerance._env import SLURM_JOB_END_TIME
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import SAVE_ASKED
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

if TYPE_CHECKING:
    from .monitor_link import MonitorPerRank, SharedMonitor

logger = logging.getLogger("nvrx")

# What a rank stored in a call is seen by others within nanoseconds, or at a switch of context.
SETTLE_S = 0.02
# A scheduler may reach a launcher twice, directly and through whoever started it.
SAME_SIGNAL_S = 1.0


def end_of_job(deadline: str | None, environ: Mapping[str, str], now: float) -> float | None:
    """Return when the job's time is over (unix s), or None when it has no end.

    `deadline` is the option `preempt_deadline`, `now` the launcher's start (unix s). Raises
    ConfigError: Slurm is to be asked, and gave no answer.
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


@dataclass(eq=False)
class PreemptionController:
    """Announced preemption on one node. The loop's thread only."""

    loop: EventLoop
    clock: Clock
    _: KW_ONLY
    post: Callable[[Preempted | RanksHeld | GraceOver], None]
    monitor: SharedMonitor | MonitorPerRank
    running_pids: Callable[[], Collection[int]]
    host: str
    signum: signal.Signals | None  # Announces it, and is passed to workers that handle it.
    grace_s: float  # For ranks to save and leave.
    end: float | None  # Unix s.

    def __post_init__(self) -> None:
        """Begin: a deadline is waited for from now on."""
        self._is_asked = False
        self._asked_ranks = 0
        self._has_word = False
        self._is_reported = False
        self._signalled_at: float | None = None
        self._is_over = False
        if self.end is not None:
            left_s = self.end - self.grace_s - self.clock.wall()
            self.loop.call_at(self.clock.monotonic() + max(0.0, left_s), self._announce_end)

    # What happens ----------------------------------------------------------------------------

    def is_announcement(self, signum: int) -> bool:
        """Return whether this signal announces preemption; not after it said that time is over."""
        return self.signum is not None and signum == self.signum and not self._is_over

    def announced(self, signum: int) -> None:
        """Record the signal; one that comes again says that the time is over."""
        name, now = signal.Signals(signum).name, self.clock.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            self._announce("preempted", f"host {self.host} must go: {name} was received")
        elif now - self._signalled_at > SAME_SIGNAL_S:
            self._is_over = True
            logger.warning("%s was received again: ranks have no more time to save", name)
            self.post(GraceOver())

    def _announce_end(self) -> None:
        left_s = (self.end or 0.0) - self.clock.wall()
        self._announce(
            "time_limit", f"host {self.host} must go: its time is over in {left_s:.0f} s"
        )

    def _announce(self, kind: str, what: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            logger.warning("%s; ranks have %g s to save and leave", what, self.grace_s)
            self.post(Preempted(Cause(kind, what, host=self.host, detected_by="scheduler")))
            at = self.clock.monotonic() + self.grace_s
            self.loop.call_at(at, lambda: self.post(GraceOver()))

    def acknowledged(self) -> None:
        """Record that slots hold the last word."""
        if self._is_asked and self.monitor.is_save_acknowledged:
            self.loop.call_at(self.clock.monotonic() + SETTLE_S, self._report)

    def cycle_begins(self) -> None:
        """Forget what the ranks of an earlier cycle were asked."""
        if self._has_word:
            self._has_word = self._is_asked = False
            self.monitor.save(0)

    # What is done ----------------------------------------------------------------------------

    def ask(self, cause: Cause) -> None:
        """Hold ranks at `should_checkpoint`; pass the signal to workers that handle it."""
        logger.warning("ranks are asked to save and leave: %s", cause.what)
        self._is_asked = self._has_word = True
        self._asked_ranks = len(self.monitor.save_calls())
        self.monitor.save(SAVE_ASKED)
        self._pass_on()
        self.acknowledged()

    def release(self, at: int) -> None:
        """Tell the ranks at which call they save."""
        if self._has_word:
            logger.info("all ranks save at call %d of should_checkpoint", at)
            self.monitor.save(at)

    def _report(self) -> None:
        """Say how far the ranks are, which cannot go on from the next call on."""
        if not self._is_asked or not self.monitor.is_save_acknowledged:
            return
        calls = self.monitor.save_calls()
        # Ranks whose monitor died are seen when the next one has them. The grace time ends that.
        if len(calls) < min(self._asked_ranks, len(self.running_pids())):
            self.loop.call_at(self.clock.monotonic() + SETTLE_S, self._report)
            return
        self._is_asked = False
        self.post(RanksHeld(max(calls.values(), default=0)))

    def _pass_on(self) -> None:
        """Send the signal to workers that handle it: others would die of it unsaved."""
        if self.signum is None:
            return
        pids = self.running_pids()
        handling = [pid for pid in pids if procfs.catches_signal(pid, self.signum)]
        logger.info("%s is passed to %d of %d workers", self.signum.name, len(handling), len(pids))
        for pid in handling:
            with contextlib.suppress(ProcessLookupError):  # It has just left.
                os.kill(pid, self.signum)
