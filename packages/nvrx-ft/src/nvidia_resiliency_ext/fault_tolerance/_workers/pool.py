# SPDX-License-Identifier: Apache-2.0
"""When prewarmed workers are started, replaced and given up. It starts nothing itself.

Slots, one per local rank:

| state | event | next | effect |
| --- | --- | --- | --- |
| empty | the pool may fill | warming | `StartPrewarm` |
| warming | `ready` | ready | |
| warming, ready, activated | `fail` | failed | counts against the pool |
| warming, ready | `activate` | activated | |
| warming, ready | `renew` (its files changed on disk) | empty | `EndPrewarm` |
| activated | `begin` (it runs its program) | activated | |
| activated | `end` (its process is gone, and it is no failure) | empty | |
| activated | `start_ranks` (of the next cycle) | empty | |
| activated, failed | the pool may fill and time is up | warming | `StartPrewarm` |
| any but activated | the pool is disabled or released | empty | `EndPrewarm` |

The pool fills from `FILL_DELAY_S` after the last "go", or from the first sign of a running step,
but never while ranks start: between `start_ranks` and `ranks_started`, until each worker that
was activated while it imported has begun, and for `FIRST_STEP_FACTOR` times as long again; workers
that started cold are given the time that the imports of such workers took. At most `width` warm up
at a time, or as many as there are processors that nothing else uses; before the first cycle all are
started at once. Where all workers of a cycle have their imports behind them, those processors are
used at once: the job waits for something else. A second failure within `FAILURE_WINDOW_S`, or too
little free memory, disables it; the next good step enables it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

FILL_DELAY_S = 2.0
# Wrapping the first model imports about as much again as `import torch`, before the first step.
FIRST_STEP_FACTOR = 1.5
FAILURE_WINDOW_S = 60.0
MEMORY_FACTOR = 2
# Ranks that do next to nothing leave their processor as good as idle.
_IDLE_SLACK = 0.3
# What torch and DistributedDataParallel take, until a prewarmed worker has reported its own figure.
EXPECTED_PREWARMED_BYTES = 224 << 20


class SlotState(enum.Enum):
    """Where the prewarmed worker of one local rank is."""

    EMPTY = "empty"
    WARMING = "warming"
    READY = "ready"
    ACTIVATED = "activated"
    FAILED = "failed"


_HELD = (SlotState.WARMING, SlotState.READY)


@dataclass(frozen=True, slots=True)
class StartPrewarm:
    """Start a prewarmed worker for the slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class EndPrewarm:
    """End the slot's standby."""

    slot: int


@dataclass(frozen=True, slots=True)
class Disable:
    """Workers start cold for now; log the reason once."""

    reason: str


Effects: TypeAlias = list[StartPrewarm | EndPrewarm | Disable]


@dataclass(eq=False)
class Pool:
    """The prewarmed workers of one node.

    A method takes an event at `now` (monotonic s) and returns what to do. One that does not fit the
    slot's state, such as a message of a standby that was ended meanwhile, changes nothing.

    Attributes:
        slots: State by local rank.
        width: How many may warm up at the same time next to running ranks.
        idle_width: How many may because nothing else uses the processors, as last reported.
        free_bytes: Memory that the node could still give, as last reported.
        disabled: Why workers start cold for now, or None.
        wanted: Whether the workers gain from prewarmed workers at all.
        refused: The command can never be started warm.
        first: No "go" has been given yet: nothing runs that a fill could disturb.
        is_starting: Workers are starting; they need the processors.
        importing: Slots that were activated and import still; they need the processors, too.
        import_s: The longest that workers took to begin which were activated while importing.
        activated_at: When the last "go" was given.
        is_warm: All workers of this cycle were prewarmed; when these have begun, none imports.
        has_stepped: A rank of this cycle has shown a sign of a running step.
        fill_at: Earliest time of the next fill; None = not before a sign of a running step.
        last_failure: When a prewarmed worker failed last.
        prewarmed_bytes: Private memory of one prewarmed worker, as the last one reported.
    """

    slots: list[SlotState]
    width: int
    idle_width: int = 0
    free_bytes: int | None = None
    disabled: str | None = None
    wanted: bool = True
    refused: bool = False
    first: bool = True
    is_starting: bool = False
    importing: set[int] = field(default_factory=set)
    import_s: float = 0.0
    activated_at: float = 0.0
    is_warm: bool = False
    has_stepped: bool = False
    fill_at: float | None = None
    last_failure: float | None = None
    prewarmed_bytes: int = EXPECTED_PREWARMED_BYTES

    @classmethod
    def of(cls, slots: int, cores: int) -> Pool:
        """Return the pool of a node before its first cycle."""
        return cls([SlotState.EMPTY] * slots, max(1, cores // 2))

    @property
    def may_fill(self) -> bool:
        """Whether prewarmed workers may be started, as far as it is not a question of time."""
        is_enabled = self.wanted and not self.refused and self.disabled is None
        return is_enabled and not self.is_starting and not self.importing

    @property
    def unheld(self) -> Sequence[int]:
        """Slots without a prewarmed worker."""
        return [slot for slot, state in enumerate(self.slots) if state not in _HELD]

    def prepare(self, now: float) -> Effects:
        """Start standbys for the first cycle, all at once: the launcher has just started."""
        return self._fill(now, self.unheld)

    def tick(self, now: float) -> Effects:
        """Fill what it is time for."""
        return self._fill(now)

    def idle(self, cores: float) -> None:
        """Take how many processors had nothing to do since the last look."""
        # Each that warms up has one processor, and would leave it idle, too.
        self.idle_width = int(cores + self.slots.count(SlotState.WARMING) + _IDLE_SLACK)

    def want(self, wanted: bool, now: float) -> Effects:
        """Take whether the running workers use what prewarmed workers import."""
        self.wanted = wanted
        return self._fill(now) if wanted else self._end_all()

    def refuse(self, reason: str) -> Effects:
        """Use no standbys from now on, for a reason that a good step does not change."""
        self.refused = True
        return self._disable(reason)

    def start_ranks(self) -> None:
        """Leave the processors to the workers of a cycle, which are about to start."""
        self.is_starting, self.has_stepped, self.idle_width = True, False, 0
        self.importing.clear()
        is_gone = SlotState.ACTIVATED
        self.slots = [SlotState.EMPTY if state is is_gone else state for state in self.slots]

    def ranks_started(self, now: float) -> Effects:
        """Record that all workers of the cycle have been started or activated."""
        self.is_starting = self.first = False
        self.is_warm = all(state is SlotState.ACTIVATED for state in self.slots)
        import_s = 0.0 if self.is_warm else self.import_s
        self.fill_at = now + import_s + _pause_s(import_s)
        return self._fill(now)

    def good_step(self, now: float) -> Effects:
        """Record that a rank sent a heartbeat or closed a section: the first of a cycle."""
        self.disabled, self.fill_at, self.has_stepped = None, now, True
        return self._fill(now)

    def ready(self, slot: int, private_bytes: int, now: float) -> Effects:
        """Record that the imports of a slot's prewarmed worker are done."""
        if self.slots[slot] is SlotState.WARMING:
            self.slots[slot] = SlotState.READY
            self.prewarmed_bytes = private_bytes or self.prewarmed_bytes
        return self._fill(now)

    def fail(self, slot: int, reason: str, now: float) -> Effects:
        """Record that a slot's prewarmed worker failed, died or must not be used."""
        if self.slots[slot] in (*_HELD, SlotState.ACTIVATED):
            # One that was activated while warming has no process any more either way.
            self.slots[slot] = SlotState.FAILED
            self.importing.discard(slot)
            last, self.last_failure = self.last_failure, now
            if last is not None and now - last <= FAILURE_WINDOW_S:
                return self._disable(f"standby workers failed twice within a minute: {reason}")
        return self._fill(now)

    def activate(self, slot: int, now: float) -> Effects:
        """Record that a slot's prewarmed worker was told to go: it is a worker, or will be."""
        if self.slots[slot] in _HELD:
            if self.slots[slot] is SlotState.WARMING:
                self.importing.add(slot)
            self.slots[slot] = SlotState.ACTIVATED
            self.activated_at, self.fill_at, self.first = now, now + FILL_DELAY_S, False
        return self._fill(now)

    def begin(self, slot: int, now: float) -> Effects:
        """Record that the worker from a slot's prewarmed worker runs its program."""
        if slot in self.importing:
            self.importing.discard(slot)
            import_s = now - self.activated_at
            self.import_s = max(import_s, self.import_s)
            if not self.has_stepped:
                self.fill_at = now + _pause_s(import_s)
        return self._fill(now)

    def end(self, slot: int, now: float) -> Effects:
        """Record that the process from a slot's standby is gone; the standby did not fail."""
        if self.slots[slot] is SlotState.ACTIVATED:
            self.slots[slot] = SlotState.EMPTY
            self.importing.discard(slot)
        return self._fill(now)

    def renew(self, slot: int, now: float) -> Effects:
        """Give up a slot's prewarmed worker whose files have changed on disk."""
        effects = self._end(slot) if self.slots[slot] in _HELD else []
        return effects + self._fill(now)

    def _end(self, slot: int) -> Effects:
        self.slots[slot] = SlotState.EMPTY
        return [EndPrewarm(slot)]

    def _end_all(self) -> Effects:
        held = [slot for slot, state in enumerate(self.slots) if state in _HELD]
        return [effect for slot in held for effect in self._end(slot)]

    def _disable(self, reason: str) -> Effects:
        effects: Effects = [] if self.disabled is not None else [Disable(reason)]
        self.disabled = self.disabled or reason
        return effects + self._end_all()

    def _fill(self, now: float, slots: Sequence[int] | None = None) -> Effects:
        """Start prewarmed workers for the slots, or for those whose time has come."""
        if not self.may_fill or (slots is None and self.first):
            return []
        if slots is None:
            is_time = self.fill_at is not None and now >= self.fill_at
            width = self.idle_width if is_time or self.is_warm else 0
            width = max(width, self.width) if is_time else width
            slots = self.unheld[: max(0, width - self.slots.count(SlotState.WARMING))]
        # What is held already is no longer free, so only the rest has to fit.
        needed = MEMORY_FACTOR * self.prewarmed_bytes * len(self.unheld)
        if slots and self.free_bytes is not None and self.free_bytes < needed:
            return self._disable(
                f"too little memory for standby workers: {self.free_bytes >> 20} MB free, "
                f"{needed >> 20} MB wanted"
            )
        for slot in slots:
            self.slots[slot] = SlotState.WARMING
        return [StartPrewarm(slot) for slot in slots]


def _pause_s(import_s: float) -> float:
    """Return how long workers that have imported are left alone."""
    return max(FILL_DELAY_S, FIRST_STEP_FACTOR * import_s)
