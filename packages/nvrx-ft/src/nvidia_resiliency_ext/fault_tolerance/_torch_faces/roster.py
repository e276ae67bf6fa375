# SPDX-License-Identifier: Apache-2.0
"""Who is in the present round, read from the store on request by any node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.host import arrived
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import (
    Arrival,
    ForeignValueError,
    Kind,
    Note,
    Place,
    WorkerState,
    decode,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import JobStore

FINAL = frozenset({WorkerState.SUCCEEDED, WorkerState.FAILED, WorkerState.UNKNOWN})


@dataclass(frozen=True, slots=True)
class Seat:
    """One node of a round; `group_rank` is None for a spare, `state` is that of its workers."""

    arrival: Arrival
    group_rank: int | None
    state: WorkerState = WorkerState.HEALTHY


def read_roster(store: JobStore, round_: int) -> list[Seat]:
    """Return the nodes of a closed round: those with a place by rank, then the spares.

    It costs one operation, and one more for each node.
    """
    notes = read_notes(store, round_)
    states = worker_states(notes)
    there = arrived(notes)
    seats = []
    for node, arrival in _everybody(notes).items():
        rank = _rank(store, node, round_)
        if rank is not None or node in there:
            seats.append(Seat(arrival, rank, states.get(node, WorkerState.HEALTHY)))
    return sorted(seats, key=lambda seat: (seat.group_rank is None, seat.group_rank or 0))


def read_notes(store: JobStore, round_: int) -> tuple[Note, ...]:
    """Return what nodes have told the host in a round, as far as it is this job's."""
    notes = []
    for line in store.lines(keys.inbox(round_), 0)[0]:
        try:
            notes.append(decode(Note, line))
        except ForeignValueError as error:
            store.report_foreign(error)
    return tuple(notes)


def worker_states(notes: Iterable[Note]) -> dict[str, WorkerState]:
    """Return what is said of each node's workers; the first final word stays."""
    states: dict[str, WorkerState] = {}
    for note in notes:
        if states.get(note.node) in FINAL:
            continue
        if note.kind is Kind.STATE and note.state is not None:
            states[note.node] = note.state
        elif note.kind in (Kind.LEFT, Kind.UNHEALTHY):
            states[note.node] = WorkerState.UNKNOWN
    return states


def _everybody(notes: Iterable[Note]) -> dict[str, Arrival]:
    return {n.node: n.arrival for n in notes if n.kind is Kind.ARRIVED and n.arrival is not None}


def _rank(store: JobStore, node: str, round_: int) -> int | None:
    text = store.peek(keys.place(node))
    if text is None:
        return None
    place = decode(Place, text)
    return place.group_rank if place.round == round_ else None
