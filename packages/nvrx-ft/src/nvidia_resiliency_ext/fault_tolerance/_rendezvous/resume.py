# SPDX-License-Identifier: Apache-2.0
"""How a store host that was started anew finds out where the job stands. Pure.

Launchers go on while the store is away, and tell the new one the last decision they know and their
own place in it. When all that had a place have done so, the round goes on as if nothing had been;
when some stay away, a new round is opened without them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nvidia_resiliency_ext.fault_tolerance._launch.cause import Cause

from . import marks
from .records import Entry, Kind, Marks, Note, Phase


@dataclass(frozen=True, slots=True)
class Known:
    """What the launchers have told: the last decision, who is still in its round, who waits.

    `gone` is what nodes said that take part no longer: they are no spares, and a member among them
    is one that has left. `marks` is what the lost host knew of hosts and nodes.
    """

    entry: Entry
    members: tuple[Note, ...]
    spares: tuple[Note, ...] = ()
    gone: tuple[Note, ...] = ()
    marks: Marks = field(default_factory=Marks)


@dataclass(frozen=True, slots=True)
class GoOn:
    """The job stands where `known` says, and goes on."""

    known: Known


@dataclass(frozen=True, slots=True)
class Reopen:
    """The job needs a round: the one that was open, or a new one."""

    round: int
    cause: Cause


def known_from(notes: tuple[Note, ...]) -> Known | None:
    """Return what launchers have told of the time before, or None if none has."""
    told = [n for n in notes if n.kind is Kind.RESUMED and n.entry is not None]
    if not told:
        return None
    # Not all may have heard yet that ranks are to save and leave, and at which call.
    entry = max(
        (n.entry for n in told if n.entry),
        key=lambda e: (e.round, e.phase is Phase.CLOSED, e.is_leaving, e.save_at),
    )
    latest = {n.node: n for n in told}
    members = tuple(
        note
        for note in latest.values()
        if note.entry is not None
        and note.entry.round == entry.round
        and note.entry.phase is Phase.CLOSED
        and note.place is not None
    )
    gone = _gone(notes)
    spares = tuple(
        note
        for note in latest.values()
        if note.arrival is not None and note not in members and note.node not in gone
    )
    known_marks = marks.merged(n.entry.marks for n in told if n.entry)
    return Known(entry, members, spares, tuple(gone.values()), known_marks)


def _gone(notes: tuple[Note, ...]) -> dict[str, Note]:
    """Return what nodes said last that left and have not arrived since."""
    gone: dict[str, Note] = {}
    for note in notes:
        if note.kind in (Kind.LEFT, Kind.UNHEALTHY):
            gone[note.node] = note
        elif note.kind is Kind.ARRIVED:
            gone.pop(note.node, None)
    return gone


def decide_resume(known: Known, waited_s: float, patience_s: float) -> GoOn | Reopen | None:
    """Return how the job goes on, or None while launchers may still come."""
    entry = known.entry
    if entry.phase is Phase.OPEN:
        cause = entry.cause or Cause("opened", "a round was open when the store was lost")
        return Reopen(entry.round, cause)
    if len(known.members) >= entry.active:
        return GoOn(known)
    if waited_s < patience_s:
        return None
    missing = entry.active - len(known.members)
    what = f"{missing} of {entry.active} nodes were lost while the store was away"
    return Reopen(entry.round + 1, Cause("node_lost", what, detected_by="lease"))
