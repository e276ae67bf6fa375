# SPDX-License-Identifier: Apache-2.0
"""Stopping workers, worker by worker: ask, then force, then give up. Pure.

Each worker has its own deadline: one that ignores SIGTERM delays nobody else, and one that
survives SIGKILL (state D) is given up after a bound instead of being waited for.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Iterable
from dataclasses import dataclass

KILL_BOUND_S = 10.0


class Stage(enum.Enum):
    """How far the stop of one worker has gone."""

    ASKED = "asked"
    KILLED = "killed"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True)
class Stop:
    """The stop of one worker: its stage, and when the next one is due (monotonic s)."""

    stage: Stage
    due: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send these signals, in this order, to the group of `local_rank`."""

    local_rank: int
    signums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stopping:
    """All stops under way, by local rank."""

    stops: tuple[tuple[int, Stop], ...] = ()

    @property
    def due(self) -> float | None:
        """When `advance` has something to do next, or None."""
        times = [stop.due for _, stop in self.stops if stop.stage is not Stage.GIVEN_UP]
        return min(times) if times else None

    @property
    def is_over(self) -> bool:
        """Whether nothing is waited for any more."""
        return all(stop.stage is Stage.GIVEN_UP for _, stop in self.stops)

    @property
    def given_up(self) -> tuple[int, ...]:
        """The local ranks that survived SIGKILL."""
        return tuple(rank for rank, stop in self.stops if stop.stage is Stage.GIVEN_UP)


def begin(
    ranks: Iterable[int],
    signum: int,
    grace_s: float,
    now: float,
    before: Stopping | None = None,
) -> tuple[Stopping, tuple[Send, ...]]:
    """Ask every worker to end. SIGCONT goes first: a stopped process handles no SIGTERM.

    A stop that is under way already (`before`) is never made longer or taken back.
    """
    earlier = dict(before.stops) if before is not None else {}
    stops: list[tuple[int, Stop]] = []
    sends: list[Send] = []
    for rank in ranks:
        stop = earlier.get(rank)
        if stop is None or stop.stage is Stage.ASKED:
            due = now + grace_s if stop is None else min(stop.due, now + grace_s)
            stop = Stop(Stage.ASKED, due)
            sends.append(Send(rank, (signal.SIGCONT, signum)))
        stops.append((rank, stop))
    return Stopping(tuple(stops)), tuple(sends)


def force(state: Stopping, now: float) -> tuple[Stopping, tuple[Send, ...]]:
    """Kill everybody that is still there, now."""
    return advance(
        Stopping(
            tuple(
                (rank, dataclasses.replace(stop, due=now) if stop.stage is Stage.ASKED else stop)
                for rank, stop in state.stops
            )
        ),
        now,
    )


def exited(state: Stopping, local_rank: int) -> Stopping:
    """Take a worker off the list that is gone."""
    return Stopping(tuple(item for item in state.stops if item[0] != local_rank))


def advance(state: Stopping, now: float) -> tuple[Stopping, tuple[Send, ...]]:
    """Go one stage further for each worker whose time is up."""
    stops: list[tuple[int, Stop]] = []
    sends: list[Send] = []
    for rank, stop in state.stops:
        if stop.due > now or stop.stage is Stage.GIVEN_UP:
            stops.append((rank, stop))
        elif stop.stage is Stage.ASKED:
            sends.append(Send(rank, (signal.SIGKILL,)))
            stops.append((rank, Stop(Stage.KILLED, now + KILL_BOUND_S)))
        else:
            stops.append((rank, Stop(Stage.GIVEN_UP, stop.due)))
    return Stopping(tuple(stops)), tuple(sends)
