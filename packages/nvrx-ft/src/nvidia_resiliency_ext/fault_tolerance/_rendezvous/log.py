# SPDX-License-Identifier: Apache-2.0
"""The log of decisions, none of which is taken back, and what is left of it after a lost store.

Launchers go on while the store is away, and send the new one the last decision they know and their
place in it. The round goes on once all that had a place have done so; else a new one is opened.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import keys, records
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
    gone: tuple[records.NodeMessage, ...] = ()  # Last words of nodes that left; none is a spare.


def resume_state_from(messages: tuple[records.NodeMessage, ...]) -> ResumeState | None:
    """Return what launchers reported of a lost store, or None if none has."""
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
