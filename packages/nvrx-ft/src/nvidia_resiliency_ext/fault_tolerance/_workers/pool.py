# SPDX-License-Identifier: Apache-2.0
"""When prewarmed workers are started, replaced and given up; its owner starts and ends them.

Slots, one per local rank:

| state | event | next | call |
| --- | --- | --- | --- |
| empty | the pool may fill | warming | `start` |
| warming | `ready` | ready | |
| warming, ready, activated | `fail` | failed | `end`; it counts against the pool |
| warming, ready | `activate` | activated | |
| warming, ready | `renew` (its files changed on disk) | empty | `end` |
| activated | `begin` (it runs its program) | activated | |
| activated | `gone` (its process is gone, and it is no failure) | empty | |
| activated | `start_ranks` (of the next cycle) | empty | |
| activated, failed | the pool may fill and time is up | warming | `start` |
| warming, ready | the pool is refused, or no longer wanted (`want(False)`) | empty | `end` |

The pool fills from `FILL_DELAY_S` after the last "go", or from the first sign of a running step,
but never while ranks start: between `start_ranks` and `ranks_started`, until each worker that
was activated while it imported has begun, and for `FIRST_STEP_FACTOR` times as long again; workers
that started cold are given the time that such imports took. At most `width` warm up at a time, or
as many as there are processors that nothing else uses; these are used at once where all workers of
a cycle have imported. A second failure within `FAILURE_WINDOW_S`, or too little free memory,
disables it; the next good step enables it.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nvidia_resiliency_ext.shared_utils.clock import Clock

logger = logging.getLogger("nvrx")

FILL_DELAY_S = 2.0
# Wrapping the first model imports about as much again as `import torch`, before the first step.
FIRST_STEP_FACTOR = 1.5
FAILURE_WINDOW_S = 60.0
MEMORY_FACTOR = 2
_IDLE_SLACK = 0.3  # Ranks that do next to nothing leave their processor as good as idle.
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


@dataclass(eq=False)
class Pool:
    """The prewarmed workers of one node.

    A method takes an event. One that does not fit the slot's state, such as a message of a standby
    that was ended meanwhile, changes nothing.
    """

    slots: list[SlotState]  # By local rank.
    width: int  # How many may warm up at the same time next to running ranks.
    clock: Clock
    start: Callable[[int], None]  # Calls `fail` where that cannot be done.
    end: Callable[[int], None]  # Ends a slot's prewarmed worker, if there is one.
    idle_width: int = 0  # How many may because nothing else uses the processors.
    free_bytes: int | None = None  # Memory that the node could still give, as last reported.
    disabled: str | None = None  # Why workers start cold for now.
    wanted: bool = True  # Whether the workers gain from prewarmed workers at all.
    refused: str | None = None  # Why the command can never be started warm.
    first: bool = True  # No "go" has been given yet: nothing runs that a fill could disturb.
    is_starting: bool = False  # Workers are starting; they need the processors.
    importing: set[int] = field(default_factory=set)  # Activated, and these need them, too.
    import_s: float = 0.0  # The longest that one took to begin which was activated importing.
    activated_at: float = 0.0
    is_warm: bool = False  # All workers of this cycle were prewarmed: once begun, none imports.
    has_stepped: bool = False  # A rank of this cycle has shown a sign of a running step.
    fill_at: float | None = None  # None: not before a sign of a running step.
    last_failure: float | None = None
    prewarmed_bytes: int = EXPECTED_PREWARMED_BYTES  # Private memory of one, as last reported.

    @property
    def may_fill(self) -> bool:
        """Whether prewarmed workers may be started, as far as it is not a question of time."""
        is_enabled = self.wanted and self.refused is None and self.disabled is None
        return is_enabled and not self.is_starting and not self.importing

    @property
    def unheld(self) -> Sequence[int]:
        return [slot for slot, state in enumerate(self.slots) if state not in _HELD]

    def prepare(self) -> None:
        """Start standbys for the first cycle, all at once: the launcher has just started."""
        self._fill(self.unheld)

    def idle(self, cores: float) -> None:
        """Take how many processors had nothing to do since the last look."""
        # Each that warms up has one processor, and would leave it idle, too.
        self.idle_width = int(cores + self.slots.count(SlotState.WARMING) + _IDLE_SLACK)

    def want(self, wanted: bool) -> None:
        """Keep prewarmed workers only if the running workers use the modules they import."""
        self.wanted = wanted
        if not wanted:
            self._end_all()
        self._fill()

    def refuse(self, reason: str) -> None:
        """Use no standbys from now on, for a reason that a good step does not change."""
        self.refused = reason
        self._disable(reason)

    def start_ranks(self) -> None:
        """Leave the processors to the workers of a cycle, which are about to start."""
        self.is_starting, self.has_stepped, self.idle_width = True, False, 0
        self.importing.clear()
        is_gone = SlotState.ACTIVATED
        self.slots = [SlotState.EMPTY if state is is_gone else state for state in self.slots]

    def ranks_started(self) -> None:
        """Record that all workers of the cycle have been started or activated."""
        self.is_starting = self.first = False
        self.is_warm = all(state is SlotState.ACTIVATED for state in self.slots)
        import_s = 0.0 if self.is_warm else self.import_s
        self.fill_at = self.clock.monotonic() + import_s + _pause_s(import_s)
        self._fill()

    def good_step(self) -> None:
        """Record that a rank sent a heartbeat or closed a section: the first of a cycle."""
        self.disabled, self.fill_at, self.has_stepped = None, self.clock.monotonic(), True
        self._fill()

    def ready(self, slot: int, private_bytes: int) -> None:
        if self.slots[slot] is SlotState.WARMING:
            self.slots[slot] = SlotState.READY
            self.prewarmed_bytes = private_bytes or self.prewarmed_bytes
        self._fill()

    def fail(self, slot: int, reason: str) -> None:
        """Record that a slot's prewarmed worker failed, died or must not be used."""
        state = self.slots[slot]
        if state in (*_HELD, SlotState.ACTIVATED):
            # One that was activated while warming has no process any more either way.
            self.slots[slot] = SlotState.FAILED
            self.importing.discard(slot)
            if state in _HELD:
                self.end(slot)
            last, self.last_failure = self.last_failure, self.clock.monotonic()
            if last is not None and self.last_failure - last <= FAILURE_WINDOW_S:
                self._disable(f"standby workers failed twice within a minute: {reason}")
        self._fill()

    def activate(self, slot: int) -> None:
        """Record that a slot's prewarmed worker was told to go: it is a worker, or will be."""
        if self.slots[slot] in _HELD:
            if self.slots[slot] is SlotState.WARMING:
                self.importing.add(slot)
            self.slots[slot] = SlotState.ACTIVATED
            self.activated_at, self.first = self.clock.monotonic(), False
            self.fill_at = self.activated_at + FILL_DELAY_S
        self._fill()

    def begin(self, slot: int) -> None:
        """Record that the worker from a slot's prewarmed worker runs its program."""
        if slot in self.importing:
            self.importing.discard(slot)
            now = self.clock.monotonic()
            import_s = now - self.activated_at
            self.import_s = max(import_s, self.import_s)
            if not self.has_stepped:
                self.fill_at = now + _pause_s(import_s)
        self._fill()

    def gone(self, slot: int) -> None:
        """Record that the process from a slot's standby is gone; the standby did not fail."""
        if self.slots[slot] is SlotState.ACTIVATED:
            self.slots[slot] = SlotState.EMPTY
            self.importing.discard(slot)
        self._fill()

    def renew(self, slot: int) -> None:
        """Give up a slot's prewarmed worker whose files have changed on disk."""
        self._end(slot)
        self._fill()

    def _end(self, slot: int) -> None:
        if self.slots[slot] in _HELD:
            self.slots[slot] = SlotState.EMPTY
            self.end(slot)

    def _end_all(self) -> None:
        for slot in range(len(self.slots)):
            self._end(slot)

    def _disable(self, reason: str) -> None:
        if self.disabled is None:
            self.disabled = reason
            logger.info("workers start cold from now on: %s", reason)
        self._end_all()

    def _fill(self, slots: Sequence[int] | None = None) -> None:
        """Start prewarmed workers for the slots, or for those whose time has come."""
        if not self.may_fill or (slots is None and self.first):
            return
        if slots is None:
            is_time = self.fill_at is not None and self.clock.monotonic() >= self.fill_at
            width = self.idle_width if is_time or self.is_warm else 0
            width = max(width, self.width) if is_time else width
            slots = self.unheld[: max(0, width - self.slots.count(SlotState.WARMING))]
        # What is held already is no longer free, so only the rest has to fit.
        needed = MEMORY_FACTOR * self.prewarmed_bytes * len(self.unheld)
        if slots and self.free_bytes is not None and self.free_bytes < needed:
            self._disable(
                f"too little memory for standby workers: {self.free_bytes >> 20} MB free, "
                f"{needed >> 20} MB wanted"
            )
            return
        for slot in slots:
            self.slots[slot] = SlotState.WARMING
        for slot in slots:
            if self.slots[slot] is SlotState.WARMING:  # One before it may have failed for all.
                self.start(slot)


def _pause_s(import_s: float) -> float:
    """Return how long workers that have imported are left alone."""
    return max(FILL_DELAY_S, FIRST_STEP_FACTOR * import_s)
