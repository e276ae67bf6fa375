# SPDX-License-Identifier: Apache-2.0
"""The steps of one node in the rendezvous, without a thread: follow the log, and add to it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._core.errors import RDZV_NO_RESTART_REASONS
from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause

from . import keys, records
from .log import DecisionLog
from .records import Arrival, Entry, Kind, NodeMessage, Phase, RankAssignment, WorkerState
from .store import JobStore

# Messages about the round, and not about who is there.
_OF_A_ROUND = (Kind.STATE, Kind.PREEMPTED, Kind.HELD)
_OF_THE_END = (Kind.LEFT, Kind.UNHEALTHY)


@dataclass(frozen=True, slots=True)
class _Decided:
    entry: Entry


@dataclass(frozen=True, slots=True)
class RankAssigned(_Decided):
    """This node has a rank assignment in a closed round."""

    assignment: RankAssignment


class SpareNode(_Decided):
    """The round closed without a rank assignment for this node; it waits for the next."""


class Opened(_Decided):
    """Somebody else opened a round."""


class Leaves(_Decided):
    """Ranks of the present round are to save and leave, at an agreed call once there is one."""


class Hung(_Decided):
    """The nodes look for the culprit of a hang, or have found it: see `Entry.hang`."""


class Over(_Decided):
    """The job is over for everybody."""

    @property
    def no_restart(self) -> bool:
        """Whether the job must not be started again."""
        return self.entry.reason in RDZV_NO_RESTART_REASONS


@dataclass(frozen=True, slots=True)
class Lost:
    """The store is gone, or others have taken this node's place; no further event follows."""

    what: str
    is_replaced: bool = False


SessionEvent = RankAssigned | SpareNode | Opened | Leaves | Hung | Over | Lost


class NodeSession:
    """The messages of one node, over the store connection of one thread.

    The constructor creates the node's lease. Raises StoreLostError; NoJobError: the store has no
    job within `timeout_s`; ForeignValueError: another program has written the job's log.
    """

    def __init__(self, store: JobStore, node: str, host: str, timeout_s: float) -> None:
        self.node = node
        self._host = host
        self.entry = self._attach(store, timeout_s)
        # What the launcher knows, which may be less; None: whatever comes is new to it.
        self._notified: Entry | None = self.entry
        self._opened_round = -1
        self._ended_at = -1
        self._arrived_in: int | None = None
        self._arrival: Arrival | None = None
        self._assignment: RankAssignment | None = None
        # What was known when the store was lost, and what the launcher knew of it.
        self._resumes: tuple[Entry, Entry | None] | None = None
        # What this node said of the present round: another host has to be notified again.
        self._said_in = -1
        self._said: dict[Kind, NodeMessage] = {}
        # That it takes part no longer, until it arrives again: this holds for every host.
        self._left: NodeMessage | None = None

    def _attach(self, store: JobStore, timeout_s: float) -> Entry:
        """Create this node's lease in a store and return the newest log entry."""
        self.store, self._log = store, DecisionLog(store)
        self.renew_lease()
        if not store.wait_until_set(keys.HEAD, timeout_s):
            raise store.no_job(timeout_s)
        return self._log.last_known()

    @property
    def notified_seq(self) -> int:
        """The last decision of which the launcher knows."""
        return -1 if self._notified is None else self._notified.seq

    @property
    def is_resuming(self) -> bool:
        """Whether a new host has still to say how the job goes on."""
        return self._resumes is not None

    def resume(self, store: JobStore, timeout_s: float) -> SessionEvent | None:
        """Go on over a new connection, to the same store or to one that knows nothing yet."""
        # A store lost while this node reports the previous one leaves this as it was.
        old, notified = self._resumes or (self.entry, self._notified)
        self._resumes = old, notified
        present = self.entry = self._notified = self._attach(store, timeout_s)
        if present.epoch == old.epoch:
            self._resumes = None
            self.entry, self._notified = old, notified
            return None
        self._opened_round = self._ended_at = -1
        if present.seq > 0 or (old.phase is Phase.OPEN and old.round == 0):
            self._notified = None
            return self.take(present)
        message = NodeMessage(
            Kind.RESUMED, self.node, arrival=self._arrival, entry=old, assignment=self._assignment
        )
        self._append(message, present.round)
        if self._left is not None:
            self._append(self._left, present.round)
        self.notify()
        return None

    def renew_lease(self) -> None:
        """Renew this node's lease, and return when the store has it."""
        self.store.count(keys.lease(self.node), 1)

    def acknowledge(self) -> None:
        """Acknowledge an opened round: this node stops its workers."""
        self._append(NodeMessage(Kind.ACKNOWLEDGED, self.node), self.entry.round)

    def arrive(self, arrival: Arrival) -> bool:
        """Offer this node in the present round; False when that is closed, so it is a spare.

        That it is in the round it learns from its place alone; the counter only wakes the host.
        """
        entry = self.entry
        self._arrival, self._assignment, self._left = arrival, None, None
        self._arrived_in = entry.round
        self._append(NodeMessage(Kind.ARRIVED, self.node, arrival=arrival), entry.round)
        if entry.phase is not Phase.OPEN:
            return False
        if self.store.count(keys.arrivals(entry.round), 1) >= entry.notify_from:
            self.notify()
        return True

    def take(self, entry: Entry) -> SessionEvent | None:
        """Record a decision; return the event that follows for this node, if any."""
        notified = self._notified
        if notified is not None and entry.seq <= notified.seq:
            return None
        self._notified = entry
        if entry.seq > self.entry.seq:
            self.entry = entry
        resumes = None if self._resumes is None else self._resumes[0]
        self._resumes = None
        # No other host closes a round that it has not opened.
        is_taken_up = resumes is not None or (
            notified is not None and notified.round != entry.round
        )
        if is_taken_up and entry.phase is Phase.CLOSED and not self._works_in(entry):
            # What it sent may have come too late, or to the messages of another round.
            self._say_it_is_there(entry.round)
        if resumes is not None and resumes.phase is entry.phase is Phase.CLOSED:
            return self._part_taken_up(entry, resumes)
        if entry.phase is Phase.OVER:
            return None if entry.seq == self._ended_at else Over(entry)
        if entry.phase is Phase.OPEN:
            self.acknowledge()
            return None if entry.round <= self._opened_round else Opened(entry)
        if entry.hang and self._works_in(entry):
            return Hung(entry)
        if entry.is_leaving:
            return self._leaves(entry)
        return None if entry.hang else self._part_in(entry)

    def _part_taken_up(self, entry: Entry, before: Entry) -> SessionEvent | None:
        """Return this node's event after a new coordinator took up the closed round `before`."""
        if not self._works_in(before):
            return None if entry.round == before.round else SpareNode(entry)
        if self._works_in(entry) and self._read_assignment() == self._assignment:
            self._say_again(entry.round)
            return self._leaves(entry) if entry.follows(before) else None
        # Its workers would train on, beside those that took their place.
        cause = Cause("opened", f"the others went on without host {self._host}", host=self._host)
        return Opened(dataclasses.replace(entry, cause=cause))

    def _read_assignment(self) -> RankAssignment | None:
        text = self.store.peek(keys.assignment(self.node))
        return None if text is None else records.decode(RankAssignment, text)

    def _leaves(self, entry: Entry) -> Leaves | None:
        """Return the event that ranks must save and leave; None for a spare node."""
        return Leaves(entry) if self._works_in(entry) else None

    def _works_in(self, entry: Entry) -> bool:
        return self._assignment is not None and self._assignment.round == entry.round

    def _part_in(self, entry: Entry) -> SessionEvent:
        assignment = self._read_assignment() if self._arrived_in == entry.round else None
        if assignment is None or assignment.round != entry.round:
            return SpareNode(entry)
        self._assignment = assignment
        return RankAssigned(entry, assignment)

    def open_next(self, round_: int, cause: Cause) -> None:
        """Open the round after `round_`, unless that has happened or the job is over."""
        self._opened_round = max(self._opened_round, round_ + 1)
        while self._is_in(round_):
            self.entry = self._log.add(self.entry.opened(self.node, cause))
        self.notify()

    def end(self, reason: str, cause: Cause | None) -> None:
        while self.entry.phase is not Phase.OVER:
            wanted = self.entry.over(self.node, reason, cause)
            self.entry = self._log.add(wanted)
            if records.encode(self.entry) == records.encode(wanted):
                self._ended_at = wanted.seq
        self.notify()

    def send(self, kind: Kind, *, in_round: int | None = None, **fields: Any) -> None:
        """Write a `NodeMessage` with these fields, unless `in_round` is not the closed round."""
        if in_round is None or self._is_in(in_round):
            self._append(NodeMessage(kind, self.node, **fields), self.entry.round)
            self.notify()

    def say_goodbye(self) -> None:
        """Send the last message: the job is over, or this node takes no part any more."""
        if self.entry.phase is Phase.OVER:
            self.send(Kind.GOODBYE)
        elif self._left is None:
            self.send(Kind.LEFT)

    def succeeded(self, round_: int) -> None:
        """Record that this node's workers ended well in `round_`; the last node sends a notice."""
        if not self._is_in(round_):
            return
        self._append(NodeMessage(Kind.STATE, self.node, state=WorkerState.SUCCEEDED), round_)
        if self.store.count(keys.successes(round_), 1) >= self.entry.active:
            self.notify()

    def notify(self) -> None:
        self.store.put(keys.NOTIFY, "1")

    def confirm(self) -> None:
        """Wait until the store has taken all earlier writes, by a read that it answers in order."""
        self.store.has(keys.NOTIFY)

    def _append(self, message: NodeMessage, round_: int) -> None:
        if message.kind in _OF_THE_END:
            # First: if the store is gone, the next one has to know.
            self._left = message
        self.store.append_line(keys.messages(round_), records.encode(message))
        if message.kind in _OF_A_ROUND:
            if round_ != self._said_in:
                self._said_in, self._said = round_, {}
            self._said[message.kind] = message

    def _say_it_is_there(self, round_: int) -> None:
        """Announce this node, as a spare or as left, to a new coordinator of a closed round."""
        if self._left is not None or self._arrival is not None:
            arrived = NodeMessage(Kind.ARRIVED, self.node, arrival=self._arrival)
            self._append(self._left or arrived, round_)
            self.notify()

    def _say_again(self, round_: int) -> None:
        """Send a new coordinator this node's messages of a round that goes on."""
        said = tuple(self._said.values()) if round_ == self._said_in else ()
        if self._left is not None:
            said = (*said, self._left)
        for message in said:
            if message.state is WorkerState.SUCCEEDED:
                self.succeeded(round_)
            else:
                self._append(message, round_)
        if said:
            self.notify()

    def _is_in(self, round_: int) -> bool:
        return self.entry.phase is Phase.CLOSED and self.entry.round == round_
