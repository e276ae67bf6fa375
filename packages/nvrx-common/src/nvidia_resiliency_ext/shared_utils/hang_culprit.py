# SPDX-License-Identifier: Apache-2.0
"""Decides which rank a hang is to be blamed on, from what all ranks were doing. Pure.

The first row that applies decides. A rank "waits" when it is seen to wait for its peers.

| seen | verdict | confidence |
| --- | --- | --- |
| ranks that wrote an error file and have not exited | these | certain |
| ranks that are stopped | these | certain |
| some wait, one works | the one that works | likely |
| some wait, several work | the least advanced of them; else all of them | possible; none |
| some wait, others cannot be classified | as with those that work | possible; none |
| all wait, one had left with exit code 0 | the one that left | likely |
| all wait, one is behind the others, or waits in a place of its own | that one | possible |
| all wait, and there are ranks that were not looked at | elsewhere | none |
| all wait | nobody | none |
| none waits, most are in one place and the others are not | the others | possible |
| none waits, one rank broke its limit | that one | likely |
| none waits, all that broke their limit work | these | likely |
| none waits, some are less advanced | these | possible |
| none waits | nobody, candidates are those that broke their limit | none |
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .rank_activity import Activity
from .rank_sets import format_ranks

__all__ = ["Confidence", "Finding", "RankState", "describe", "find_culprit", "ranks_in_words"]

MAX_NAMED = 4  # ranks that a sentence describes one by one


class Confidence(enum.Enum):
    """How well the evidence supports the verdict."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class RankState:
    """Activity of one rank when a limit was broken.

    Attributes:
        rank: Global rank.
        activity: What it was doing.
        host: Its host; sentences leave out an empty one.
        words: The same for people: follows "rank 2".
        place: Line of the program in which its main thread is, or "".
        is_late: Whether it broke a limit itself.
        has_moved: Whether it used a heartbeat or section while it was looked at.
        progress: Steps finished, and 1 while it is in the next; None when it tells no steps.
    """

    rank: int
    activity: Activity
    host: str = ""
    words: str = ""
    place: str = ""
    is_late: bool = False
    has_moved: bool = False
    progress: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """The ranks that a hang is blamed on.

    Attributes:
        culprits: Ranks that are to blame; empty when that cannot be told.
        candidates: Ranks among which the culprit is, when it cannot be told.
        waiting: Ranks that waited for others.
        confidence: How well the evidence supports that.
        is_elsewhere: Whether all ranks wait, for one that was not looked at.
    """

    culprits: tuple[RankState, ...] = ()
    candidates: tuple[RankState, ...] = ()
    waiting: tuple[RankState, ...] = ()
    confidence: Confidence = Confidence.NONE
    is_elsewhere: bool = False


def find_culprit(ranks: Sequence[RankState], world_size: int = 0) -> Finding:
    """Return the ranks that are blamed for a hang, and the evidence.

    Args:
        ranks: All ranks that could be looked at.
        world_size: Ranks in the job; 0 when only these are.

    Example:
        >>> from nvidia_resiliency_ext.shared_utils.rank_activity import Activity
        >>> states = [
        ...     RankState(0, Activity.WAITING, "a", "waits for its peers", is_late=True),
        ...     RankState(1, Activity.STOPPED, "a", "is stopped"),
        ... ]
        >>> find_culprit(states).culprits[0].rank
        1
    """
    waiting = tuple(r for r in ranks if r.activity is Activity.WAITING)
    others = [r for r in ranks if r.activity not in (Activity.WAITING, Activity.LEFT)]
    # One that still uses heartbeats or sections is slow at most.
    still = [r for r in others if not r.has_moved]
    is_elsewhere = False
    candidates: Sequence[RankState]
    rows: list[tuple[Sequence[RankState], Confidence]]
    if waiting and others:
        working = [r for r in still or others if r.activity is Activity.WORKING]
        candidates = working or still or others
        is_one = len(candidates) == 1
        are_together = len({r.place for r in candidates}) == 1 and candidates[0].place
        rows = [
            (candidates if is_one and working else (), Confidence.LIKELY),
            (candidates if is_one else _behind(candidates), Confidence.POSSIBLE),
            (candidates if are_together else (), Confidence.POSSIBLE),
        ]
    elif waiting:
        candidates = waiting
        is_elsewhere = world_size > len(ranks)
        rows = [
            ([r for r in ranks if r.activity is Activity.LEFT], Confidence.LIKELY),
            (_behind(waiting) or _odd_place(waiting), Confidence.POSSIBLE),
        ]
    else:
        candidates = late = [r for r in still if r.is_late]
        are_clear = len(late) == 1 or all(r.activity is Activity.WORKING for r in late)
        rows = [
            (_odd_place(still), Confidence.POSSIBLE),
            (late if are_clear else (), Confidence.LIKELY),
            (_behind(late), Confidence.POSSIBLE),
        ]
    failed = [r for r in ranks if r.activity is Activity.FAILED]
    stopped = [r for r in ranks if r.activity is Activity.STOPPED]
    for blamed, confidence in [(failed or stopped, Confidence.CERTAIN), *rows]:
        if blamed:
            rest = tuple(r for r in waiting if r not in blamed)
            return Finding(tuple(blamed), (), rest, confidence)
    named = () if is_elsewhere else tuple(candidates)
    return Finding((), named, waiting, is_elsewhere=is_elsewhere)


def _behind(ranks: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that have come less far than others; none when all are equal."""
    steps = [r.progress for r in ranks if r.progress is not None]
    if len(steps) < len(ranks) or len(set(steps)) <= 1:
        return []
    least = min(steps)
    return [r for r in ranks if r.progress == least]


def _odd_place(ranks: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that are not in the line of the program in which most are."""
    places = collections.Counter(r.place for r in ranks if r.place)
    if sum(places.values()) < len(ranks) or not places:
        return []
    place, count = places.most_common(1)[0]
    return [r for r in ranks if r.place != place] if 2 * count > len(ranks) else []


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return `rank 2`, `ranks 0, 1 and 3`, or `ranks 0-6 and 8`."""
    numbers = sorted(set(ranks))
    parts: list[str] = []
    for run in format_ranks(numbers).split(","):
        first, _, last = run.partition("-")
        is_pair = last and int(last) == int(first) + 1
        parts += [first, last] if is_pair else [run]
    head = ", ".join(parts[:-1])
    text = f"{head} and {parts[-1]}" if head else "".join(parts)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"


def describe(finding: Finding) -> str:
    """Return one sentence that names the culprit in `finding` and the ranks that waited.

    Example: `rank 2 on host a is stopped; ranks 0, 1 and 3 waited for it`.
    """
    waited = ranks_in_words(r.rank for r in finding.waiting) if finding.waiting else ""
    if finding.culprits:
        doubt = "probably " if finding.confidence is Confidence.POSSIBLE else ""
        whom = "it" if len(finding.culprits) == 1 else "them"
        tail = f"; {waited} {doubt}waited for {whom}" if waited else ""
        if doubt and not tail:
            tail = "; that it is to blame is only probable"
        return f"{_each(finding.culprits)}{tail}"
    if finding.is_elsewhere:
        return f"{waited} waited for a rank of another host"
    if not finding.candidates:
        return "which rank is to blame cannot be told"
    if len(finding.candidates) == len(finding.waiting):
        return f"which rank is to blame cannot be told: {waited} all wait for their peers"
    who = _each(finding.candidates)
    tail = f"; {waited} waited" if waited else ""
    return f"which rank is to blame cannot be told, candidates: {who}{tail}"


def _each(ranks: Sequence[RankState]) -> str:
    if len({r.words for r in ranks}) == 1 and len(ranks) > 1:
        verb, space, rest = ranks[0].words.partition(" ")
        verb = "are" if verb == "is" else verb.removesuffix("s")
        return f"{ranks_in_words(r.rank for r in ranks)} {verb}{space}{rest}"
    named = [
        f"rank {r.rank} on host {r.host} {r.words}" if r.host else f"rank {r.rank} {r.words}"
        for r in ranks[:MAX_NAMED]
    ]
    more = len(ranks) - MAX_NAMED
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")
