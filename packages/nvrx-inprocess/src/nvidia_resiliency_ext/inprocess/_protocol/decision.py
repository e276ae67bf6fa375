# SPDX-License-Identifier: Apache-2.0
"""Records, arrivals, nodes and decisions: their texts, and what follows from them. Pure.

A list is a text to which monitors append entries that end in `;`, after the loss of a monitor the
same one twice. Texts join ranks in a row: they are short where nearly all ranks do the same.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvidia_resiliency_ext.inprocess._store.endpoint import ForeignValueError, require_json
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.shared_utils.hang_culprit import RankState, describe, find_culprit
from nvidia_resiliency_ext.shared_utils.rank_activity import Activity
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks, parse_ranks

LONGEST_TEXT = 4096
_LONGEST_PART = 600
_MOST_NAMED = 4
_TIMEOUTS = frozenset({Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT})

# A rank that is gone breaks the connections of the others: it is the cause.
_SEARCHED = _TIMEOUTS | {Interruption.EXCEPTION}


@dataclass(frozen=True, slots=True)
class ObservedActivity:
    """Activity of a rank's main thread at an interruption; `words` follow "rank 2" in texts."""

    activity: Activity
    place: str = ""
    words: str = ""

    def to_text(self) -> str:
        """Encode the activity as one word of the store's lists."""
        parts = (self.place[:_LONGEST_PART], self.words[:_LONGEST_PART])
        return ",".join((self.activity.value, *(urllib.parse.quote(part, "/") for part in parts)))

    @classmethod
    def from_text(cls, text: str) -> ObservedActivity:
        """Decode the text of `to_text`; a ValueError for anything else."""
        activity, place, words = text[: 8 * _LONGEST_PART].split(",")
        unquote = urllib.parse.unquote
        # What is shown in logs is one line, also of a hostile rank.
        place, words = (" ".join(unquote(part).split()) for part in (place, words))
        return cls(Activity(activity), place, words)


@dataclass(frozen=True, slots=True)
class Hang:
    """The cause of a hang in one sentence, and the initial ranks at fault, if any."""

    text: str
    culprits: tuple[int, ...] = ()


def is_searched(records: Iterable[InterruptionRecord]) -> bool:
    """Return whether a hang can have caused all reported interruptions."""
    return all(record.interruption in _SEARCHED for record in records)


def find_hang(
    records: Iterable[InterruptionRecord], observed: Mapping[int, ObservedActivity], world_size: int
) -> Hang | None:
    """Return the culprit of a hang and what killed ranks did, None when nothing is known.

    An exception is a hang's only where a collective raised it, so that its rank counts as waiting.
    """
    records, texts, culprits = list(records), list[str](), tuple[int, ...]()
    late = {record.rank for record in records if record.interruption in _TIMEOUTS}
    raised = [r.rank for r in records if r.interruption is Interruption.EXCEPTION]
    waited = {rank for rank, each in observed.items() if each.activity is Activity.WAITING}
    if is_searched(records) and waited.issuperset(raised) and (late or raised):
        states = [
            RankState(rank, each.activity, words=each.words, place=each.place, is_late=rank in late)
            for rank, each in sorted(observed.items())
        ]
        finding = find_culprit(states, world_size)
        culprits = tuple(state.rank for state in finding.culprits)
        texts = [describe(finding)] if culprits else []
    killed = {r.rank for r in records if r.interruption is Interruption.HARD_TIMEOUT}
    named = sorted(killed.intersection(observed).difference(culprits))[:_MOST_NAMED]
    texts += [f"rank {rank} {observed[rank].words}" for rank in named if observed[rank].words]
    return Hang("; ".join(texts)[:LONGEST_TEXT], culprits) if texts else None


_MOST_RANKS = 1 << 20
_END = ";"


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a participant has reached the end of an iteration.

    It goes on with its number among `world_size`, is discarded or leaves (`is_out`), or has ended.
    """

    initial_rank: int
    rank: int | None
    world_size: int | None
    is_out: bool
    observed: ObservedActivity | None = field(default=None, compare=False)

    @property
    def goes_on(self) -> bool:
        return self.rank is not None and not self.is_out


@dataclass(frozen=True, slots=True)
class Decision:
    """The end of an interrupted iteration: `numbers` has by initial rank each rank that goes on.

    `lost` are the initial ranks of the other participants.
    """

    world_size: int
    numbers: Mapping[int, int]
    lost: tuple[int, ...]
    records: tuple[InterruptionRecord, ...]
    hang: Hang | None = None

    @property
    def going_on(self) -> frozenset[int]:
        return frozenset(self.numbers)

    @property
    def terminated(self) -> tuple[int, ...]:
        """Return the numbers of this iteration that no rank has which goes on."""
        taken = set(self.numbers.values())
        return tuple(rank for rank in range(self.world_size) if rank not in taken)


def encode_decision(decision: Decision) -> str:
    runs: list[list[int]] = []  # of ranks in a row whose numbers are in a row
    for initial_rank, rank in sorted(decision.numbers.items()):
        if runs and runs[-1][0] + runs[-1][2] == initial_rank and sum(runs[-1][1:]) == rank:
            runs[-1][2] += 1
        else:
            runs.append([initial_rank, rank, 1])
    fields: dict[str, Any] = {
        "world_size": decision.world_size,
        "going": runs,
        "lost": format_ranks(decision.lost),
        "records": format_records(decision.records),
    }
    if decision.hang is not None:
        fields["hang"] = [decision.hang.text, list(decision.hang.culprits)]
    return json.dumps(fields, separators=(",", ":"))


def decode_decision(text: str, key: str = "decision") -> Decision:
    """Decode a decision; a ForeignValueError for anything else."""
    try:
        fields = json.loads(text)
        world_size, runs = fields["world_size"], fields["going"]
        _require(_is_count(world_size) and isinstance(runs, list))
        _require(all(len(run) == 3 and all(map(_is_count, run)) for run in runs))  # noqa: PLR2004
        # Sizes first: a text that claims more ranks than there are is not expanded.
        _require(sum(count for _, _, count in runs) <= world_size)
        pairs = [(run[0] + step, run[1] + step) for run in runs for step in range(run[2])]
        numbers, lost = dict(pairs), tuple(parse_ranks(fields["lost"]))
        _require(len(pairs) == len(numbers) == len(set(numbers.values())))
        _require(numbers.keys().isdisjoint(lost))
        _require(all(rank < world_size for rank in numbers.values()))
        _require(isinstance(fields["records"], str))
        records = tuple(parse_records(fields["records"], key))
        hang = _parse_hang(fields["hang"]) if "hang" in fields else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ForeignValueError(key, text) from None
    return Decision(world_size, numbers, lost, records, hang)


def format_records(records: Iterable[InterruptionRecord]) -> str:
    """Return records, of initial ranks, as entries of a list, one per kind: `EXCEPTION:0-2;`."""
    by_kind: dict[str, set[int]] = {}
    for record in records:
        by_kind.setdefault(record.interruption.name, set()).add(record.rank)
    return "".join(f"{name}:{format_ranks(ranks)}{_END}" for name, ranks in by_kind.items())


def parse_records(text: str, key: str = "interruption_records") -> list[InterruptionRecord]:
    """Return the records of a list; a ForeignValueError for anything else."""
    records: list[InterruptionRecord] = []
    for entry in entries_of(text, key):
        name, _, ranks = entry.partition(":")
        try:
            kind, numbers = Interruption[name], parse_ranks(ranks)
        except (KeyError, ValueError):
            raise ForeignValueError(key, entry) from None
        if not numbers or len(records) + len(numbers) > _MOST_RANKS:
            raise ForeignValueError(key, entry)
        records += (InterruptionRecord(rank, kind) for rank in numbers)
    return records


def entries_of(text: str, key: str) -> list[str]:
    """Return the entries of a list, each of which ends in `;`."""
    if not text:
        return []
    if not text.endswith(_END):
        raise ForeignValueError(key, text)
    return text[: -len(_END)].split(_END)


def _parse_hang(value: Any) -> Hang:
    text, culprits = value
    _require(isinstance(text, str) and len(text) <= LONGEST_TEXT and isinstance(culprits, list))
    _require(len(culprits) <= _MOST_RANKS and all(map(_is_count, culprits)))
    return Hang(" ".join(text.split()), tuple(culprits))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_RANKS


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


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
    """Return whether every participant is among the arrivals, in any form."""
    return participants <= {arrival.initial_rank for arrival in arrivals}


def is_complete(completions: Iterable[Arrival]) -> bool:
    """Return whether every rank of the world that the entries name has completed."""
    ranks: dict[int, set[int]] = {}
    for entry in completions:
        if entry.rank is not None and entry.world_size is not None:
            ranks.setdefault(entry.world_size, set()).add(entry.rank)
    return any(len(found) == world_size for world_size, found in ranks.items())


def have_all_reported(
    records: Iterable[InterruptionRecord], silent: Iterable[Arrival], participants: frozenset[int]
) -> bool:
    """Return whether every participant has reported or has nothing to report."""
    reported = {record.rank for record in records}
    return participants <= reported.union(entry.initial_rank for entry in silent)


def decide(
    arrivals: Sequence[Arrival], participants: frozenset[int], records: Iterable[InterruptionRecord]
) -> Decision:
    """Decide the next iteration from the complete list of arrivals.

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
    in_order = sorted(set(records), key=lambda record: (record.interruption.value, record.rank))
    observed = {rank: each.observed for rank, each in reported.items() if each.observed is not None}
    hang = find_hang(in_order, observed, len(reported))
    return Decision(world_size or 0, numbers, lost, tuple(in_order), hang)


def _both(known: Arrival, arrival: Arrival) -> Arrival:
    if arrival == known or not known.goes_on:
        return known
    return _out(arrival) if arrival.goes_on else arrival


def _out(arrival: Arrival) -> Arrival:
    return Arrival(arrival.initial_rank, None, None, is_out=True)


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
