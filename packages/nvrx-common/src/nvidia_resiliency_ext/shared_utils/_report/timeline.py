# SPDX-License-Identifier: Apache-2.0
"""Owns the shape of a report's result: plain values, ready to be shown; computes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .intervals import Span

__all__ = [
    "CATEGORIES",
    "Checkpoints",
    "Cycle",
    "FaultNote",
    "Lane",
    "Remark",
    "Restart",
    "Timeline",
    "Workers",
]

# Where a second can go, in the order in which a report shows them.
CATEGORIES = {
    "productive": "productive",
    "lost_work": "lost work",
    "checkpoint_stall": "checkpoint stall",
    "detection": "detection",
    "stop": "stop",
    "rendezvous": "rendezvous",
    "startup": "start-up",
    "restart_other": "other restart work",
    "unknown": "unknown",
}


@dataclass(frozen=True, slots=True)
class FaultNote:
    """Something that went wrong; ``onset`` is when it did, ``at`` when it was noticed."""

    at: float
    onset: float
    host: str
    launch: int
    cycle: int | None
    rank: int | None
    cause: str
    what: str
    detail: str
    detected_by: str
    deadline_s: float | None
    late_s: float | None


@dataclass(frozen=True, slots=True)
class Cycle:
    """One life of the job's workers, over all nodes."""

    launch: int
    number: int
    start: float
    end: float
    reason: str
    result: str
    world_size: int | None
    hosts: tuple[str, ...]
    is_ended: bool


@dataclass(frozen=True, slots=True)
class Restart:
    """What one restart cost. ``down_s`` is from the fault's onset to the next productive second."""

    at: float
    layer: str
    cycle: int
    cause: str
    rank: int | None
    phases: dict[str, float]
    down_s: float | None
    lost_s: float | None


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of the chart: a node, or a rank on it."""

    label: str
    host: str
    rank: int | None
    spans: tuple[Span, ...]
    faults: tuple[FaultNote, ...]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What was saved and loaded; one checkpoint of many ranks counts once."""

    saved: int = 0
    failed: int = 0
    loaded: int = 0
    stall_s: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Workers:
    """How workers started."""

    warm: int = 0
    cold: int = 0
    saved_s: float = 0.0
    cold_reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Remark:
    """An event worth a line of its own: a straggler, a verdict, a failed health check."""

    at: float
    host: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened to a job and where its time went. Times are seconds since the epoch."""

    job_id: str = ""
    is_of_many_jobs: bool = False
    start: float = 0.0
    end: float = 0.0
    is_ended: bool = False
    result: str = ""
    exit_code: int | None = None
    hosts: tuple[str, ...] = ()
    ranks: int = 0
    cycles: tuple[Cycle, ...] = ()
    faults: tuple[FaultNote, ...] = ()
    restarts: tuple[Restart, ...] = ()
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    goodput: float | None = None
    accounting: tuple[Span, ...] = ()
    nodes: tuple[Lane, ...] = ()
    lanes: tuple[Lane, ...] = ()
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    workers: Workers = field(default_factory=Workers)
    remarks: tuple[Remark, ...] = ()
    steps: int = 0
    dropped: int = 0
    bad_lines: int = 0
    notes: tuple[str, ...] = ()

    @property
    def wall_s(self) -> float:
        """Length of the whole."""
        return self.end - self.start

    @property
    def faults_by_cause(self) -> dict[str, int]:
        """How many faults each cause had, most frequent first."""
        return _counted([fault.cause for fault in self.faults])

    @property
    def restarts_by_layer(self) -> dict[str, int]:
        """How many restarts each layer made."""
        return {"in-job": 0, "in-process": 0} | _counted([each.layer for each in self.restarts])


def _counted(names: list[str]) -> dict[str, int]:
    return dict(Counter(sorted(names)).most_common())
