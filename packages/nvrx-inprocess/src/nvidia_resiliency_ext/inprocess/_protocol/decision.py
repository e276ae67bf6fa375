# SPDX-License-Identifier: Apache-2.0
"""Compute and encode the decision that ends an interrupted iteration, and whom a hang is blamed on.

Pure. In the text neighbours are joined, so that it is short where nearly all ranks continue.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nvidia_resiliency_ext.inprocess._store.names import ForeignValueError
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.shared_utils.hang_culprit import RankState, describe, find_culprit
from nvidia_resiliency_ext.shared_utils.rank_activity import Activity

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


@dataclass(frozen=True)
class Decision:
    """The ranks that continue, those that ended, and the records.

    `terminated` are the numbers of this iteration that no rank has which goes on.
    """

    participants: tuple[Arrival, ...]
    terminated: tuple[int, ...]
    records: tuple[InterruptionRecord, ...]
    hang: Hang | None = None

    @cached_property
    def going_on(self) -> frozenset[int]:
        return frozenset(self._ranks)

    @cached_property
    def world_size(self) -> int:
        """World size of this iteration, 0 if no rank continues."""
        return len(self._ranks) + len(self.terminated)

    def rank_of(self, initial_rank: int) -> int | None:
        """Return a rank's number in this iteration, None unless it continues."""
        return self._ranks.get(initial_rank)

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {
            arrival.initial_rank: arrival.rank
            for arrival in self.participants
            if arrival.rank is not None and not arrival.is_out
        }


def encode_decision(decision: Decision) -> str:
    pairs = [(a.initial_rank, a.rank) for a in decision.participants if a.goes_on]
    # Only neighbours with neighbouring numbers are joined.
    going = _runs((initial, rank) for initial, rank in pairs if rank is not None)
    stay = [arrival for arrival in decision.participants if not arrival.goes_on]
    fields: dict[str, Any] = {
        "world_size": decision.world_size,
        "going": going,
        "left": _runs((arrival.initial_rank,) for arrival in stay if arrival.is_out),
        "ended": _runs((arrival.initial_rank,) for arrival in stay if not arrival.is_out),
        "records": _record_fields(decision.records),
    }
    if decision.hang is not None:
        fields["hang"] = [decision.hang.text, list(decision.hang.culprits)]
    return json.dumps(fields, separators=(",", ":"))


def decode_decision(text: str, key: str = "decision") -> Decision:
    """Decode a decision; a ForeignValueError for anything else."""
    try:
        fields = json.loads(text)
        world_size = fields["world_size"]
        going = [
            Arrival(initial, rank, world_size, is_out=False)
            for initial, rank in _spread(fields["going"], 2)
        ]
        left = [Arrival(rank, None, None, is_out=True) for (rank,) in _spread(fields["left"], 1)]
        ended = [Arrival(rank, None, None, is_out=False) for (rank,) in _spread(fields["ended"], 1)]
        records = _parse_record_fields(fields["records"])
        hang = _parse_hang(fields["hang"]) if "hang" in fields else None
        taken = {arrival.rank for arrival in going}
        initials = {arrival.initial_rank for arrival in (*going, *left, *ended)}
        _require(_is_count(world_size))
        _require(len(taken) == len(going))
        _require(len(initials) == len(going) + len(left) + len(ended))
        _require(all(rank is not None and rank < world_size for rank in taken))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ForeignValueError(key, text) from None
    participants = sorted((*going, *left, *ended), key=lambda arrival: arrival.initial_rank)
    terminated = tuple(rank for rank in range(world_size) if rank not in taken)
    return Decision(tuple(participants), terminated, records, hang)


def encode_records(records: Iterable[InterruptionRecord]) -> str:
    """Return records as a short text: ranks by kind."""
    return json.dumps(_record_fields(records), separators=(",", ":"))


def decode_records(text: str, key: str = "records") -> tuple[InterruptionRecord, ...]:
    """Decode records; a ForeignValueError for anything else."""
    try:
        return _parse_record_fields(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ForeignValueError(key, text) from None


def _record_fields(records: Iterable[InterruptionRecord]) -> dict[str, list[list[int]]]:
    by_kind: dict[str, list[int]] = {}
    for record in records:
        by_kind.setdefault(record.interruption.name, []).append(record.rank)
    return {name: _runs((rank,) for rank in sorted(ranks)) for name, ranks in by_kind.items()}


def _parse_record_fields(fields: Any) -> tuple[InterruptionRecord, ...]:
    return tuple(
        InterruptionRecord(rank, Interruption[name])
        for name, runs in fields.items()
        for (rank,) in _spread(runs, 1)
    )


def _parse_hang(value: Any) -> Hang:
    text, culprits = value
    _require(isinstance(text, str) and len(text) <= LONGEST_TEXT and isinstance(culprits, list))
    _require(len(culprits) <= _MOST_RANKS and all(map(_is_count, culprits)))
    return Hang(" ".join(text.split()), tuple(culprits))


def _runs(values: Iterable[tuple[int, ...]]) -> list[list[int]]:
    """Join values that follow each other in every place: [*first, how many]."""
    runs: list[list[int]] = []
    for value in values:
        if runs and all(runs[-1][place] + runs[-1][-1] == n for place, n in enumerate(value)):
            runs[-1][-1] += 1
        else:
            runs.append([*value, 1])
    return runs


def _spread(runs: Sequence[Sequence[int]], places: int) -> Iterator[tuple[int, ...]]:
    total = 0
    for run in runs:
        _require(isinstance(run, list) and len(run) == places + 1 and all(map(_is_count, run)))
        total += run[-1]
        _require(total <= _MOST_RANKS)
        for step in range(run[-1]):
            yield tuple(first + step for first in run[:-1])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_RANKS


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError
