# SPDX-License-Identifier: Apache-2.0
"""Decide from stamps, leases and silence which rank, node or monitor is lost. Pure.

A lease is a counter: only its change between the observer's own looks counts, never its value or
another host's clock. Time in which the observer could not look counts against nobody.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from nvidia_resiliency_ext.inprocess._monitor.messages import MonitorSettings
from nvidia_resiliency_ext.inprocess._monitor.page import Phase, Stamps

_SHORTEST_GRACE_S = 0.05
_STACKS_S = 0.5
_KILL_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Watch:
    """State of a rank between two looks.

    Stamps from before `calm_s` count as made at it. `is_pardoned`: we were held up, and no fresh
    stamp was seen since. `asked_s`: when the rank was asked for its stacks. `signalled`: how often
    signals were sent that end it, SIGTERM first.
    """

    epoch: int = -1
    looked_s: float = -math.inf
    calm_s: float = -math.inf
    interrupted_s: float | None = None
    is_soft_notified: bool = False
    is_pardoned: bool = False
    asked_s: float | None = None
    signalled: int = 0
    signalled_s: float = -math.inf

    @property
    def is_being_killed(self) -> bool:
        return self.signalled > 0


class Effect(enum.Enum):
    """An action on a rank: `TERM` and `KILL` mean the signals of `SIGNALS`, in their order."""

    SOFT_TIMEOUT = "SoftTimeout"
    """Ask for a restart."""
    ASK_FOR_STACKS = "AskForStacks"
    """Look at the process, and have it write its stacks, before it is ended."""
    HARD_TIMEOUT = "HardTimeout"
    """Report it: from now on the rank is lost."""
    TERM = "SIGTERM"
    KILL = "SIGKILL"
    GIVE_UP = "GiveUp"
    """Even SIGKILL does not end the process: it counts as ended."""


SIGNALS = {
    Effect.TERM: (signal.SIGCONT, signal.SIGTERM),
    Effect.KILL: (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL),
}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of one look: the new state, the actions, and the next due time."""

    watch: Watch
    effects: tuple[Effect, ...] = ()
    due_s: float = math.inf


def evaluate(watch: Watch, stamps: Stamps, limits: MonitorSettings, now: float) -> Evaluation:
    """Evaluate one rank by one look at its page."""
    if watch.is_being_killed:
        return _go_on_killing(replace(watch, looked_s=now), limits, now)
    if stamps.epoch != watch.epoch:
        watch = Watch(epoch=stamps.epoch, looked_s=now, calm_s=now)
    if not stamps.is_protected or stamps.phase is Phase.IDLE:
        return Evaluation(replace(watch, looked_s=now, calm_s=now, is_soft_notified=False))
    watch = _pardon(watch, stamps, limits, now)
    base_s = _last_sign(watch, stamps)
    is_interrupted = watch.interrupted_s is not None
    if now >= base_s + limits.hard_timeout_s:
        # At the barrier, too: who waits there makes stamps, and the others wait for who does not.
        return _hard_timeout(watch, limits, now)
    watch = replace(watch, asked_s=None)
    if is_interrupted or watch.is_soft_notified:
        return Evaluation(watch, due_s=base_s + limits.hard_timeout_s)
    if now >= base_s + limits.soft_timeout_s:
        watch = replace(watch, is_soft_notified=True)
        return Evaluation(watch, (Effect.SOFT_TIMEOUT,), base_s + limits.hard_timeout_s)
    return Evaluation(watch, due_s=base_s + limits.soft_timeout_s)


def _hard_timeout(watch: Watch, limits: MonitorSettings, now: float) -> Evaluation:
    """Have the rank write its stacks; end it when it has had time for that and made no stamp."""
    if watch.asked_s is None:
        return Evaluation(replace(watch, asked_s=now), (Effect.ASK_FOR_STACKS,), now + _STACKS_S)
    due_s = watch.asked_s + _STACKS_S
    if now < due_s:
        return Evaluation(watch, due_s=due_s)
    watch = replace(watch, signalled=1, signalled_s=now)
    return Evaluation(watch, (Effect.HARD_TIMEOUT, Effect.TERM), now + _grace(limits))


def _pardon(watch: Watch, stamps: Stamps, limits: MonitorSettings, now: float) -> Watch:
    """Start the time again, once per stamp, if we were held up: the rank may have been, too."""
    fresh_s = max(stamps.auto_s, stamps.manual_s or 0.0)
    is_pardoned = watch.is_pardoned and fresh_s <= watch.calm_s
    gap_s = max(limits.soft_timeout_s / 2, 2 * limits.interval_s)
    if now - watch.looked_s > gap_s and not is_pardoned:
        return replace(watch, looked_s=now, calm_s=now, is_pardoned=True)
    return replace(watch, looked_s=now, is_pardoned=is_pardoned)


def _last_sign(watch: Watch, stamps: Stamps) -> float:
    base_s = max(stamps.auto_s, watch.calm_s)
    if stamps.manual_s is None:
        return base_s
    # A function that unwinds does not ping.
    interrupted_s = -math.inf if watch.interrupted_s is None else watch.interrupted_s
    return min(base_s, max(stamps.manual_s, watch.calm_s, interrupted_s))


def _go_on_killing(watch: Watch, limits: MonitorSettings, now: float) -> Evaluation:
    due_s = watch.signalled_s + (_grace(limits) if watch.signalled == 1 else _KILL_AGAIN_S)
    if now < due_s:
        return Evaluation(watch, due_s=due_s)
    is_second_kill = watch.signalled == 2  # noqa: PLR2004 - after SIGTERM and SIGKILL
    effects = (Effect.KILL, Effect.GIVE_UP) if is_second_kill else (Effect.KILL,)
    watch = replace(watch, signalled=watch.signalled + 1, signalled_s=now)
    return Evaluation(watch, effects, now + _KILL_AGAIN_S)


def _grace(limits: MonitorSettings) -> float:
    return max(limits.termination_grace_s, _SHORTEST_GRACE_S)


class Ring:
    """The nodes of a call, each of which watches the next."""

    def __init__(self, interval_s: float, timeout_s: float, unknown_s: float = math.inf) -> None:
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._unknown_limit_s = unknown_s
        self._unknown_s: dict[int, float] = {}
        self._asked_s = -math.inf
        self._nodes: dict[int, frozenset[int]] = {}
        self._leases: dict[int, tuple[int, float]] = {}  # value, and seconds without a change
        self._lost: set[int] = set()
        self._looked_s = -math.inf
        self._is_suspicious = False

    def update(self, nodes: Mapping[int, Iterable[int]]) -> None:
        self._nodes = {node_id: frozenset(ranks) for node_id, ranks in nodes.items()}

    def covers(self, ranks: Collection[int]) -> bool:
        """Return whether the node of each of the ranks is known."""
        return self._known.issuperset(ranks)

    def unknown(self, ranks: Collection[int], now: float) -> list[int]:
        """Return ranks that were on none of the nodes, just asked for, for too long."""
        passed_s = min(now - self._asked_s, 2 * self._interval_s)
        self._asked_s = now
        known, before = self._known, self._unknown_s
        self._unknown_s = {
            rank: before[rank] + passed_s if rank in before else 0.0
            for rank in sorted(ranks)
            if rank not in known
        }
        return [rank for rank, for_s in self._unknown_s.items() if for_s >= self._unknown_limit_s]

    @property
    def _known(self) -> frozenset[int]:
        return frozenset[int]().union(*self._nodes.values())

    def to_read(self, own_id: int, participants: Collection[int]) -> list[int]:
        """Return the nodes whose leases must be read: the next, or all when that is late."""
        others = [
            node_id
            for node_id, ranks in sorted(self._nodes.items())
            if node_id != own_id
            and node_id not in self._lost
            and not ranks.isdisjoint(participants)
        ]
        if self._is_suspicious or not others:
            return others
        return [next((node_id for node_id in others if node_id > own_id), others[0])]

    def looked(self, values: Mapping[int, int], now: float) -> list[int]:
        """Record the leases read in one look; return the ranks of nodes that are lost now."""
        # A look that took long shows that the store was slow: for the others, too.
        passed_s = min(now - self._looked_s, 2 * self._interval_s)
        self._looked_s = now
        self._is_suspicious = False
        lost_ranks: list[int] = []
        before, self._leases = self._leases, {}
        for node_id, value in values.items():
            known, unchanged_s = before.get(node_id, (value, -passed_s))
            unchanged_s = unchanged_s + passed_s if known == value else 0.0
            self._leases[node_id] = value, unchanged_s
            if unchanged_s >= self._timeout_s:
                self._lost.add(node_id)
                lost_ranks += sorted(self._nodes.get(node_id, ()))
            elif unchanged_s >= self._timeout_s / 2:
                self._is_suspicious = True
        return lost_ranks


_SHORTEST_STOPPED_S = 1.0

# It may be importing torch, during which nothing else runs in it.
_SHORTEST_MUTE_S = 60.0
_QUESTIONS = 4


class Silence:
    """Count for how long one monitor has sent nothing.

    Another one is needed after `stopped_s` if the kernel shows it as stopped: early enough before
    other nodes give this one up.
    """

    def __init__(self, heartbeat_timeout_s: float, now: float) -> None:
        self._stopped_s = max(heartbeat_timeout_s / 3, _SHORTEST_STOPPED_S)
        self._mute_s = max(heartbeat_timeout_s, _SHORTEST_MUTE_S)
        # How long to wait for a message before asking again.
        self.interval_s = self._stopped_s / _QUESTIONS
        self._looked_s = now
        self.seconds = 0.0

    def received(self, now: float) -> None:
        self._looked_s = now
        self.seconds = 0.0

    def missed(self, now: float) -> None:
        """Count time without a message; no look counts for more than two intervals."""
        passed_s = now - self._looked_s
        self._looked_s = now
        self.seconds += min(passed_s, 2 * self.interval_s)

    def is_over(self, *, is_stopped: bool) -> bool:
        """Return whether another monitor is needed."""
        return self.seconds >= (self._stopped_s if is_stopped else self._mute_s)
