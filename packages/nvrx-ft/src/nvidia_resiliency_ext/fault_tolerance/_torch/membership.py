# SPDX-License-Identifier: Apache-2.0
"""Who is in a round and how its workers are, read from the store on request by any node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys, records
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import arrived
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import JobStore

FINAL = frozenset(
    {records.WorkerState.SUCCEEDED, records.WorkerState.FAILED, records.WorkerState.UNKNOWN}
)


@dataclass(frozen=True, slots=True)
class RoundMember:
    """One node of a round; `group_rank` is None for a spare, `state` is that of its workers."""

    arrival: records.Arrival
    group_rank: int | None
    state: records.WorkerState = records.WorkerState.HEALTHY


def read_members(store: JobStore, round_: int) -> list[RoundMember]:
    """Return the nodes of a closed round: those with a place by rank, then the spares.

    It costs one operation, and one more for each node.
    """
    messages = read_messages(store, round_)
    states = worker_states(messages)
    there = arrived(messages)
    members = []
    everybody = {
        n.node: n.arrival for n in messages if n.kind is records.Kind.ARRIVED and n.arrival
    }
    for node, arrival in everybody.items():
        text = store.peek(keys.assignment(node))
        place = None if text is None else records.decode(records.RankAssignment, text)
        rank = place.group_rank if place is not None and place.round == round_ else None
        if rank is not None or node in there:
            members.append(
                RoundMember(arrival, rank, states.get(node, records.WorkerState.HEALTHY))
            )
    return sorted(members, key=lambda member: (member.group_rank is None, member.group_rank or 0))


def read_messages(store: JobStore, round_: int) -> tuple[records.NodeMessage, ...]:
    """Return what nodes have sent the coordinator in a round, as far as it is this job's."""

    def read(line: str) -> records.NodeMessage:
        return records.decode(records.NodeMessage, line)

    return tuple(store.lines(keys.messages(round_), 0, read)[0])


def worker_states(messages: Iterable[records.NodeMessage]) -> dict[str, records.WorkerState]:
    """Return what is said of each node's workers; the first final word stays."""
    states: dict[str, records.WorkerState] = {}
    for message in messages:
        if states.get(message.node) in FINAL:
            continue
        if message.kind is records.Kind.STATE and message.state is not None:
            states[message.node] = message.state
        elif message.kind in (records.Kind.LEFT, records.Kind.UNHEALTHY):
            states[message.node] = records.WorkerState.UNKNOWN
    return states
