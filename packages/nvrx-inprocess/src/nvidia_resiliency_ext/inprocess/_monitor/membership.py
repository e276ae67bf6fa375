# SPDX-License-Identifier: Apache-2.0
"""Decide what the monitor writes for its ranks in one call, and what it sends them. Pure.

Events go in as method calls, effects come out as values. An event that comes twice has no second
effect, so a new monitor may be sent everything again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from nvidia_resiliency_ext.inprocess._monitor.messages import Completed, Decided, Event, Interrupted
from nvidia_resiliency_ext.inprocess._protocol.decision import (
    Arrival,
    Decision,
    ObservedActivity,
    encode_decision,
)
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord

# Effects. The first three are operations of `IterationStore`, with their arguments.


@dataclass(frozen=True, slots=True)
class Complete:
    iteration: int
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class Interrupt:
    iteration: int
    records: tuple[InterruptionRecord, ...]
    participants: frozenset[int]


@dataclass(frozen=True, slots=True)
class Arrive:
    iteration: int
    arrival: Arrival
    participants: frozenset[int]
    has_reported: bool = False


@dataclass(frozen=True, slots=True)
class Follow:
    """Wait for the outcome of an iteration."""

    iteration: int
    participants: frozenset[int]


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Read the outcome of an iteration that other ranks have left."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Notify:
    initial_rank: int
    event: Event


Effect = Complete | Interrupt | Arrive | Follow | CatchUp | Notify


@dataclass(slots=True)
class Member:
    """A rank of this node, and the iteration that it began last; -1 before the first.

    `ended` is why it takes no further part; `is_settled` when it left a call that needs it no more;
    `observed` is what it was doing before it was ended for a hard timeout.
    """

    initial_rank: int
    iteration: int = -1
    rank: int = -1
    world_size: int = -1
    ended: Interruption | None = None
    is_leaving: bool = False
    is_discarded: bool = False
    is_settled: bool = False
    observed: ObservedActivity | None = None

    @property
    def is_present(self) -> bool:
        return self.ended is None and not self.is_settled


@dataclass(slots=True)
class _Reported:
    """Records that this monitor wrote for the present iteration."""

    interruptions: set[tuple[int, Interruption]] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


class Membership:
    """The ranks of one call that this monitor serves, or acts for because they have ended.

    The *position* is the first iteration that is not decided as far as is known here. It is
    where a rank that has ended must be accounted for.
    """

    def __init__(self, world_size: int) -> None:
        self.members: dict[int, Member] = {}
        self.position = 0
        self.is_over = False
        self._lost: set[int] = set()
        self._participants = {0: frozenset(range(world_size))}
        # By iteration whose outcome is known: what its ranks are sent.
        self._events: dict[int, dict[type, Completed | Interrupted | Decided]] = {}
        self._reported = _Reported()
        self._followed = -1

    def attach(self, initial_rank: int) -> None:
        self.members.setdefault(initial_rank, Member(initial_rank))

    def begun(
        self, initial_rank: int, iteration: int, rank: int, world_size: int, who: frozenset[int]
    ) -> list[Effect]:
        """Record that a rank begins an iteration with the participants `who`."""
        member = self.members[initial_rank]
        member.iteration, member.rank, member.world_size = iteration, rank, world_size
        effects: list[Effect] = []
        if iteration > self.position:
            # Somebody decided what a monitor before us, or a slower thread, has yet to read.
            self._participants[iteration] = who
            effects += self._move_to(iteration)
        elif iteration < self.position and iteration not in self._events:
            effects.append(CatchUp(iteration))
        known = self._events.get(iteration, {}).values()
        return [*effects, *(Notify(initial_rank, event) for event in known), *self._follow()]

    def reported(self, initial_rank: int, iteration: int, kind: Interruption) -> list[Effect]:
        return self._interrupt(initial_rank, kind) if iteration >= self.position else []

    def completed(self, initial_rank: int, iteration: int) -> list[Effect]:
        if iteration != self.position or initial_rank in self._reported.completed:
            return []
        self._reported.completed.add(initial_rank)
        return [Complete(iteration, self._arrival_of(initial_rank))]

    def arrived(
        self, initial_rank: int, iteration: int, observed: ObservedActivity | None = None
    ) -> list[Effect]:
        """Record that a rank is ready to go on; `observed` is its activity when interrupted."""
        if iteration != self.position or initial_rank in self._reported.arrived:
            return []
        self._reported.arrived.add(initial_rank)
        arrival = replace(self._arrival_of(initial_rank), observed=observed)
        return [Arrive(iteration, arrival, self._participants[iteration])]

    def left(self, initial_rank: int, *, is_lost: bool, is_discarded: bool = False) -> list[Effect]:
        """Record that a rank leaves the call: the call is over, or lost for the other ranks."""
        member = self.members[initial_rank]
        member.is_leaving = True
        member.is_discarded = is_discarded
        if self.is_over or (not is_lost and initial_rank in self._reported.completed):
            member.is_settled = True
            return []
        if member.ended is None:
            member.ended = Interruption.BASE_EXCEPTION
        return self._speak_for(initial_rank) + self._follow()

    def timed_out(self, initial_rank: int, kind: Interruption) -> list[Effect]:
        member = self.members[initial_rank]
        if not member.is_present:
            return []
        return self._interrupt(initial_rank, kind)

    def ended(self, initial_rank: int, observed: ObservedActivity | None = None) -> list[Effect]:
        """Record the end of a rank's process; `observed` is its activity before a timeout."""
        member = self.members[initial_rank]
        member.observed = observed or member.observed
        if member.is_settled or member.ended is not None:
            return []
        if self.is_over:
            member.is_settled = True
            return []
        member.ended = Interruption.TERMINATED
        return self._speak_for(initial_rank) + self._follow()

    def lost(self, ranks: Iterable[int]) -> list[Effect]:
        """Record as lost the ranks of another node, whose lease is stale."""
        effects: list[Effect] = []
        for rank in ranks:
            if rank not in self.members and rank not in self._lost:
                self._lost.add(rank)
                effects += self._speak_for(rank)
        return effects

    def outcome(self, iteration: int, *, is_completed: bool) -> list[Effect]:
        if not is_completed:
            self._events.setdefault(iteration, {})
            return []
        self.is_over = True
        for member in self.members.values():
            if member.ended is not None:
                member.is_settled = True
        return self._notify(Completed(iteration))

    def last_call_over(
        self, iteration: int, records: tuple[InterruptionRecord, ...], waited_s: float = 0.0
    ) -> list[Effect]:
        """Report an iteration's interruptions, after waiting `waited_s` for further ones."""
        return self._notify(Interrupted(iteration, records, waited_s))

    def decided(self, iteration: int, decision: Decision) -> list[Effect]:
        effects = self._notify(Decided(iteration, encode_decision(decision)))
        if iteration >= self.position:
            self._participants[iteration + 1] = decision.going_on
            effects += self._move_to(iteration + 1)
        return effects + self._follow()

    @property
    def participants(self) -> frozenset[int]:
        return self._participants[self.position]

    def is_interrupted(self, iteration: int) -> bool:
        return iteration in self._events and Completed not in self._events[iteration]

    @property
    def is_anybody_inside(self) -> bool:
        """Return whether a rank of this node is in its function, and still needs reports."""
        reported = self._reported.interruptions
        return any(
            member.is_present and (rank, Interruption.EXCEPTION) not in reported
            for rank, member in self.members.items()
        )

    @property
    def is_settled(self) -> bool:
        """Whether nothing is owed: to no present rank, and to the store for none that ended."""
        return all(
            member.is_settled or (member.ended is not None and not self._is_owed(rank))
            for rank, member in self.members.items()
        )

    def _is_owed(self, rank: int) -> bool:
        return not self.is_over and rank in self.participants

    def _arrival_of(self, initial_rank: int) -> Arrival:
        member = self.members[initial_rank]
        return Arrival(initial_rank, member.rank, member.world_size, is_out=False)

    def _interrupt(self, rank: int, kind: Interruption) -> list[Effect]:
        if self.is_over or rank not in self.participants:
            return []
        reported = self._reported.interruptions
        is_killed = (
            kind is Interruption.TERMINATED and (rank, Interruption.HARD_TIMEOUT) in reported
        )
        if (rank, kind) in reported or is_killed:
            return []
        reported.add((rank, kind))
        return [Interrupt(self.position, (InterruptionRecord(rank, kind),), self.participants)]

    def _speak_for(self, rank: int) -> list[Effect]:
        """Account for a rank that has ended, at the position."""
        if not self._is_owed(rank) or rank in self._reported.ended:
            return []
        self._reported.ended.add(rank)
        member = self.members.get(rank)
        effects: list[Effect] = []
        if member is None:
            effects += self._interrupt(rank, Interruption.UNRESPONSIVE)
        elif not member.is_leaving:
            effects += self._interrupt(rank, Interruption.TERMINATED)
        elif not member.is_discarded and not self._has_reported(rank):
            effects += self._interrupt(rank, Interruption.BASE_EXCEPTION)
        # One that was discarded, or leaves, says so; the number of any other may be unknown.
        is_out = member is not None and member.is_leaving
        observed = None if member is None else member.observed
        arrival = Arrival(rank, None, None, is_out=is_out, observed=observed)
        has_reported = bool(effects) or self._has_reported(rank)
        return [*effects, Arrive(self.position, arrival, self.participants, has_reported)]

    def _has_reported(self, rank: int) -> bool:
        return any(reporter == rank for reporter, _ in self._reported.interruptions)

    def _move_to(self, iteration: int) -> list[Effect]:
        self.position = iteration
        self._reported = _Reported()
        for old in [key for key in self._participants if key < iteration]:
            del self._participants[old]
        for old in [key for key in self._events if key < iteration - 2]:
            del self._events[old]
        gone = [rank for rank, member in self.members.items() if member.ended is not None]
        return [effect for rank in [*gone, *self._lost] for effect in self._speak_for(rank)]

    def _follow(self) -> list[Effect]:
        """Wait for the outcome of the position, as long as that matters to anybody here."""
        if self._followed >= self.position or self.is_over:
            return []
        members = self.members.items()
        if all(each.is_settled or rank not in self.participants for rank, each in members):
            return []
        self._followed = self.position
        return [Follow(self.position, self.participants)]

    def _notify(self, event: Completed | Interrupted | Decided) -> list[Effect]:
        """Send an event to the ranks in its iteration, and keep it for those that come back."""
        self._events.setdefault(event.iteration, {})[type(event)] = event
        return [
            Notify(rank, event)
            for rank, member in self.members.items()
            if member.iteration == event.iteration and member.is_present
        ]
