# SPDX-License-Identifier: Apache-2.0
"""The log of decisions, what is left of it after a lost store, and who is in a round.

No decision is taken back. Launchers go on while the store is away, and send the new one the last
decision they know and their place in it. The round goes on once all that had a place have done so;
else a new one is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from . import keys, records
from .coordinator import arrived
from .store import JobStore

MAX_DIGITS = 18


class DecisionLog:
    """The decisions of one job; ForeignValueError: something else stands in a decision's place."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._was_vain = False

    def add(self, entry: records.Entry) -> records.Entry:
        """Write a decision, and return the one that stands at its place then."""
        stands = self._store.create(keys.log(entry.seq), records.encode(entry))
        return self._decoded(entry.seq, stands)

    def wait_for(self, seq: int, timeout_s: float) -> records.Entry | None:
        """Wait for a decision; None after `timeout_s`, or earlier when something else woke this."""
        key = keys.log(seq)
        if not self._store.wait_until_set(key, timeout_s):
            return None
        # Whoever reads a missing key wakes all who wait for it, and if each of them read it again
        # that would never end.
        if self._was_vain and not self._store.has(key):
            return None
        text = self._store.peek(key)
        self._was_vain = text is None
        return None if text is None else self._decoded(seq, text)

    def next_after(self, seq: int) -> records.Entry | None:
        """Return the decision after `seq`, if there is one; it never waits."""
        key = keys.log(seq + 1)
        # Asked first: to read a missing key would wake in vain all who wait for it.
        text = self._store.peek(key) if self._store.has(key) else None
        return None if text is None else self._decoded(seq + 1, text)

    def last_known(self) -> records.Entry:
        """Return the decision that the host announced last; the others follow from it."""
        head = self._store.peek(keys.HEAD) or ""
        number = int(head) if head.isdecimal() and len(head) <= MAX_DIGITS else -1
        entry = self.next_after(number - 1) if number >= 0 else None
        if entry is None:
            raise records.ForeignValueError(f"{keys.HEAD}: {head[:20]!r} is no decision's number")
        return entry

    @staticmethod
    def _decoded(seq: int, text: str) -> records.Entry:
        entry = records.decode(records.Entry, text)
        if entry.seq != seq:
            raise records.ForeignValueError(f"decision {entry.seq} stands at the place of {seq}")
        return entry


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What launchers reported of a lost store: its last decision, and the nodes of its round."""

    entry: records.Entry
    members: tuple[records.NodeMessage, ...]
    spares: tuple[records.NodeMessage, ...] = ()
    gone: tuple[records.NodeMessage, ...] = ()  # Departure notices; none of a spare node.


def resume_state_from(messages: tuple[records.NodeMessage, ...]) -> ResumeState | None:
    """Return the state of a lost store from the launchers' reports, or None without a report."""
    resumed = [n for n in messages if n.kind is records.Kind.RESUMED and n.entry is not None]
    if not resumed:
        return None
    # Not all may know yet that ranks are to save and leave, and at which call.
    entry = max(
        (n.entry for n in resumed if n.entry),
        key=lambda e: (e.round, e.phase is records.Phase.CLOSED, e.is_leaving, e.save_at),
    )
    latest = {n.node: n for n in resumed}.values()
    is_closed = records.Phase.CLOSED, entry.round
    members = tuple(
        n
        for n in latest
        if n.assignment and n.entry and (n.entry.phase, n.entry.round) == is_closed
    )
    # What nodes said last that left and have not arrived since.
    gone: dict[str, records.NodeMessage] = {}
    for message in messages:
        if message.kind in (records.Kind.LEFT, records.Kind.UNHEALTHY):
            gone[message.node] = message
        elif message.kind is records.Kind.ARRIVED:
            gone.pop(message.node, None)
    spares = tuple(n for n in latest if n.arrival and n not in members and n.node not in gone)
    return ResumeState(entry, members, spares, tuple(gone.values()))


FINAL = frozenset(
    {records.WorkerState.SUCCEEDED, records.WorkerState.FAILED, records.WorkerState.UNKNOWN}
)


@dataclass(frozen=True, slots=True)
class RoundMember:
    """One node of a round; `group_rank` is None for a spare, `state` is that of its workers."""

    arrival: records.Arrival
    group_rank: int | None
    state: records.WorkerState


def read_members(store: JobStore, round_: int) -> list[RoundMember]:
    """Return the nodes of a closed round: those with a place by rank, then the spares.

    It costs one operation of the store, and one more for each node.
    """
    messages = read_messages(store, round_)
    there = arrived(messages)
    everybody: dict[str, records.Arrival] = {}
    states: dict[str, records.WorkerState] = {}
    for message in messages:
        state = message.state if message.kind is records.Kind.STATE else None
        if message.kind is records.Kind.ARRIVED and message.arrival is not None:
            everybody[message.node] = message.arrival
        elif message.kind in (records.Kind.LEFT, records.Kind.UNHEALTHY):
            state = records.WorkerState.UNKNOWN
        # The first final word stays.
        if state is not None and states.get(message.node) not in FINAL:
            states[message.node] = state
    members = []
    for node, arrival in everybody.items():
        text = store.peek(keys.assignment(node))
        place = None if text is None else records.decode(records.RankAssignment, text)
        rank = place.group_rank if place is not None and place.round == round_ else None
        if rank is not None or node in there:
            state = states.get(node, records.WorkerState.HEALTHY)
            members.append(RoundMember(arrival, rank, state))
    return sorted(members, key=lambda member: (member.group_rank is None, member.group_rank or 0))


def read_messages(store: JobStore, round_: int) -> tuple[records.NodeMessage, ...]:
    """Return the messages of nodes to the coordinator in a round; others' lines are left out."""
    read = partial(records.decode, records.NodeMessage)
    return tuple(store.lines(keys.messages(round_), 0, read)[0])
