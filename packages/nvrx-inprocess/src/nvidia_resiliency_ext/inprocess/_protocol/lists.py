# SPDX-License-Identifier: Apache-2.0
"""Encode, decode and evaluate the lists of an iteration; no I/O.

A list is a text to which monitors append entries that end in `;`. The same entry may stand in it
twice, after the loss of a monitor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.inprocess._store.names import ForeignValueError, require_json
from nvidia_resiliency_ext.inprocess.attribution import InterruptionRecord

from .decision import Arrival, Decision, ObservedActivity, entries_of, find_hang

_LEFT = "-"
_ENDED = "?"
_ARRIVAL = re.compile(r"(\d{1,9}):(?:([-?])|(\d{1,9}):(\d{1,9}))(?::([^:]*))?", re.ASCII)
_MOST_RANKS_OF_A_NODE = 4096


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """A node as its monitor has announced it; its number is its smallest initial rank.

    `processes` has by rank the process and its start in clock ticks, 0 once the rank has left.
    """

    node_id: int
    processes: Mapping[int, tuple[int, int]]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.processes)


def format_arrival(arrival: Arrival) -> str:
    if arrival.goes_on:
        reported = f"{arrival.rank}:{arrival.world_size}"
    else:
        reported = _LEFT if arrival.is_out else _ENDED
    observed = "" if arrival.observed is None else f":{arrival.observed.to_text()}"
    return f"{arrival.initial_rank}:{reported}{observed};"


def parse_arrivals(text: str, key: str = "arrivals") -> list[Arrival]:
    """Return the arrivals of a list; a ForeignValueError for anything else."""
    return [_parse_arrival(entry, key) for entry in entries_of(text, key)]


def _parse_arrival(entry: str, key: str) -> Arrival:
    found = _ARRIVAL.fullmatch(entry)
    if found is None:
        raise ForeignValueError(key, entry)
    initial_rank, how, *numbers, observed = found.groups()
    rank, world_size = (None if number is None else int(number) for number in numbers)
    try:
        activity = None if observed is None else ObservedActivity.from_text(observed)
    except ValueError:
        raise ForeignValueError(key, entry) from None
    if rank is not None and world_size is not None and rank >= world_size:
        raise ForeignValueError(key, entry)
    return Arrival(int(initial_rank), rank, world_size, how == _LEFT, activity)


def is_whole(arrivals: Iterable[Arrival], participants: frozenset[int]) -> bool:
    """Return whether every participant stands in the list, in whatever form."""
    return participants <= {arrival.initial_rank for arrival in arrivals}


def is_complete(completions: Iterable[Arrival]) -> bool:
    """Return whether every rank of the world that the entries name has completed."""
    ranks: dict[int, set[int]] = {}
    for entry in completions:
        if entry.rank is not None and entry.world_size is not None:
            ranks.setdefault(entry.world_size, set()).add(entry.rank)
    return any(len(found) == world_size for world_size, found in ranks.items())


def have_all_reported(
    records: Iterable[InterruptionRecord],
    silent: Iterable[Arrival],
    participants: frozenset[int],
) -> bool:
    """Return whether every participant has reported or has nothing to report."""
    reported = {record.rank for record in records}
    return participants <= reported.union(entry.initial_rank for entry in silent)


def decide(
    arrivals: Sequence[Arrival],
    participants: frozenset[int],
    records: Iterable[InterruptionRecord],
) -> Decision:
    """Return what follows from a whole list.

    Who stands in it in several forms does not go on: it has ended after it had arrived. Neither do
    those who contradict a smaller initial rank in the size of the world or in a number: were they
    to go on, two ranks would take themselves for the same.
    """
    reported: dict[int, Arrival] = {}
    for arrival in arrivals:
        known = reported.get(arrival.initial_rank, arrival)
        if arrival.initial_rank in participants:
            reported[arrival.initial_rank] = _both(known, arrival)
    world_size: int | None = None
    taken: set[int] = set()
    for initial_rank, arrival in sorted(reported.items()):
        if arrival.rank is not None:
            world_size = arrival.world_size if world_size is None else world_size
            if arrival.world_size != world_size or arrival.rank in taken:
                reported[initial_rank] = _out(arrival)
            else:
                taken.add(arrival.rank)
    numbers = {each.initial_rank: each.rank for each in reported.values() if each.rank is not None}
    lost = tuple(sorted(reported.keys() - numbers.keys()))
    records = _in_order(records)
    observed = {rank: each.observed for rank, each in reported.items() if each.observed is not None}
    hang = find_hang(records, observed, len(reported))
    return Decision(world_size or 0, numbers, lost, records, hang)


def _both(known: Arrival, arrival: Arrival) -> Arrival:
    if arrival == known or not known.goes_on:
        return known
    return _out(arrival) if arrival.goes_on else arrival


def _out(arrival: Arrival) -> Arrival:
    return Arrival(arrival.initial_rank, None, None, is_out=True)


def _in_order(records: Iterable[InterruptionRecord]) -> tuple[InterruptionRecord, ...]:
    return tuple(sorted(set(records), key=lambda record: (record.interruption.value, record.rank)))


def format_node(node: NodeEntry) -> str:
    """Return a node as a line of the list of nodes."""
    fields = [node.node_id, [[rank, *process] for rank, process in node.processes.items()]]
    return json.dumps(fields, separators=(",", ":")) + "\n"


def parse_nodes(text: str, key: str = "nodes") -> list[NodeEntry]:
    """Return the nodes of the list, by number; the last entry of a number counts."""
    found: dict[int, NodeEntry] = {}
    for line in text.splitlines():
        node = _parse_node(line, key)
        found[node.node_id] = node
    return [found[node_id] for node_id in sorted(found)]


def _parse_node(line: str, key: str) -> NodeEntry:
    match require_json(key, line):
        case [node_id, [*processes]] if (
            _is_number(node_id)
            and len(processes) <= _MOST_RANKS_OF_A_NODE
            and all(map(_is_process, processes))
        ):
            return NodeEntry(node_id, {rank: (pid, start) for rank, pid, start in processes})
    raise ForeignValueError(key, line)


def _is_process(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_number, value))  # noqa: PLR2004


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0
