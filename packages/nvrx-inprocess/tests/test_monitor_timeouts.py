# SPDX-License-Identifier: Apache-2.0
"""Verdicts on stamps: what a rank is asked, and when it is killed."""

import dataclasses
import math
import random

import pytest

from nvidia_resiliency_ext.inprocess._monitor.messages import MonitorSettings
from nvidia_resiliency_ext.inprocess._monitor.page import Phase, Stamps
from nvidia_resiliency_ext.inprocess._monitor.timeouts import (
    Effect,
    Evaluation,
    Watch,
    evaluate,
)

LIMITS = MonitorSettings(
    "p",
    "m:f",
    soft_timeout_s=60.0,
    hard_timeout_s=90.0,
    termination_grace_s=5.0,
    interval_s=1.0,
)
TERM, KILL = Effect.TERM, Effect.KILL


def stamps(auto_s=1000.0, manual_s=None, *, protected=True, phase=Phase.GUARDED, epoch=1):
    """Return one look at a page."""
    return Stamps(auto_s, manual_s, is_protected=protected, phase=phase, epoch=epoch)


class Rank:
    """A rank under watch, looked at once per interval."""

    def __init__(self, limits: MonitorSettings = LIMITS, start_s: float = 1000.0) -> None:
        self.limits = limits
        self.now = start_s
        self.watch = Watch()
        self.effects: list[tuple[float, object]] = []

    def look(self, seen: Stamps) -> Evaluation:
        found = evaluate(self.watch, seen, self.limits, self.now)
        self.watch = found.watch
        self.effects += [(self.now, effect) for effect in found.effects]
        return found

    def run(self, seen, until_s: float) -> None:
        """Look at what `seen(now)` gives at each interval and at each due moment."""
        while self.now <= until_s:
            found = self.look(seen(self.now))
            self.now = min(self.now + self.limits.interval_s, max(found.due_s, self.now + 1e-6))


def test_stuck_rank_is_asked_then_killed() -> None:
    """No stamps: soft timeout; stacks, then SIGTERM at the hard timeout; SIGKILL; in their time."""
    rank = Rank()
    rank.run(lambda _: stamps(1000.0), 1096.0)
    assert rank.effects == [
        (1060.0, Effect.SOFT_TIMEOUT),
        (1090.0, Effect.ASK_FOR_STACKS),
        (1090.5, Effect.HARD_TIMEOUT),
        (1090.5, TERM),
        (1095.5, KILL),
    ]


def test_a_rank_that_stamps_when_asked_for_its_stacks_is_left_alone() -> None:
    """The signal may end the system call that held it; asked again, it writes them again."""
    rank = Rank()
    rank.run(lambda now: stamps(1000.0 if now < 1090.2 else now), 1200.0)
    assert [effect for _, effect in rank.effects] == [Effect.SOFT_TIMEOUT, Effect.ASK_FOR_STACKS]
    rank.run(lambda _: stamps(1200.0), 1295.0)
    asked, ended = (at for at, effect in rank.effects[2:] if effect != TERM)
    assert rank.effects[2:] == [
        (asked, Effect.ASK_FOR_STACKS),
        (ended, Effect.HARD_TIMEOUT),
        (ended, TERM),
    ]
    assert ended - asked >= 0.5


def test_unkillable_rank_is_given_up_once() -> None:
    """A process that outlives SIGKILL is signalled again each second and given up once."""
    rank = Rank()
    rank.run(lambda _: stamps(1000.0), 1110.0)
    kills = [at for at, effect in rank.effects if effect == KILL]
    assert kills[:3] == [1095.5, 1096.5, 1097.5]
    assert [at for at, effect in rank.effects if effect == Effect.GIVE_UP] == [1096.5]


def test_fresh_stamps_are_never_judged() -> None:
    """A rank that stamps is left alone for ever."""
    rank = Rank()
    rank.run(lambda now: stamps(now - 0.5), 2000.0)
    assert rank.effects == []


def test_pings_count_from_the_first() -> None:
    """Automatic stamps alone suffice until the first ping, and not afterwards."""
    rank = Rank()
    rank.run(stamps, 1200.0)
    assert rank.effects == []
    rank.run(lambda now: stamps(now, 1200.0), 1261.0)
    assert rank.effects == [(1260.0, Effect.SOFT_TIMEOUT)]


def test_pings_alone_do_not_suffice() -> None:
    """A thread that pings does not hide a main thread that is stuck."""
    rank = Rank()
    rank.run(lambda now: stamps(1000.0, now), 1061.0)
    assert rank.effects == [(1060.0, Effect.SOFT_TIMEOUT)]


@pytest.mark.parametrize(
    "calm", [stamps(1000.0, protected=False), stamps(1000.0, phase=Phase.IDLE)]
)
def test_no_time_passes_without_protection(calm: Stamps) -> None:
    """Unprotected or idle, nothing happens; afterwards the whole soft timeout is there again."""
    rank = Rank()
    rank.run(lambda _: calm, 1500.0)
    assert rank.effects == []
    # An old stamp may be seen for a moment after protection is on again.
    rank.run(lambda _: stamps(1000.0), 1559.5)
    assert rank.effects == []
    rank.run(lambda _: stamps(1000.0), 1562.0)
    assert [effect for _, effect in rank.effects] == [Effect.SOFT_TIMEOUT]


def test_who_is_stuck_at_the_barrier_is_killed_at_the_hard_timeout() -> None:
    """Who waits there makes stamps; who makes none is not waited for until the others give up."""
    rank = Rank()
    rank.watch = Watch(epoch=1, looked_s=1000.0, interrupted_s=1000.0)
    rank.run(lambda now: stamps(now, phase=Phase.AT_BARRIER), 1300.0)
    assert rank.effects == []
    last = rank.now
    rank.run(lambda _: stamps(last, phase=Phase.AT_BARRIER), last + 91.0)
    asked, hard = (last + 90.0, Effect.ASK_FOR_STACKS), (last + 90.5, Effect.HARD_TIMEOUT)
    assert rank.effects == [asked, hard, (last + 90.5, TERM)]


def test_interrupted_rank_is_not_asked_again_but_killed_when_stuck() -> None:
    """In an interrupted iteration there is no soft timeout; the hard one stays."""
    rank = Rank()
    rank.watch = Watch(epoch=1, looked_s=1000.0, interrupted_s=1000.0)
    rank.run(lambda _: stamps(1000.0), 1091.0)
    asked, hard = (1090.0, Effect.ASK_FOR_STACKS), (1090.5, Effect.HARD_TIMEOUT)
    assert rank.effects == [asked, hard, (1090.5, TERM)]


def test_unwinding_rank_need_not_ping() -> None:
    """The last ping counts as made at the interruption."""
    rank = Rank()
    rank.run(lambda now: stamps(now, 1000.0), 1050.0)
    rank.watch = Watch(epoch=1, looked_s=1050.0, interrupted_s=1050.0)
    rank.run(lambda now: stamps(now, 1000.0), 1139.5)
    assert rank.effects == []


def test_new_iteration_starts_afresh() -> None:
    """After a rearm even a stale look is no reason for anything."""
    rank = Rank()
    rank.run(lambda _: stamps(1000.0, 1000.0), 1070.0)
    assert [effect for _, effect in rank.effects] == [Effect.SOFT_TIMEOUT]
    rank.effects.clear()
    rank.run(lambda _: stamps(1000.0, 1000.0, epoch=2), 1128.0)
    assert rank.effects == []


def test_time_in_which_we_were_held_up_does_not_count() -> None:
    """After a stop of the whole machine or container ranks get their time again, once."""
    rank = Rank()
    rank.run(stamps, 1010.0)
    rank.now = 2000.0
    rank.look(stamps(1010.0))
    assert rank.effects == []
    # Held up again without a sign of the rank in between: now it counts.
    rank.now = 2100.0
    rank.look(stamps(1010.0))
    rank.now = 2100.5
    rank.look(stamps(1010.0))
    assert [effect for _, effect in rank.effects] == [
        Effect.ASK_FOR_STACKS,
        Effect.HARD_TIMEOUT,
        TERM,
    ]


def test_killing_goes_on_whatever_the_page_says() -> None:
    """A rank that was reported as lost does not come back by stamping."""
    rank = Rank()
    rank.run(lambda _: stamps(1000.0), 1091.0)
    rank.run(lambda now: stamps(now, phase=Phase.IDLE), 1096.0)
    assert (KILL) in [effect for _, effect in rank.effects]


@pytest.mark.parametrize("seed", range(40))
def test_random_walks(seed: int) -> None:
    """Whatever is seen: a soft timeout needs silence, death needs a hard one, and order holds."""
    draw = random.Random(seed)
    limits = dataclasses.replace(
        LIMITS,
        soft_timeout_s=3.0,
        hard_timeout_s=6.0,
        termination_grace_s=draw.choice((0.0, 0.5)),
        interval_s=draw.choice((0.01, 0.3, 1.0)),
    )
    rank = Rank(limits, start_s=0.0)
    auto_s, manual_s, epoch = 0.0, None, 1
    phase, protected = Phase.GUARDED, True
    last_change = 0.0
    for _ in range(3000):
        roll = draw.random()
        if roll < 0.25:
            auto_s = rank.now
        elif roll < 0.35:
            manual_s = rank.now
        elif roll < 0.36:
            epoch, manual_s, auto_s = epoch + 1, None, rank.now
        elif roll < 0.40:
            protected = not protected
        elif roll < 0.43:
            phase = draw.choice(list(Phase))
        last_change = rank.now if not protected or phase is Phase.IDLE else last_change
        seen = stamps(auto_s, manual_s, protected=protected, phase=phase, epoch=epoch)
        count = len(rank.effects)
        was_killing = rank.watch.is_being_killed
        found = rank.look(seen)
        new = [effect for _, effect in rank.effects[count:]]
        oldest = min(auto_s, manual_s if manual_s is not None else math.inf)
        if Effect.SOFT_TIMEOUT in new:
            assert rank.now - oldest >= limits.soft_timeout_s
            assert protected
            assert phase is not Phase.IDLE
        if Effect.HARD_TIMEOUT in new:
            assert not was_killing
            assert rank.now - oldest >= limits.hard_timeout_s
            assert new == [Effect.HARD_TIMEOUT, TERM]
        if KILL in new:
            assert was_killing
        assert found.due_s >= rank.now
        rank.now += draw.choice((0.01, 0.1, 1.0, 2.5))
        if rank.watch.is_being_killed and draw.random() < 0.2:
            rank.watch, auto_s, manual_s = Watch(), rank.now, None
