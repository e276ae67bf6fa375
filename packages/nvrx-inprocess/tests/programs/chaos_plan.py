# SPDX-License-Identifier: Apache-2.0
"""What happens in a chaos job, when and to whom: it follows from the seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

IN_FUNCTION = ("initialize", "start", "ping", "atomic", "collective", "end")
IN_RESTART = ("abort", "finalize", "rank_assignment")
HARMLESS = {
    "raise": (*IN_FUNCTION, "abort"),
    "restart": IN_FUNCTION[1:],
    "sleep": ("start", "ping"),
}


@dataclass(frozen=True)
class Trial:
    """What happens in a call: `kind` at `moment`, to these initial ranks.

    At a moment of a restart, another rank raises first.
    """

    number: int
    kind: str
    moment: str
    victims: tuple[int, ...]

    def first(self, active: int) -> int | None:
        """Return the rank that raises to begin a restart, if one of so many has to."""
        return (self.victims[0] + 1) % active if self.moment in IN_RESTART else None


def plan(seed: int, count: int, world: int) -> list[Trial]:
    """Return the trials of a seed for `world` ranks, one in reserve; the last one kills."""
    chance = random.Random(seed)
    trials = []
    for number in range(count - 1):
        kind = chance.choice(list(HARMLESS))
        victims = tuple(chance.sample(range(world - 1), chance.choice((1, 1, 2))))
        trials.append(Trial(number, kind, chance.choice(HARMLESS[kind]), victims))
    victims = tuple(chance.sample(range(world), chance.choice((1, 2))))
    moment = chance.choice((*IN_FUNCTION, *IN_RESTART))
    return [*trials, Trial(count - 1, "kill", moment, victims)]
