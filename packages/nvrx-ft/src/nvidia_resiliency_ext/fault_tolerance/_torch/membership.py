# SPDX-License-Identifier: Apache-2.0
"""Who is in a round and how its workers are, read from the store on request by any node."""

from __future__ import annotations

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
    """Return what nodes have sent the coordinator in a round, as far as it is this job's."""

    def read(line: str) -> records.NodeMessage:
        return records.decode(records.NodeMessage, line)

    return tuple(store.lines(keys.messages(round_), 0, read)[0])
