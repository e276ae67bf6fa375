# SPDX-License-Identifier: Apache-2.0
"""Which rank is to blame when ranks waited in vain, from what all were doing; no I/O."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.shared_utils.hang_culprit import RankState, describe, find_culprit
from nvidia_resiliency_ext.shared_utils.rank_activity import Activity

LONGEST_TEXT = 4096
_LONGEST_PART = 600
_MOST_TOLD = 4
_TIMEOUTS = frozenset({Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT})
# A rank that is gone breaks the connections of the others: it is the cause.
_SEARCHED = _TIMEOUTS | {Interruption.EXCEPTION}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank's main thread was doing when its iteration was interrupted.

    Attributes:
        activity: Whether it waited for its peers, or worked.
        place: Line of the program, such as `train.py:41 in load`, or "".
        words: The same for people, follows "rank 2"; "" for one that waits.
    """

    activity: Activity
    place: str = ""
    words: str = ""

    def to_text(self) -> str:
        """Return it as a word that stands in the lists of the store."""
        parts = (self.place[:_LONGEST_PART], self.words[:_LONGEST_PART])
        return ",".join((self.activity.value, *(urllib.parse.quote(part, "/") for part in parts)))

    @classmethod
    def from_text(cls, text: str) -> Seen:
        """Return what `to_text` made a word of.

        Raises:
            ValueError: The word is none of `to_text`.
        """
        activity, place, words = text[: 8 * _LONGEST_PART].split(",")
        unquote = urllib.parse.unquote
        # What is shown in logs is one line, whoever wrote it.
        place, words = (" ".join(unquote(part).split()) for part in (place, words))
        return cls(Activity(activity), place, words)


@dataclass(frozen=True, slots=True)
class Hang:
    """Whom a hang is blamed on, as one sentence; and the initial ranks, none if nobody is."""

    text: str
    culprits: tuple[int, ...] = ()


def is_searched(records: Iterable[InterruptionRecord]) -> bool:
    """Return whether a hang can be behind what was reported."""
    return all(record.interruption in _SEARCHED for record in records)


def find_hang(
    records: Iterable[InterruptionRecord], seen: Mapping[int, Seen], world_size: int
) -> Hang | None:
    """Return whom a hang is blamed on, None when it was no hang or nothing is known.

    An exception is a hang's only where a collective raised it, so that its rank counts as waiting.

    Args:
        records: What was reported, of initial ranks.
        seen: What ranks were doing, by initial rank.
        world_size: Ranks that took part.

    Example:
        >>> found = find_hang(
        ...     [InterruptionRecord(0, Interruption.SOFT_TIMEOUT)],
        ...     {
        ...         0: Seen(Activity.WAITING, "train.py:9 in step"),
        ...         1: Seen(Activity.WORKING, "train.py:5 in load", "runs in train.py:5 in load"),
        ...     },
        ...     world_size=2,
        ... )
        >>> found.text
        'rank 1 runs in train.py:5 in load; rank 0 waited for it'
    """
    records = list(records)
    if not is_searched(records):
        return None
    late = {record.rank for record in records if record.interruption in _TIMEOUTS}
    raised = [r.rank for r in records if r.interruption is Interruption.EXCEPTION]
    waited = {rank for rank, each in seen.items() if each.activity is Activity.WAITING}
    if not waited.issuperset(raised) or not (late or raised):
        return None
    states = [_state(rank, each, is_late=rank in late) for rank, each in sorted(seen.items())]
    finding = find_culprit(states, world_size)
    culprits = tuple(state.rank for state in finding.culprits)
    texts = [describe(finding)] if culprits else []
    killed = {r.rank for r in records if r.interruption is Interruption.HARD_TIMEOUT}
    told = sorted(killed.intersection(seen).difference(culprits))[:_MOST_TOLD]
    texts += [f"rank {rank} {seen[rank].words}" for rank in told if seen[rank].words]
    return Hang("; ".join(texts)[:LONGEST_TEXT], culprits) if texts else None


def _state(rank: int, seen: Seen, *, is_late: bool) -> RankState:
    return RankState(rank, seen.activity, words=seen.words, place=seen.place, is_late=is_late)
