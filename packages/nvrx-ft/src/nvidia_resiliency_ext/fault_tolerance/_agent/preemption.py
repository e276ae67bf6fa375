# SPDX-License-Identifier: Apache-2.0
"""Announced preemption at work on one node: timers, the signal to workers, ranks that wait.

What follows from it is decided in `_agent/decide.py`; it learns through `post`.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._core.cause import Cause
from nvidia_resiliency_ext.fault_tolerance._core.preemption import (
    GraceOver,
    Preempted,
    RanksHeld,
    announce_at,
)
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import SAVE_ASKED
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

if TYPE_CHECKING:
    from .monitor_link import MonitorPerRank, SharedMonitor

logger = logging.getLogger("nvrx")

PreemptionEvent = Preempted | RanksHeld | GraceOver

# What a rank stored in a call is seen by others within nanoseconds, or at a switch of context.
SETTLE_S = 0.02
# A scheduler may reach a launcher twice, directly and through whoever started it.
SAME_SIGNAL_S = 1.0


@dataclass(eq=False)
class PreemptionController:
    """Announced preemption on one node. The loop's thread only.

    Args:
        signum: The signal that announces it, passed to workers that handle it; None: none does.
        grace_s: How long ranks may take to save and leave.
        end: When the job's time is over (unix s), or None.
    """

    loop: EventLoop
    clock: Clock
    _: KW_ONLY
    host: str
    signum: signal.Signals | None
    grace_s: float
    end: float | None

    def __post_init__(self) -> None:
        self._post: Callable[[PreemptionEvent], None] = lambda _: None
        self._monitor: SharedMonitor | MonitorPerRank | None = None
        self._running_pids: Callable[[], Collection[int]] = list
        self._is_asked = False
        self._asked_ranks = 0
        self._has_word = False
        self._is_reported = False
        self._signalled_at: float | None = None
        self._is_over = False

    def open(
        self,
        post: Callable[[PreemptionEvent], None],
        monitor: SharedMonitor | MonitorPerRank,
        running_pids: Callable[[], Collection[int]],
    ) -> None:
        """Begin: a deadline is waited for from now on."""
        self._post = post
        self._monitor = monitor
        self._running_pids = running_pids
        if self.end is not None:
            left_s = announce_at(self.end, self.grace_s) - self.clock.wall()
            self.loop.call_at(self.clock.monotonic() + max(0.0, left_s), self._announce_end)

    # What happens ----------------------------------------------------------------------------

    def is_announcement(self, signum: int) -> bool:
        """Return whether this signal announces preemption rather than asking for the end.

        It does so until it has said, a second time, that the time is over.
        """
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
            self._post(GraceOver())

    def _announce_end(self) -> None:
        left_s = (self.end or 0.0) - self.clock.wall()
        self._announce(
            "time_limit", f"host {self.host} must go: its time is over in {left_s:.0f} s"
        )

    def _announce(self, kind: str, what: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            logger.warning("%s; ranks have %g s to save and leave", what, self.grace_s)
            self._post(Preempted(Cause(kind, what, host=self.host, detected_by="scheduler")))

    def acknowledged(self) -> None:
        """Record that slots hold the last word."""
        assert self._monitor is not None
        if self._is_asked and self._monitor.is_save_acknowledged:
            self.loop.call_at(self.clock.monotonic() + SETTLE_S, self._report)

    def cycle_begins(self) -> None:
        """Forget what the ranks of an earlier cycle were asked."""
        if self._has_word:
            self._has_word = self._is_asked = False
            assert self._monitor is not None
            self._monitor.save(0)

    # What is done ----------------------------------------------------------------------------

    def start_grace(self) -> None:
        """Let the time run in which ranks may save and leave."""
        at = self.clock.monotonic() + self.grace_s
        self.loop.call_at(at, lambda: self._post(GraceOver()))

    def ask(self, cause: Cause) -> None:
        """Hold ranks at `should_checkpoint`; pass the signal to workers that handle it."""
        assert self._monitor is not None
        logger.warning("ranks are asked to save and leave: %s", cause.what)
        self._is_asked = self._has_word = True
        self._asked_ranks = len(self._monitor.save_calls())
        self._monitor.save(SAVE_ASKED)
        _pass_on(self.signum, self._running_pids())
        self.acknowledged()

    def release(self, at: int) -> None:
        """Tell the ranks at which call they save."""
        assert self._monitor is not None
        if self._has_word:
            logger.info("all ranks save at call %d of should_checkpoint", at)
            self._monitor.save(at)

    def _report(self) -> None:
        """Say how far the ranks are, which cannot go on from the next call on.

        Ranks whose monitor died are not seen until the next one has them: then `acknowledged` is
        called again, and they are waited for. The grace time ends that.
        """
        assert self._monitor is not None
        if not self._is_asked or not self._monitor.is_save_acknowledged:
            return
        calls = self._monitor.save_calls()
        if len(calls) < min(self._asked_ranks, len(self._running_pids())):
            self.loop.call_at(self.clock.monotonic() + SETTLE_S, self._report)
            return
        self._is_asked = False
        self._post(RanksHeld(max(calls.values(), default=0)))


def _pass_on(signum: signal.Signals | None, pids: Collection[int]) -> None:
    """Send the signal to workers that handle it: others would die of it without a checkpoint."""
    if signum is None:
        return
    handling = [pid for pid in pids if procfs.catches_signal(pid, signum)]
    logger.info("%s is passed to %d of %d workers", signum.name, len(handling), len(pids))
    for pid in handling:
        _send(pid, signum)


def _send(pid: int, signum: signal.Signals) -> None:
    import os

    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return  # It has just left.
