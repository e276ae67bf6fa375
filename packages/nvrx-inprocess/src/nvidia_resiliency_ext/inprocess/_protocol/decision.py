# SPDX-License-Identifier: Apache-2.0
"""Records, arrivals and the decision that ends an interrupted iteration, and their texts. Pure.

Texts join ranks in a row, so that they are short where nearly all ranks do the same.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvidia_resiliency_ext.inprocess._store.names import ForeignValueError
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
    """What a rank's main thread did when its iteration was interrupted; `words` follow "rank 2"."""

    activity: Activity
    place: str = ""
    words: str = ""

    def to_text(self) -> str:
        """Return it as a word that stands in the lists of the store."""
        parts = (self.place[:_LONGEST_PART], self.words[:_LONGEST_PART])
        return ",".join((self.activity.value, *(urllib.parse.quote(part, "/") for part in parts)))

    @classmethod
    def from_text(cls, text: str) -> ObservedActivity:
        """Return what `to_text` encoded; a ValueError for anything else."""
        activity, place, words = text[: 8 * _LONGEST_PART].split(",")
        unquote = urllib.parse.unquote
        # What is shown in logs is one line, whoever wrote it.
        place, words = (" ".join(unquote(part).split()) for part in (place, words))
        return cls(Activity(activity), place, words)


@dataclass(frozen=True, slots=True)
class Hang:
    """The cause of a hang in one sentence, and the initial ranks at fault, if any."""

    text: str
    culprits: tuple[int, ...] = ()


def is_searched(records: Iterable[InterruptionRecord]) -> bool:
    """Return whether a hang can be behind what was reported."""
    return all(record.interruption in _SEARCHED for record in records)


def find_hang(
    records: Iterable[InterruptionRecord], observed: Mapping[int, ObservedActivity], world_size: int
) -> Hang | None:
    """Return whom a hang is blamed on, None when it was no hang or nothing is known.

    An exception is a hang's only where a collective raised it, so that its rank counts as waiting.
    """
    records = list(records)
    if not is_searched(records):
        return None
    late = {record.rank for record in records if record.interruption in _TIMEOUTS}
    raised = [r.rank for r in records if r.interruption is Interruption.EXCEPTION]
    waited = {rank for rank, each in observed.items() if each.activity is Activity.WAITING}
    if not waited.issuperset(raised) or not (late or raised):
        return None
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
