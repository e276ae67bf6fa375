# SPDX-License-Identifier: Apache-2.0
"""When standbys are started, replaced and given up: the table of the pool and random walks."""

import copy
import dataclasses
import random
from unittest.mock import Mock

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent.prewarm import PrewarmStarter
from nvidia_resiliency_ext.fault_tolerance._plan.plan import plan_from_args
from nvidia_resiliency_ext.fault_tolerance._workers import pool as pools
from nvidia_resiliency_ext.fault_tolerance._workers import prewarmed
from nvidia_resiliency_ext.fault_tolerance._workers.pool import Pool, SlotState
from nvidia_resiliency_ext.fault_tolerance.cli_args import parse_args
from nvidia_resiliency_ext.shared_utils.clock import SystemClock


@dataclasses.dataclass(frozen=True)
class StartPrewarm:
    """The pool has a prewarmed worker started."""

    slot: int


@dataclasses.dataclass(frozen=True)
class EndPrewarm:
    """The pool has a prewarmed worker ended."""

    slot: int


@dataclasses.dataclass(frozen=True)
class Disable:
    """The pool has given up for now."""

    reason: str


class Crew:
    """Records what a pool has done, and has its time; copied with the pool."""

    def __init__(self):
        self.done, self.now = [], 0.0

    def monotonic(self):
        return self.now

    def start(self, slot):
        self.done.append(StartPrewarm(slot))

    def end(self, slot):
        self.done.append(EndPrewarm(slot))


def pool_of(slots, cores):
    """Return the pool of a node before its first cycle."""
    crew = Crew()
    return Pool([SlotState.EMPTY] * slots, max(1, cores // 2), crew, crew.start, crew.end)


class Event:
    """A call of one of the pool's methods."""

    def __init__(self, method, *args):
        self.method, self.args = method, args

    def __repr__(self):
        return f"{self.method}{self.args}"


def event_of(method):
    """Return what makes an event of the arguments."""
    return lambda *args: Event(method, *args)


PREPARE, TICK = Event("prepare"), Event("want", True)
RANKS_STARTING = Event("start_ranks")
RANKS_STARTED, GOOD_STEP = Event("ranks_started"), Event("good_step")
PrewarmReady, PrewarmFailed, Gone = event_of("ready"), event_of("fail"), event_of("activate")
Begun, Ended, Stale, Wanted = (event_of(name) for name in ("begin", "gone", "renew", "want"))
Refused, Idle = event_of("refuse"), event_of("idle")
Memory = event_of("free_bytes")


def step(pool, event, now):
    """Return another pool, after an event, and what it has done."""
    pool = copy.deepcopy(pool)
    if event.method == "free_bytes":
        pool.free_bytes = event.args[0]
        return pool, ()
    was_disabled = pool.disabled
    pool.clock.now, pool.clock.done = now, []
    getattr(pool, event.method)(*event.args)
    is_new = pool.disabled is not None and was_disabled is None
    return pool, (*([Disable(pool.disabled)] if is_new else []), *pool.clock.done)


EMPTY, WARMING, READY = SlotState.EMPTY, SlotState.WARMING, SlotState.READY
ACTIVATED, FAILED = SlotState.ACTIVATED, SlotState.FAILED


def after(pool, *events, now=0.0):
    """Return the pool and all effects after events, each (event) or (event, time)."""
    effects = []
    for entry in events:
        event, at = entry if isinstance(entry, tuple) else (entry, now)
        pool, more = step(pool, event, at)
        effects += more
    return pool, effects


def running(slots=4, cores=4):
    """Return a pool whose first cycle was started at time 0 from standbys."""
    pool = pool_of(slots, cores)
    pool, _ = after(pool, PREPARE, RANKS_STARTING, *(Gone(s) for s in range(slots)))
    return after(pool, RANKS_STARTED, *(Begun(s) for s in range(slots)))[0]


def test_first_cycle_starts_all_at_once():
    """Before the first cycle all standbys are started together, whatever the cores."""
    pool, effects = step(pool_of(4, 2), PREPARE, 0.0)
    assert effects == tuple(StartPrewarm(slot) for slot in range(4))
    assert pool.slots == [WARMING] * 4


def test_fills_two_seconds_after_go_by_half_the_cores():
    """The next standbys are started two seconds after the ranks, half as many as cores at once."""
    pool = running(slots=4, cores=4)
    assert step(pool, TICK, 1.9)[1] == ()
    pool, effects = step(pool, TICK, 2.0)
    assert effects == (StartPrewarm(0), StartPrewarm(1))
    pool, effects = step(pool, PrewarmReady(0, 0), 3.0)
    assert effects == (StartPrewarm(2),)
    assert pool.slots == [READY, WARMING, WARMING, ACTIVATED]


def test_idle_processors_warm_up_more():
    """Processors that nothing else uses have standbys, too; one that warms up keeps its own."""
    pool, effects = after(running(slots=4, cores=2), Idle(1.8), (TICK, 2.0))
    assert effects == [StartPrewarm(0), StartPrewarm(1)]
    pool, effects = after(pool, Idle(0.0), (PrewarmReady(0, 0), 4.0))
    assert effects == [StartPrewarm(2)]
    pool, effects = after(pool, Idle(0.0), (PrewarmReady(1, 0), 5.0))
    assert effects == [StartPrewarm(3)]
    assert after(running(slots=4, cores=2), Idle(0.2), (TICK, 2.0))[1] == [StartPrewarm(0)]


def test_idle_processors_warm_up_before_the_first_step():
    """Workers that have their imports behind them and wait for something else leave room."""
    pool, effects = after(running(slots=4, cores=2), Idle(2.0), (TICK, 1.0))
    assert effects == [StartPrewarm(0), StartPrewarm(1)]
    assert after(running(), Idle(0.2), (TICK, 1.0))[1] == []
    # What was idle before says nothing of workers that start now, nor of cold ones' imports.
    assert after(pool, (RANKS_STARTING, 5.0), (RANKS_STARTED, 5.1))[1] == []
    assert after(pool, (RANKS_STARTING, 5.0), (RANKS_STARTED, 5.1), Idle(2.0), (TICK, 6.0))[1] == []


def test_one_core_still_fills():
    """On one core standbys are started one by one."""
    assert step(running(4, 1), TICK, 5.0)[1] == (StartPrewarm(0),)


def test_first_sign_of_a_step_starts_the_fill():
    """A heartbeat or closed section before the two seconds starts the fill."""
    assert step(running(), GOOD_STEP, 0.5)[1] == (StartPrewarm(0), StartPrewarm(1))


def test_never_while_ranks_start():
    """Between the start of the first and the last rank no standby is started."""
    pool, effects = after(running(), RANKS_STARTING, (TICK, 9.0), (GOOD_STEP, 10.0))
    assert effects == []
    assert after(pool, (RANKS_STARTED, 11.0))[1] == []
    assert len(after(pool, (RANKS_STARTED, 11.0), (TICK, 13.0))[1]) == 2


def test_not_while_workers_import():
    """Workers that were told to go early keep the processors, until their first step is near."""
    pool = pool_of(2, 4)
    pool, _ = after(pool, PREPARE, RANKS_STARTING, Gone(0), Gone(1), RANKS_STARTED)
    assert after(pool, (TICK, 30.0), (Begun(0), 40.0), (TICK, 90.0))[1] == []
    pool, effects = after(pool, (Begun(0), 30.0), (Begun(1), 40.0), (TICK, 99.0))
    assert effects == []
    assert step(pool, GOOD_STEP, 50.0)[1] == (StartPrewarm(0), StartPrewarm(1))
    assert step(pool, TICK, 100.0)[1] == (StartPrewarm(0), StartPrewarm(1))


def test_a_worker_that_ends_while_it_imports_makes_room():
    """While the node waits for the next cycle its slot is filled, and nothing counts as failed."""
    pool = pool_of(1, 4)
    pool, _ = after(pool, PREPARE, RANKS_STARTING, Gone(0), RANKS_STARTED)
    assert after(pool, (TICK, 5000.0))[1] == []
    pool, effects = after(pool, (Ended(0), 5000.0))
    assert effects == [StartPrewarm(0)]
    assert (pool.importing, pool.last_failure) == (set(), None)


@pytest.mark.parametrize(
    ("last_message", "is_stopped"),
    [
        (prewarmed.Failed("it was killed"), True),
        (prewarmed.Begun(0.1), True),
        (prewarmed.Begun(0.1), False),
    ],
)
def test_the_pool_is_told_of_who_ends_while_it_imports(last_message, is_stopped):
    """Whether the launcher ended it, or it left before its last message was read."""
    plan = plan_from_args(parse_args(["--no-python", "true"]), {})
    starter = PrewarmStarter(Mock(plan=plan, base_env={}, clock=SystemClock(), running_pids=list))
    starter._pool = pool_of(1, 4)
    starter._pool.slots, starter._pool.importing = [ACTIVATED], {0}
    starter._activated[0] = Mock(receive=Mock(return_value=last_message))
    starter.never_began(0, is_stopped=is_stopped)
    assert (starter._pool.slots, starter._pool.importing) == ([EMPTY], set())


def test_workers_that_start_cold_are_left_alone_as_long():
    """After a fault before any standby was ready, cold workers import undisturbed."""
    pool = pool_of(2, 4)
    pool, _ = after(pool, PREPARE, RANKS_STARTING, Gone(0), Gone(1), RANKS_STARTED)
    pool, _ = after(pool, (Begun(0), 4.0), (Begun(1), 4.0), (GOOD_STEP, 8.0))
    pool = dataclasses.replace(pool, slots=[ACTIVATED, ACTIVATED])
    cold, effects = after(pool, (RANKS_STARTING, 9.0), (RANKS_STARTED, 9.0), (TICK, 18.9))
    assert effects == []
    assert len(step(cold, TICK, 19.0)[1]) == 2


def test_a_step_before_the_last_worker_begins():
    """When a rank works already, the fill waits for the last import and no longer."""
    pool = pool_of(2, 4)
    pool, _ = after(pool, PREPARE, RANKS_STARTING, Gone(0), Gone(1), RANKS_STARTED)
    pool, effects = after(pool, (Begun(0), 5.0), (GOOD_STEP, 6.0))
    assert effects == []
    assert step(pool, Begun(1), 9.0)[1] == (StartPrewarm(0), StartPrewarm(1))


TABLE = [
    (WARMING, PrewarmReady(0, 5), READY, ()),
    (READY, PrewarmReady(0, 5), READY, ()),
    (EMPTY, PrewarmReady(0, 5), EMPTY, ()),
    (WARMING, PrewarmFailed(0, "x"), FAILED, (EndPrewarm(0),)),
    (READY, PrewarmFailed(0, "x"), FAILED, (EndPrewarm(0),)),
    (ACTIVATED, PrewarmFailed(0, "x"), FAILED, ()),
    (EMPTY, PrewarmFailed(0, "x"), EMPTY, ()),
    (ACTIVATED, Ended(0), EMPTY, ()),
    (WARMING, Ended(0), WARMING, ()),
    (WARMING, Gone(0), ACTIVATED, ()),
    (READY, Gone(0), ACTIVATED, ()),
    (FAILED, Gone(0), FAILED, ()),
    (READY, Stale(0), EMPTY, (EndPrewarm(0),)),
    (WARMING, Stale(0), EMPTY, (EndPrewarm(0),)),
    (ACTIVATED, Stale(0), ACTIVATED, ()),
    (READY, Wanted(False), EMPTY, (EndPrewarm(0),)),
    (ACTIVATED, Wanted(False), ACTIVATED, ()),
    (READY, Refused("no"), EMPTY, (Disable("no"), EndPrewarm(0))),
    (FAILED, Refused("no"), FAILED, (Disable("no"),)),
]


@pytest.mark.parametrize(("state", "event", "expected", "effects"), TABLE)
def test_table(state, event, expected, effects):
    """Each state and event lead to the state and effects of the table."""
    pool = dataclasses.replace(pool_of(1, 2), slots=[state], is_starting=True)
    pool, found = step(pool, event, 1.0)
    assert (pool.slots[0], found) == (expected, effects)


def test_second_failure_within_a_minute_disables_until_a_good_step():
    """Two failures within a minute switch to cold starts, and a good step tries again."""
    pool = running()
    pool, effects = after(
        pool, (TICK, 2.0), (PrewarmFailed(0, "one"), 3.0), (PrewarmFailed(1, "two"), 50.0)
    )
    disabled = [effect for effect in effects if isinstance(effect, Disable)]
    assert len(disabled) == 1
    assert "two" in disabled[0].reason
    assert not any(state in (WARMING, READY) for state in pool.slots)
    assert step(pool, TICK, 500.0)[1] == ()
    assert step(pool, GOOD_STEP, 500.0)[1] == (StartPrewarm(0), StartPrewarm(1))


def test_what_cannot_be_started_is_given_up_before_the_rest_is_tried():
    """Two starts that fail at once disable the pool: no other slot gets a process."""
    pool = pool_of(4, 4)
    tried = []

    def start(slot):
        tried.append(slot)
        pool.fail(slot, "no memory")

    pool.start = start
    pool.prepare()
    assert tried == [0, 1]
    assert pool.disabled is not None
    assert pool.slots == [FAILED, FAILED, EMPTY, EMPTY]


def test_failures_far_apart_do_not_disable():
    """A failure more than a minute after the last one only costs its slot."""
    pool, effects = after(
        running(), (TICK, 2.0), (PrewarmFailed(0, "one"), 3.0), (PrewarmFailed(1, "two"), 64.0)
    )
    assert pool.disabled is None
    assert not [effect for effect in effects if isinstance(effect, Disable)]


def test_too_little_memory_disables():
    """With less free memory than twice the missing standbys nothing is started."""
    need = 2 * 4 * pools.EXPECTED_PREWARMED_BYTES
    _, effects = after(running(), Memory(need - 1), (TICK, 5.0))
    assert [type(effect) for effect in effects] == [Disable]
    _, effects = after(running(), Memory(need), (TICK, 5.0))
    assert [type(effect) for effect in effects] == [StartPrewarm] * 2


def test_known_size_replaces_the_estimate():
    """What a standby says it takes is what the next check counts with."""
    pool, _ = after(running(), (TICK, 2.0), (PrewarmReady(0, 1000), 3.0), (Gone(0), 4.0))
    assert pool.prewarmed_bytes == 1000
    assert after(pool, Memory(1 << 20), (TICK, 9.0))[0].disabled is None


def test_refused_command_is_never_tried_again():
    """A command that cannot start warm is left alone for good."""
    pool, _ = after(running(), Refused("--no-python"), (GOOD_STEP, 5.0), (Wanted(True), 6.0))
    assert step(pool, TICK, 100.0)[1] == ()


EVENTS = (
    PREPARE,
    TICK,
    RANKS_STARTING,
    RANKS_STARTED,
    GOOD_STEP,
    Wanted(True),
    Wanted(False),
    Memory(1 << 40),
    Memory(1),
    Idle(0.0),
    Idle(3.0),
)


@pytest.mark.parametrize("seed", range(200))
def test_random_walks_keep_the_rules(seed):
    """Whatever happens, standbys start only in free slots, within the width, when allowed."""
    rng = random.Random(seed)
    slots = rng.randint(1, 6)
    pool, now, alive, prepared = pool_of(slots, rng.randint(1, 8)), 0.0, set(), False
    for _ in range(150):
        now += rng.choice((0.0, 0.1, 1.0, 3.0, 70.0))
        slot = rng.randrange(slots)
        event = rng.choice(
            (
                *EVENTS,
                PrewarmReady(slot, 9),
                PrewarmFailed(slot, "x"),
                Gone(slot),
                Stale(slot),
                Begun(slot),
                Ended(slot),
            )
        )
        if event.method == "activate":
            alive.discard(slot)
        before = pool
        pool, effects = step(pool, event, now)
        for effect in effects:
            if isinstance(effect, StartPrewarm):
                assert effect.slot not in alive
                assert pool.disabled is None
                assert pool.wanted
                assert not pool.is_starting
                assert not pool.importing or event is PREPARE
                alive.add(effect.slot)
            elif isinstance(effect, EndPrewarm):
                assert effect.slot in alive
                alive.discard(effect.slot)
        warming = sum(state is WARMING for state in pool.slots)
        prepared = prepared or event is PREPARE
        started = any(isinstance(effect, StartPrewarm) for effect in effects)
        if started and event is not PREPARE:
            assert warming <= max(
                pool.width, pool.idle_width, sum(s is WARMING for s in before.slots)
            )
        held = {s for s, state in enumerate(pool.slots) if state in (WARMING, READY)}
        assert held == alive
