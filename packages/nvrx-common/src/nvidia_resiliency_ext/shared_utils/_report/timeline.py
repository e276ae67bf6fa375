# SPDX-License-Identifier: Apache-2.0
"""A job's time as values: intervals, phases, cycles, and the words for them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
_MINUTE_S = 60
_HOUR_S = 3600
_DAY_S = 86400
_SHORT_S = 10
_KIB = 1024
_LONGEST_CAUSE = 1000  # what hangs and who waited for it are whole sentences


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time with a name: ``start`` and ``end`` in seconds, ``start <= end``."""

    start: float
    end: float
    name: str
    note: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def merge(spans: Iterable[Span], gap_s: float) -> list[Span]:
    """Return spans of one lane, sorted; those of one name closer than ``gap_s`` become one."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        last = merged[-1] if merged else None
        if last and last.name == span.name and span.start - last.end <= gap_s:
            merged[-1] = Span(last.start, max(last.end, span.end), last.name, last.note)
        else:
            merged.append(span)
    return merged


def coarsen(spans: Sequence[Span], start: float, end: float, count: int) -> list[Span]:
    """Return at most ``count`` spans: for each equal part of the range its longest activity."""
    if len(spans) <= count:
        return list(spans)
    width = (end - start) / count
    shares: dict[int, dict[str, float]] = defaultdict(dict)
    for span in spans:
        first, last = int((span.start - start) / width), int((span.end - start) / width)
        for part in range(max(0, first), min(count - 1, last) + 1):
            left = max(span.start, start + part * width)
            right = min(span.end, start + (part + 1) * width)
            own = shares[part]
            own[span.name] = own.get(span.name, 0.0) + max(0.0, right - left)
    parts = [
        Span(start + part * width, start + (part + 1) * width, max(own, key=own.__getitem__))
        for part, own in sorted(shares.items())
    ]
    return merge(parts, width / 2)


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
    """Cost of one restart. ``down_s`` is from the fault's onset to the next productive second."""

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
    """Numbers of saved and loaded checkpoints; one checkpoint of many ranks counts once."""

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
    """History of a job and accounting of its time. Times are seconds since the epoch."""

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


def plain(text: str, limit: int = 200) -> str:
    """Return text that cannot steer a terminal: no control characters, bounded length."""
    kept = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    if len(kept) <= limit:
        return kept
    cut = kept[: limit - 3]
    # At a blank, unless that would take away more than a long word.
    at = cut.rfind(" ") if kept[limit - 3] != " " else len(cut)
    return (cut[:at] if at > limit // 2 else cut).rstrip() + "..."


def duration(seconds: float | None) -> str:
    """Return seconds in a form as precise as a reader needs."""
    if seconds is None:
        return "unknown"
    if seconds < _SHORT_S:
        return f"{seconds:.2f} s"
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), _MINUTE_S)
    if seconds < _HOUR_S:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, _MINUTE_S)
    if seconds < _DAY_S:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"


def clock_time(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return f"{at:.0f}"


def size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < _KIB:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= _KIB
    return f"{value:.1f} PiB"


def goodput_text(timeline: Timeline) -> str:
    """Return the share of productive time, or that it is unknown."""
    return "unknown" if timeline.goodput is None else f"{timeline.goodput:.1%}"


def ending(timeline: Timeline) -> str:
    """Return the end of a job in words."""
    if not timeline.is_ended:
        return "no end recorded"
    result = plain(timeline.result, _LONGEST_CAUSE) or "no result"
    code = f"exit code {timeline.exit_code}"
    has_code = timeline.exit_code is None or result.endswith(code)
    return f"ended: {result}" if has_code else f"ended: {result} ({code})"


def fault_line(fault: FaultNote) -> str:
    """Return one fault as a sentence, with its cycle."""
    cause_text = plain(both(fault.what, fault.detail), _LONGEST_CAUSE)
    who = "" if fault.rank is None else f" rank {fault.rank}"
    where = "" if _names_rank(cause_text, fault.rank) else f"{who} on {plain(fault.host)}"
    what = f": {cause_text}" if cause_text else ""
    late = "" if fault.late_s is None else f", {duration(max(0.0, fault.late_s))} late"
    found = f", found by {plain(fault.detected_by)}{late}" if fault.detected_by else late
    return f"cycle {fault.cycle} {plain(fault.cause)}{where}{what}{found}"


def short_cause(cause: str, faults: Iterable[FaultNote]) -> str:
    """Return the cause of a cycle's end: of one of ``faults`` only its name and rank."""
    for fault in faults:
        if cause and cause == fault.what:
            return fault.cause if fault.rank is None else f"{fault.cause} of rank {fault.rank}"
    return cause


def restart_line(restart: Restart, faults: Iterable[FaultNote] = ()) -> str:
    """Return one restart as a sentence; a cause that is one of ``faults`` is only named."""
    phases = ", ".join(f"{plain(name)} {duration(s)}" for name, s in restart.phases.items())
    short = short_cause(restart.cause, faults)
    cause = plain(short, _LONGEST_CAUSE) or "no cause given"
    is_reported = restart.rank is None or short != restart.cause or _names_rank(cause, restart.rank)
    who = "" if is_reported else f" (rank {restart.rank})"
    down = "for an unknown time" if restart.down_s is None else duration(restart.down_s)
    lost = f", lost work {duration(restart.lost_s)}" if restart.lost_s else ""
    spent = f" [{phases}]" if phases else ""
    return f"{restart.layer}, to cycle {restart.cycle}: {cause}{who}, down {down}{spent}{lost}"


def both(what: str, detail: str) -> str:
    """Return `what (detail)`, or only one of the two if it contains the other."""
    if not detail or detail in what:
        return what
    return detail if what in detail else f"{what} ({detail})"


def _names_rank(text: str, rank: int | None) -> bool:
    """Return whether a text begins with the rank, as the launcher's and the monitor's do."""
    return rank is not None and text.startswith(f"rank {rank} ")
