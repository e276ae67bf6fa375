# SPDX-License-Identifier: Apache-2.0
"""When prewarmed workers are started, replaced and given up. Pure; it starts nothing itself.

Slots, one per local rank:

| state | event | next | effect |
| --- | --- | --- | --- |
| empty | the pool may fill | warming | `StartPrewarm` |
| warming | `PrewarmReady` | ready | |
| warming, ready | `PrewarmFailed` | failed | counts against the pool |
| warming, ready | `Gone` (activated) | activated | |
| ready | `Stale` (its files changed on disk) | empty | `EndPrewarm` |
| activated | `Begun` (it runs its program) | activated | |
| activated | `Ended` (its process is gone, and it is no failure) | empty | |
| activated | `RANKS_STARTING` (of the next cycle) | empty | |
| activated, failed | the pool may fill and time is up | warming | `StartPrewarm` |
| any but activated | the pool is disabled or released | empty | `EndPrewarm` |

The pool fills from `FILL_DELAY_S` after the last "go", or from the first sign of a running step,
but never while ranks start: between `RANKS_STARTING` and `RANKS_STARTED`, until each worker that
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
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True, slots=True)
class Pool:
    """The prewarmed workers of one node.

    Attributes:
        slots: State by local rank.
        width: How many may warm up at the same time next to running ranks.
        idle_width: How many may because nothing else uses the processors, as last reported.
        disabled: Why workers start cold for now, or None.
        wanted: Whether the workers gain from prewarmed workers at all.
        refused: The command can never be started warm.
        first: No "go" has been given yet: nothing runs that a fill could disturb.
        ranks_starting: Workers are starting; they need the processors.
        importing: Slots that were activated and import still; they need the processors, too.
        import_s: The longest that workers took to begin which were activated while importing.
        activated_at: When the last "go" was given.
        is_warm: All workers of this cycle were prewarmed; when these have begun, none imports.
        has_stepped: A rank of this cycle has shown a sign of a running step.
        fill_at: Earliest time of the next fill; None = not before a sign of a running step.
        last_failure: When a prewarmed worker failed last.
        prewarmed_bytes: Private memory of one prewarmed worker, as the last one reported.
        free_bytes: Memory that the node could still give, as last reported.
    """

    slots: tuple[SlotState, ...]
    width: int
    idle_width: int = 0
    disabled: str | None = None
    wanted: bool = True
    refused: bool = False
    first: bool = True
    ranks_starting: bool = False
    importing: frozenset[int] = frozenset()
    import_s: float = 0.0
    activated_at: float = 0.0
    is_warm: bool = False
    has_stepped: bool = False
    fill_at: float | None = None
    last_failure: float | None = None
    prewarmed_bytes: int = EXPECTED_PREWARMED_BYTES
    free_bytes: int | None = None

    @classmethod
    def of(cls, slots: int, cores: int) -> Pool:
        """Return the pool of a node before its first cycle."""
        return cls((SlotState.EMPTY,) * slots, max(1, cores // 2))

    @property
    def is_missing_some(self) -> bool:
        """Whether prewarmed workers could be started that are not."""
        return self.may_fill and bool(_unheld(self))

    @property
    def may_fill(self) -> bool:
        """Whether prewarmed workers may be started, as far as it is not a question of time."""
        starting = self.ranks_starting or bool(self.importing)
        blocked = self.refused or self.disabled is not None or starting
        return self.wanted and not blocked


class Happened(enum.Enum):
    """An event without further content."""

    PREPARE = "the launcher has just started: start standbys for the first cycle, all at once"
    TICK = "time has passed"
    RANKS_STARTING = "the launcher begins to start workers of a cycle"
    RANKS_STARTED = "all workers of the cycle have been started or activated"
    GOOD_STEP = "a rank sent its first heartbeat or closed its first section; once a cycle"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Whether the running workers use what prewarmed workers import."""

    wanted: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """The node's available memory in bytes; it fills nothing itself."""

    free_bytes: int


@dataclass(frozen=True, slots=True)
class Idle:
    """How many processors had nothing to do since the last look; it fills nothing itself."""

    cores: float


@dataclass(frozen=True, slots=True)
class PrewarmReady:
    """The imports of a slot's prewarmed worker are done."""

    slot: int
    private_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PrewarmFailed:
    """A slot's prewarmed worker failed, died or must not be used."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A slot's prewarmed worker was activated: it is a worker now, or will be."""

    slot: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The worker that came from a slot's prewarmed worker runs its program."""

    slot: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The process that came from a slot's standby is gone, and no failure of the standby."""

    slot: int


@dataclass(frozen=True, slots=True)
class Stale:
    """The interpreter or a package changed on disk since a slot's prewarmed worker was started."""

    slot: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Standbys cannot be used from now on, for a reason that a good step does not change."""

    reason: str


Event = (
    Happened | Wanted | Memory | Idle | PrewarmReady
    | PrewarmFailed | Gone | Begun | Ended | Stale | Refused
)  # fmt: skip


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


Effect = StartPrewarm | EndPrewarm | Disable

_HELD = (SlotState.WARMING, SlotState.READY)


@dataclass(slots=True)
class _Draft:
    pool: Pool
    effects: list[Effect] = field(default_factory=list)

    def set_slot(self, slot: int, state: SlotState) -> None:
        slots = list(self.pool.slots)
        slots[slot] = state
        self.pool = replace(self.pool, slots=tuple(slots))

    def change(self, **values: object) -> None:
        self.pool = replace(self.pool, **values)  # type: ignore[arg-type]

    def end_all(self) -> None:
        for slot, state in enumerate(self.pool.slots):
            if state in _HELD:
                self.set_slot(slot, SlotState.EMPTY)
                self.effects.append(EndPrewarm(slot))

    def disable(self, reason: str) -> None:
        if self.pool.disabled is None:
            self.effects.append(Disable(reason))
            self.change(disabled=reason)
        self.end_all()


def step(pool: Pool, event: Event, now: float) -> tuple[Pool, tuple[Effect, ...]]:
    """Return the pool after an event, and what to do."""
    draft = _Draft(pool)
    match event:
        case PrewarmReady() | PrewarmFailed() | Gone() | Begun() | Ended() | Stale():
            _slot_event(draft, event, now)
        case Refused(reason):
            draft.change(refused=True)
            draft.disable(reason)
        case Wanted(wanted):
            draft.change(wanted=wanted)
            if not wanted:
                draft.end_all()
        case Happened.GOOD_STEP:
            draft.change(disabled=None, fill_at=now, has_stepped=True)
        case Happened.RANKS_STARTING:
            draft.change(
                ranks_starting=True, importing=frozenset(), has_stepped=False, idle_width=0
            )
            for slot, state in enumerate(pool.slots):
                if state is SlotState.ACTIVATED:
                    draft.set_slot(slot, SlotState.EMPTY)
        case Happened.RANKS_STARTED:
            is_warm = all(state is SlotState.ACTIVATED for state in pool.slots)
            import_s = 0.0 if is_warm else pool.import_s
            fill_at = now + import_s + _pause_s(import_s)
            draft.change(ranks_starting=False, first=False, is_warm=is_warm, fill_at=fill_at)
        case Memory() | Idle():
            return _with_machine(pool, event), ()
        case Happened.PREPARE | Happened.TICK:
            pass
    _fill(draft, now, prepare=event is Happened.PREPARE)
    return draft.pool, tuple(draft.effects)


def _with_machine(pool: Pool, event: Memory | Idle) -> Pool:
    if isinstance(event, Memory):
        return replace(pool, free_bytes=event.free_bytes)
    # Each that warms up has one processor, and would leave it idle, too.
    return replace(pool, idle_width=int(event.cores + _warming(pool) + _IDLE_SLACK))


def _slot_event(
    draft: _Draft, event: PrewarmReady | PrewarmFailed | Gone | Begun | Ended | Stale, now: float
) -> None:
    state = draft.pool.slots[event.slot]
    match event:
        case PrewarmReady(slot, private_bytes) if state is SlotState.WARMING:
            draft.set_slot(slot, SlotState.READY)
            if private_bytes:
                draft.change(prewarmed_bytes=private_bytes)
        case PrewarmFailed(slot, reason) if state in _HELD or state is SlotState.ACTIVATED:
            # One that was activated while warming has no process any more either way.
            draft.set_slot(slot, SlotState.FAILED)
            draft.change(importing=draft.pool.importing - {slot})
            last = draft.pool.last_failure
            draft.change(last_failure=now)
            if last is not None and now - last <= FAILURE_WINDOW_S:
                draft.disable(f"standby workers failed twice within a minute: {reason}")
        case Gone(slot) if state in _HELD:
            draft.set_slot(slot, SlotState.ACTIVATED)
            if state is SlotState.WARMING:
                draft.change(importing=draft.pool.importing | {slot})
            draft.change(activated_at=now, fill_at=now + FILL_DELAY_S, first=False)
        case Begun(slot) if slot in draft.pool.importing:
            import_s = now - draft.pool.activated_at
            draft.change(
                importing=draft.pool.importing - {slot}, import_s=max(import_s, draft.pool.import_s)
            )
            if not draft.pool.has_stepped:
                draft.change(fill_at=now + _pause_s(import_s))
        case Ended(slot) if state is SlotState.ACTIVATED:
            draft.set_slot(slot, SlotState.EMPTY)
            draft.change(importing=draft.pool.importing - {slot})
        case Stale(slot) if state in _HELD:
            draft.set_slot(slot, SlotState.EMPTY)
            draft.effects.append(EndPrewarm(slot))
        case _:
            pass  # A message of a standby that was ended meanwhile.


def _pause_s(import_s: float) -> float:
    """Return how long workers that have imported are left alone."""
    return max(FILL_DELAY_S, FIRST_STEP_FACTOR * import_s)


def _check_memory(draft: _Draft) -> None:
    pool = draft.pool
    # What is held already is no longer free, so only the rest has to fit.
    missing = sum(state not in _HELD for state in pool.slots)
    needed = MEMORY_FACTOR * pool.prewarmed_bytes * missing
    if pool.free_bytes is not None and pool.free_bytes < needed:
        draft.disable(
            f"too little memory for standby workers: {pool.free_bytes >> 20} MB free, "
            f"{needed >> 20} MB wanted"
        )


def _next_slots(pool: Pool, width: int) -> Sequence[int]:
    free_width = max(width, pool.idle_width) - _warming(pool)
    return _unheld(pool)[: max(0, free_width)]


def _warming(pool: Pool) -> int:
    return sum(state is SlotState.WARMING for state in pool.slots)


def _unheld(pool: Pool) -> Sequence[int]:
    return [slot for slot, state in enumerate(pool.slots) if state not in _HELD]


def _fill(draft: _Draft, now: float, *, prepare: bool) -> None:
    pool = draft.pool
    if not pool.may_fill:
        return
    if prepare:
        chosen = _unheld(pool)
    elif pool.first:
        return
    elif pool.fill_at is not None and now >= pool.fill_at:
        chosen = _next_slots(pool, pool.width)
    else:
        chosen = _next_slots(pool, 0) if pool.is_warm else ()
    if not chosen:
        return
    _check_memory(draft)
    if draft.pool.disabled is None:
        for slot in chosen:
            draft.set_slot(slot, SlotState.WARMING)
            draft.effects.append(StartPrewarm(slot))
