# SPDX-License-Identifier: Apache-2.0
"""What happens in a chaos job, when and to whom: it follows from the seed alone.

A cell is a kind of fault, a moment of a call, and to whom it happens. Every cell that can be is in
the campaign; two cells are in one job as long as no rank is lost.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

WORLD = 4
ACTIVE = WORLD - 1
RESERVE = WORLD - 1

# Of active ranks only: a reserve does not run the function.
IN_FUNCTION = ("start", "ping", "atomic", "collective", "backward", "end")
# Another rank begins the restart.
IN_RESTART = ("abort", "finalize", "barrier", "rank_assignment")
# At "barrier" and "completion" none of the user's code runs: the fault comes from another thread,
# or by a signal.
MOMENTS = ("initialize", *IN_FUNCTION, "completion", *IN_RESTART)
KINDS = ("raise", "exit", "restart", "sleep", "gil", "stop", "kill", "monitor")
WHO = ("first", "active", "reserve", "two")

HANGS = ("gil", "stop")
# A rank ends by these wherever it is.
_DEADLY = (*HANGS, "kill")
# Nothing is interrupted here, for the others have completed, or are being restarted: who does not
# go on is ended at the hard timeout.
_HELD = ("atomic", "completion", "finalize", "barrier", "rank_assignment")
# What is raised here is what the rank leaves with.
_OF_NO_RETURN = ("finalize", "barrier", "rank_assignment")


@dataclass(frozen=True)
class Cell:
    """What is to happen, and when, and to whom."""

    kind: str
    moment: str
    who: str

    @property
    def is_possible(self) -> bool:
        """Whether it can happen at all."""
        if self.who == "reserve" and self.moment in IN_FUNCTION:
            return False
        # Only the wrapper itself asks for a restart there.
        return not (self.kind == "restart" and self.moment in IN_RESTART)

    @property
    def loses_ranks(self) -> bool:
        """Whether those to whom it happens do not go on."""
        if self.kind in _DEADLY:
            return True
        if self.kind == "sleep":
            return self.moment in _HELD
        if self.kind == "exit":
            return self.moment != "abort"
        return self.kind == "raise" and self.moment in _OF_NO_RETURN

    @property
    def is_hang(self) -> bool:
        """Whether the hard timeout has to end them."""
        return self.kind in HANGS or (self.kind == "sleep" and self.loses_ranks)

    @property
    def restarts(self) -> bool:
        """Whether the function is entered again, by whomever it can be."""
        return self.kind != "monitor" or self.moment in IN_RESTART


@dataclass(frozen=True)
class Trial:
    """A cell in a call: `victims` are initial ranks."""

    number: int
    cell: Cell
    victims: tuple[int, ...]

    @property
    def first(self) -> int | None:
        """The rank that raises to begin a restart, if one has to; no victim if possible."""
        if self.cell.moment not in IN_RESTART:
            return None
        return next((r for r in range(ACTIVE) if r not in self.victims), 0)

    @property
    def lost(self) -> tuple[int, ...]:
        """Who does not go on."""
        return self.victims if self.cell.loses_ranks else ()


def cells() -> list[Cell]:
    """Return all that can happen."""
    every = itertools.starmap(Cell, itertools.product(KINDS, MOMENTS, WHO))
    return [cell for cell in every if cell.is_possible]


def plan(seed: int, job: int, count: int) -> list[Trial]:
    """Return the trials of one job of a campaign; only the last one loses ranks.

    The jobs of a campaign go through all cells in an order of its own, and then again.
    """
    order = random.Random(seed)
    harmless = [cell for cell in cells() if not cell.loses_ranks]
    deadly = [cell for cell in cells() if cell.loses_ranks]
    order.shuffle(harmless)
    order.shuffle(deadly)
    begin = job * (count - 1)
    chosen = [harmless[number % len(harmless)] for number in range(begin, begin + count - 1)]
    chosen.append(deadly[job % len(deadly)])
    chance = random.Random(f"{seed}.{job}")
    return [Trial(number, cell, _victims(cell, chance)) for number, cell in enumerate(chosen)]


def _victims(cell: Cell, chance: random.Random) -> tuple[int, ...]:
    if cell.who == "first":
        return (0,)
    if cell.who == "active":
        return (chance.randrange(1, ACTIVE),)
    if cell.who == "reserve":
        return (RESERVE,)
    # A reserve is at completion long before the others: they would be restarted before theirs.
    size = ACTIVE if cell.moment in (*IN_FUNCTION, "completion") else WORLD
    return tuple(sorted(chance.sample(range(size), 2)))
