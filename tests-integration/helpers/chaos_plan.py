# SPDX-License-Identifier: Apache-2.0
"""Which faults a chaos campaign makes, and what each of them may cost. Pure: a seed says it all."""

from __future__ import annotations

import random
from dataclasses import dataclass

LEASE_S = 1.0
# Silence of this length ends a node for certain; below, either may happen.
SURELY_LOST_S = 4.0 * LEASE_S
# By then a silence has had all its consequences, also on a busy machine.
DECIDED_S = 5.0 * LEASE_S

RANK_KINDS = ("kill_rank", "raise_in_rank", "hang_rank", "two_ranks")
LAUNCHER_KINDS = ("kill_launcher", "drain_launcher", "stop_launcher", "cut_link", "power_off")
LINK_KINDS = ("flap_link", "bad_link")
SECOND_FAULTS = ("kill_rank", "kill_launcher", "drain_launcher", "cut_link", "stop_launcher")
KINDS = (*RANK_KINDS, *LAUNCHER_KINDS, *LINK_KINDS, "kill_monitor", "in_a_restart")
CONTROL_KINDS = ("kill_control", "kill_control_in_a_restart")
STAGES = ("stopping", "starting", "first_step")

# Seconds until all ranks train again; ten times and more of what a quiet machine takes.
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        number: Its place in the campaign, from 0.
        kind: What happens.
        steps_before: Steps of training between the fault before and this one.
        chance: Two numbers from 0 to 1: which rank or host is hit, and which one next.
        length_s: How long a silence lasts.
        at_once: Whether a lost launcher is started anew at once, or only when the others train.
        stage: The moment of a restart at which the second fault comes.
        second: What the second fault is.
    """

    number: int
    kind: str
    steps_before: int
    chance: tuple[float, float]
    length_s: float
    at_once: bool
    stage: str
    second: str


def plan(seed: int, count: int, *, control: bool, only: tuple[str, ...] = ()) -> list[Fault]:
    """Return the faults of a campaign: each kind comes once before any comes again."""
    dice = random.Random(f"chaos {seed}")
    kinds = list(only or KINDS + (CONTROL_KINDS if control else ()))
    faults: list[Fault] = []
    while len(faults) < count:
        dice.shuffle(kinds)
        for kind in kinds[: count - len(faults)]:
            is_long = dice.random() < 0.5
            length_s = dice.uniform(SURELY_LOST_S, 5.7) if is_long else dice.uniform(0.2, 3.3)
            faults.append(
                Fault(
                    number=len(faults),
                    kind=kind,
                    steps_before=dice.randrange(1, 12),
                    chance=(dice.random(), dice.random()),
                    length_s=round(length_s, 2),
                    at_once=dice.random() < 0.5,
                    stage=dice.choice(STAGES),
                    second=dice.choice(SECOND_FAULTS),
                )
            )
    return faults


def restarts_allowed(fault: Fault, *, hits_workers: bool) -> range:
    """Return how many restarts a fault may cost."""
    if fault.kind in RANK_KINDS:
        return range(1, 2)
    if fault.kind in ("in_a_restart", "kill_control_in_a_restart"):
        return range(1, 3)
    if fault.kind in ("kill_monitor", "kill_control") or not hits_workers:
        return range(1)
    if fault.kind in ("stop_launcher", "cut_link"):
        return range(1, 2) if fault.length_s >= SURELY_LOST_S else range(2)
    return range(2) if fault.kind in LINK_KINDS else range(1, 2)
