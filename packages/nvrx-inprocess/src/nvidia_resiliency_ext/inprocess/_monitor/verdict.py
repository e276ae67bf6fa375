# SPDX-License-Identifier: Apache-2.0
"""Decides from stamps and the time whether a rank is stuck, and what is done about it; no I/O.

`judge` takes what is remembered of a rank, one look at its page and the time, and returns what to
remember, what to do, and when to look again at the latest.
"""

from __future__ import annotations

import enum
import math
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.inprocess._monitor.page import Phase

if TYPE_CHECKING:
    from nvidia_resiliency_ext.inprocess._monitor.page import Stamps

__all__ = [
    "AskForStacks",
    "Effect",
    "GiveUp",
    "HardTimeout",
    "Limits",
    "SendSignals",
    "SoftTimeout",
    "Verdict",
    "Watch",
    "judge",
]

_SHORTEST_GRACE_S = 0.05
_STACKS_S = 0.5
_KILL_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The times of one call, in seconds."""

    soft_s: float
    hard_s: float
    grace_s: float
    interval_s: float

    @property
    def gap_s(self) -> float:
        """Time between two looks from which on we, and maybe the rank, were held up."""
        return max(self.soft_s / 2, 2 * self.interval_s)


class _Step(enum.Enum):
    NONE = enum.auto()
    TERMINATED = enum.auto()
    KILLED = enum.auto()
    GIVEN_UP = enum.auto()


@dataclass(frozen=True, slots=True)
class Watch:
    """What is remembered of a rank between two looks.

    Attributes:
        epoch: Epoch of the page at the last look.
        looked_s: When the last look was.
        calm_s: Stamps from before this moment count as made at it.
        interrupted_s: When the iteration was interrupted.
        is_soft_told: The soft timeout of this epoch was told.
        is_pardoned: We were held up, and no fresh stamp was seen since.
        asked_s: When the rank was asked for its stacks, which it may stamp after.
        step: How far killing has gone.
        step_s: When that step was taken.
    """

    epoch: int = -1
    looked_s: float = -math.inf
    calm_s: float = -math.inf
    interrupted_s: float | None = None
    is_soft_told: bool = False
    is_pardoned: bool = False
    asked_s: float | None = None
    step: _Step = _Step.NONE
    step_s: float = -math.inf

    @property
    def is_being_killed(self) -> bool:
        """Whether a signal was sent that ends it."""
        return self.step is not _Step.NONE


@dataclass(frozen=True, slots=True)
class SoftTimeout:
    """Ask for a restart."""


@dataclass(frozen=True, slots=True)
class HardTimeout:
    """Report it: from now on the rank is lost."""


@dataclass(frozen=True, slots=True)
class AskForStacks:
    """Look at the process, and have it write its stacks, before it is ended."""


@dataclass(frozen=True, slots=True)
class SendSignals:
    """Signal the process, in this order."""

    signals: tuple[signal.Signals, ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Even SIGKILL does not end the process: it counts as ended."""


Effect = SoftTimeout | HardTimeout | AskForStacks | SendSignals | GiveUp

_TERM = SendSignals((signal.SIGCONT, signal.SIGTERM))
_KILL = SendSignals((signal.SIGCONT, signal.SIGTERM, signal.SIGKILL))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one look.

    Attributes:
        watch: What to remember.
        effects: What to do.
        due_s: When something may be due next; infinite for nothing.
    """

    watch: Watch
    effects: tuple[Effect, ...] = ()
    due_s: float = math.inf


def judge(watch: Watch, stamps: Stamps, limits: Limits, now: float) -> Verdict:
    """Judge one rank by one look at its page.

    Args:
        watch: What the last verdict said to remember; for an interrupted iteration with
            `interrupted_s` filled in.
        stamps: The look.
        limits: The times.
        now: Seconds of the monotonic clock.
    """
    if watch.is_being_killed:
        return _go_on_killing(replace(watch, looked_s=now), limits, now)
    if stamps.epoch != watch.epoch:
        watch = Watch(epoch=stamps.epoch, looked_s=now, calm_s=now)
    if not stamps.is_protected or stamps.phase is Phase.IDLE:
        return Verdict(replace(watch, looked_s=now, calm_s=now, is_soft_told=False))
    watch = _pardon(watch, stamps, limits, now)
    base_s = _last_sign(watch, stamps)
    is_interrupted = watch.interrupted_s is not None
    if now >= base_s + limits.hard_s:
        # At the barrier, too: who waits there makes stamps, and the others wait for who does not.
        return _hard_timeout(watch, limits, now)
    watch = replace(watch, asked_s=None)
    if is_interrupted or watch.is_soft_told:
        return Verdict(watch, due_s=base_s + limits.hard_s)
    if now >= base_s + limits.soft_s:
        watch = replace(watch, is_soft_told=True)
        return Verdict(watch, (SoftTimeout(),), base_s + limits.hard_s)
    return Verdict(watch, due_s=base_s + limits.soft_s)


def _hard_timeout(watch: Watch, limits: Limits, now: float) -> Verdict:
    """Have the rank write its stacks; end it when it has had time for that and made no stamp."""
    if watch.asked_s is None:
        return Verdict(replace(watch, asked_s=now), (AskForStacks(),), now + _STACKS_S)
    due_s = watch.asked_s + _STACKS_S
    if now < due_s:
        return Verdict(watch, due_s=due_s)
    watch = replace(watch, step=_Step.TERMINATED, step_s=now)
    return Verdict(watch, (HardTimeout(), _TERM), now + _grace(limits))


def _pardon(watch: Watch, stamps: Stamps, limits: Limits, now: float) -> Watch:
    """Start the time again if we were held up: what held us up may have held the rank, too.

    Only once until the rank is heard of again, or a busy machine would hide a hang for ever.
    """
    fresh_s = max(stamps.auto_s, stamps.manual_s or 0.0)
    is_pardoned = watch.is_pardoned and fresh_s <= watch.calm_s
    if now - watch.looked_s > limits.gap_s and not is_pardoned:
        return replace(watch, looked_s=now, calm_s=now, is_pardoned=True)
    return replace(watch, looked_s=now, is_pardoned=is_pardoned)


def _last_sign(watch: Watch, stamps: Stamps) -> float:
    base_s = max(stamps.auto_s, watch.calm_s)
    if stamps.manual_s is None:
        return base_s
    # Whoever unwinds does not ping.
    interrupted_s = -math.inf if watch.interrupted_s is None else watch.interrupted_s
    return min(base_s, max(stamps.manual_s, watch.calm_s, interrupted_s))


def _go_on_killing(watch: Watch, limits: Limits, now: float) -> Verdict:
    if watch.step is _Step.TERMINATED:
        due_s = watch.step_s + _grace(limits)
        if now < due_s:
            return Verdict(watch, due_s=due_s)
        return Verdict(replace(watch, step=_Step.KILLED, step_s=now), (_KILL,), now + _KILL_AGAIN_S)
    due_s = watch.step_s + _KILL_AGAIN_S
    if now < due_s:
        return Verdict(watch, due_s=due_s)
    effects = (_KILL,) if watch.step is _Step.GIVEN_UP else (_KILL, GiveUp())
    return Verdict(replace(watch, step=_Step.GIVEN_UP, step_s=now), effects, now + _KILL_AGAIN_S)


def _grace(limits: Limits) -> float:
    return max(limits.grace_s, _SHORTEST_GRACE_S)
