# SPDX-License-Identifier: Apache-2.0
"""Describe each restart, time its phases and record it as an event."""

from __future__ import annotations

import dataclasses
import enum
import json
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from nvidia_resiliency_ext.inprocess import _inputs
from nvidia_resiliency_ext.inprocess._protocol.decision import Decision
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.utils import format_rank_set
from nvidia_resiliency_ext.shared_utils.events import EventLog, InprocRestart

from .settings import Settings

KEPT_REPORTS = 32
_LIMITS = {
    Interruption.SOFT_TIMEOUT: "soft_timeout",
    Interruption.HARD_TIMEOUT: "hard_timeout",
    Interruption.UNRESPONSIVE: "heartbeat_timeout",
}

# The gravest first: what it caused comes after it.
_LOST = {
    Interruption.UNRESPONSIVE: "sent no heartbeat for {:g} s (heartbeat_timeout)",
    Interruption.HARD_TIMEOUT: "made no progress for {:g} s (hard_timeout) and was killed",
    Interruption.TERMINATED: "was killed or crashed",
}
_HAPPENED = {
    **_LOST,
    Interruption.MONITOR_PROCESS_EXCEPTION: "found no monitor",
    Interruption.BASE_EXCEPTION: "left the function for good",
    Interruption.SOFT_TIMEOUT: (
        "made no progress for {:g} s (soft_timeout), or waited for a rank that made none"
    ),
    Interruption.EXCEPTION: "raised an exception, or asked for a restart",
}


class Phase(enum.Enum):
    """The parts of a restart, in their order."""

    DETECT = "detect"
    LAST_CALL = "last_call"
    ABORT = "abort"
    UNWIND = "unwind"
    FINALIZE = "finalize"
    HEALTH_CHECK = "health_check"
    BARRIER = "barrier"
    RANK_ASSIGNMENT = "rank_assignment"
    INITIALIZE = "initialize"


@dataclass(frozen=True, slots=True)
class RestartReport:
    """One restart of this rank.

    Attributes:
        iteration: The iteration that was interrupted.
        cause: The interruption records, for people.
        ranks: Initial ranks that reported or were reported.
        terminated: Initial ranks that do not go on.
        kept: Initial ranks that go on.
        world_size: Ranks that go on.
        seconds: Duration by phase, in their order; 0 of those that did not occur.
        hang: Whom a hang is blamed on, in words; "" when it was none or is not known.
        culprits: The initial ranks that `hang` blames.
    """

    iteration: int
    cause: str
    ranks: tuple[int, ...] = ()
    terminated: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    world_size: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    hang: str = ""
    culprits: tuple[int, ...] = ()

    def line(self) -> str:
        """Return the report as one line: a fixed word and JSON."""
        values = dataclasses.asdict(self)
        del values["kept"]  # the line does not grow with the job
        values["seconds"] = {name: round(value, 6) for name, value in self.seconds.items()}
        values["total_s"] = round(sum(self.seconds.values()), 6)
        return f"inprocess restart {json.dumps(values, separators=(',', ':'))}"


class Stopwatch:
    """Measure the phases of the current restart; they may overlap only by being nested."""

    def __init__(self) -> None:
        self._seconds: dict[Phase, float] = {}

    def add(self, phase: Phase, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + max(0.0, seconds)

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add the duration of the body to `phase`, whether it raises or not."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(phase, time.monotonic() - start)

    def take(self) -> dict[str, float]:
        """Return the durations in the phases' order, and begin anew."""
        seconds, self._seconds = self._seconds, {}
        return {phase.value: seconds.get(phase, 0.0) for phase in Phase}


def detection_s(records: Iterable[InterruptionRecord], settings: Settings) -> float:
    """Return the age of the fault when it was found: the limit that it exceeded."""
    return max((_limit_s(record.interruption, settings) for record in records), default=0.0)


def _limit_s(kind: Interruption, settings: Settings) -> float:
    limit: timedelta = getattr(settings, _LIMITS[kind]) if kind in _LIMITS else timedelta(0)
    return limit.total_seconds()


def describe_interruption(decision: Decision, settings: Settings) -> str:
    """Return in words what happened to which ranks, and which ranks are lost.

    Where ranks were lost, the soft timeouts of others are left out: they follow from that. So are
    exceptions where ranks are gone: those of collectives follow, and each stands in the log.
    """
    ranks: dict[Interruption, set[int]] = {}
    for record in decision.records:
        ranks.setdefault(record.interruption, set()).add(record.rank)
    reported = {rank for kind in _LOST for rank in ranks.get(kind, ())}
    follows = {Interruption.SOFT_TIMEOUT} if reported else set()
    if not ranks.keys().isdisjoint((Interruption.TERMINATED, Interruption.UNRESPONSIVE)):
        follows.add(Interruption.EXCEPTION)
    words = [
        _sentence(of_kind, text.format(_limit_s(kind, settings)))
        for kind, text in _HAPPENED.items()
        if (of_kind := ranks.get(kind)) and kind not in follows
    ]
    if gone := set(decision.lost) - reported:
        words.append(f"{_name_ranks(gone)} {'is' if len(gone) == 1 else 'are'} lost")
    what = "; ".join(words)
    return what if decision.hang is None else f"{decision.hang.text} ({what})"


def _sentence(ranks: Collection[int], text: str) -> str:
    return f"{_name_ranks(ranks)} {text if len(ranks) == 1 else text.replace('was ', 'were ')}"


def _name_ranks(ranks: Collection[int]) -> str:
    return f"rank {min(ranks)}" if len(ranks) == 1 else f"ranks {format_rank_set(ranks)}"


def record_restart(log: EventLog, call: int, report: RestartReport, rank: int) -> None:
    """Record a restart in a call, where a launcher keeps a log; one rank does it for all."""
    event = InprocRestart(
        call=call,
        iteration=report.iteration,
        cause=report.cause,
        ranks=report.ranks,
        phases={name: seconds for name, seconds in report.seconds.items() if seconds},
        kept_ranks=report.kept,
        lost_ranks=report.terminated,
        hang=report.hang or None,
        culprits=report.culprits or None,
    )
    log.record(event, cycle=_inputs.optional_number("TORCHELASTIC_RESTART_COUNT"), rank=rank)
