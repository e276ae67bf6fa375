# SPDX-License-Identifier: Apache-2.0
"""Groups events into cycles; no time accounting."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median

from nvidia_resiliency_ext.shared_utils._events.read import EventFile, EventRecord

from .timeline import Cycle, FaultNote

_LARGEST = 1e15
_at = attrgetter("at")
# What the wrapper's word for an interruption is as a cause.
_INPROCESS_CAUSES = {
    "UNRESPONSIVE": "node_lost",
    "TERMINATED": "killed",
    "HARD_TIMEOUT": "hang_heartbeat",
    "SOFT_TIMEOUT": "hang_heartbeat",
    "BASE_EXCEPTION": "exited",
}


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """One event with its node, its time on the common axis, and the launch's number in the job."""

    at: float
    host: str
    launch: int
    record: EventRecord

    @property
    def kind(self) -> str:
        return self.record.kind

    def number(self, name: str) -> float | None:
        return _finite(self.record.fields.get(name))

    def seconds(self, name: str) -> float:
        """Return a field as a duration, 0 where there is none."""
        return max(0.0, self.number(name) or 0.0)

    def integer(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else int(value)

    def text(self, name: str) -> str:
        """Return a field as text, empty where there is none."""
        value = self.record.fields.get(name)
        return value if isinstance(value, str) else ""

    def shown(self, name: str) -> str:
        """Return any field as text for people."""
        value = self.record.fields.get(name)
        if isinstance(value, list):
            return ", ".join(str(item) for item in value)
        return "" if value is None else str(value)

    def durations(self, name: str) -> dict[str, float]:
        """Return a field that maps names to seconds."""
        value = self.record.fields.get(name)
        if not isinstance(value, dict):
            return {}
        return {
            str(key): float(item)
            for key, item in value.items()
            if isinstance(item, (int, float)) and 0 <= item < _LARGEST
        }


def gather(files: Sequence[EventFile]) -> list[TimedEvent]:
    """Return the events of all files in the order of their times.

    Times in a file follow its monotonic clock where the header allows it, so that a step of the
    wall clock makes no time appear or vanish. A clock that was found to be off is put right.
    """
    events: list[TimedEvent] = []
    for launch, own in enumerate(_launches(files)):
        for file in own:
            offset, off_s = _offset(file), _off_s(file)
            for event in file.events:
                at = event.t if offset is None or event.m is None else event.m + offset
                events.append(TimedEvent(at - off_s, file.host, launch, event))
    return sorted(events, key=_at)


def _launches(files: Sequence[EventFile]) -> list[list[EventFile]]:
    """Return the files of each launch, by begin: the n-th ones of a job's nodes belong together."""
    by_host: dict[tuple[str, str], list[EventFile]] = defaultdict(list)
    for file in files:
        by_host[str(file.header.get("job_id")), file.host].append(file)
    launches: dict[tuple[str, int], list[EventFile]] = defaultdict(list)
    for (job_id, _), own in by_host.items():
        for number, file in enumerate(sorted(own, key=_begin)):
            launches[job_id, number].append(file)
    return sorted(launches.values(), key=lambda own: min(_begin(file) for file in own))


def _off_s(file: EventFile) -> float:
    """Return by how much the node's clock was found to be ahead of the others'."""
    found = [
        value
        for event in file.events
        if event.kind == "cycle_start"
        and (value := _finite(event.fields.get("clock_off_s"))) is not None
    ]
    return median(found) if found else 0.0


def _begin(file: EventFile) -> float:
    return min((event.t for event in file.events), default=0.0)


def _offset(file: EventFile) -> float | None:
    """Return wall time minus monotonic time at the begin of the file."""
    clock = file.header.get("clock")
    if not isinstance(clock, dict):
        return None
    wall, mono = _finite(clock.get("wall")), _finite(clock.get("mono"))
    return None if wall is None or mono is None else wall - mono


def _finite(value: object) -> float | None:
    """Return a number that can be reckoned with; JSON has whole numbers that no float holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < _LARGEST else None  # false for what is no number, too


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch in which steps were done; ``fault`` is what ended it, None for an orderly end."""

    cycle: Cycle
    start: float
    end: float
    fault: FaultNote | None


@dataclass(frozen=True, slots=True)
class JobHistory:
    """A job's cycles with what happened in each; ``windows`` is empty where no step was seen.

    The faults of a cycle are in the order in which they were noticed.
    """

    start: float
    end: float
    cycles: tuple[Cycle, ...]
    faults: tuple[FaultNote, ...]
    windows: tuple[Window, ...]
    events: dict[Cycle, list[TimedEvent]]
    kinds: dict[str, list[TimedEvent]]
    cycle_faults: dict[Cycle, list[FaultNote]]
    cycle_windows: dict[Cycle, list[Window]]

    def of_kind(self, kind: str) -> list[TimedEvent]:
        return self.kinds.get(kind, [])

    def between(self, kind: str, begin: float, end: float) -> list[TimedEvent]:
        """Return the events of one kind later than ``begin`` and not later than ``end``."""
        own = self.of_kind(kind)
        return own[bisect_right(own, begin, key=_at) : bisect_right(own, end, key=_at)]


def build_history(timed_events: Sequence[TimedEvent]) -> JobHistory:
    """Sort events into cycles and find out when steps were done."""
    start, end = timed_events[0].at, timed_events[-1].at
    cycles = _cycles(timed_events, end) or [
        Cycle(0, 0, start, end, "", "", None, _hosts(timed_events), is_ended=False)
    ]
    by_key = {(cycle.launch, cycle.number): cycle for cycle in cycles}
    starts = [cycle.start for cycle in cycles]
    events: dict[Cycle, list[TimedEvent]] = {cycle: [] for cycle in cycles}
    kinds: dict[str, list[TimedEvent]] = defaultdict(list)
    faults: dict[Cycle, list[FaultNote]] = {cycle: [] for cycle in cycles}
    for event in timed_events:
        number = event.record.cycle
        cycle = None if number is None else by_key.get((event.launch, number))
        if cycle is None:
            cycle = cycles[max(0, bisect_right(starts, event.at) - 1)]
        events[cycle].append(event)
        kinds[event.kind].append(event)
        if event.kind == "fault":
            faults[cycle].append(_fault(event, cycle))
    for cycle in cycles:
        faults[cycle] += _inprocess_faults(cycle, events[cycle], faults[cycle])
        faults[cycle].sort(key=_at)
    windows = {cycle: _windows(cycle, events[cycle], faults[cycle]) for cycle in cycles}
    return JobHistory(
        start=start,
        end=end,
        cycles=tuple(cycles),
        faults=tuple(sorted((each for own in faults.values() for each in own), key=_at)),
        windows=tuple(window for cycle in cycles for window in windows[cycle]),
        events=events,
        kinds=dict(kinds),
        cycle_faults=faults,
        cycle_windows=windows,
    )


def _hosts(timed_events: Sequence[TimedEvent]) -> tuple[str, ...]:
    return tuple(sorted({event.host for event in timed_events}))


def _cycles(timed_events: Sequence[TimedEvent], end: float) -> list[Cycle]:
    """Build each cycle from the records of all nodes, from the first start to the last end."""
    begun: dict[tuple[int, int], list[TimedEvent]] = defaultdict(list)
    ended: dict[tuple[int, int], list[TimedEvent]] = defaultdict(list)
    for event in timed_events:
        if event.kind in {"cycle_start", "cycle_end"} and event.record.cycle is not None:
            kept = begun if event.kind == "cycle_start" else ended
            kept[event.launch, event.record.cycle].append(event)
    found = []
    for (launch, number), starts in begun.items():
        ends = ended[launch, number]
        hosts = _hosts(starts)
        sizes = [size for size in (event.integer("world_size") for event in starts) if size]
        cycle = Cycle(
            launch=launch,
            number=number,
            start=starts[0].at,
            end=max((event.at for event in ends), default=end),
            reason=next((text for text in (event.text("reason") for event in starts) if text), ""),
            result=ends[-1].text("result") if ends else "",
            world_size=max(sizes, default=None),
            hosts=hosts,
            is_ended={event.host for event in ends} >= set(hosts),
        )
        found.append(cycle)
    found.sort(key=lambda cycle: (cycle.start, cycle.launch, cycle.number))
    following = [*found[1:], None] if found else []
    return [
        replace(cycle, end=after.start)
        if after and (not cycle.is_ended or cycle.end > after.start)
        else cycle
        for cycle, after in zip(found, following, strict=True)
    ]


def _fault(event: TimedEvent, cycle: Cycle) -> FaultNote:
    """Describe a fault; a hang began when its deadline began to run."""
    cause = event.text("cause") or "unknown"
    deadline_s, late_s = event.number("deadline_s"), event.number("late_s")
    before_s = event.seconds("late_s")
    if cause.startswith("hang"):
        before_s += event.seconds("deadline_s")
    return FaultNote(
        at=event.at,
        onset=min(event.at, max(cycle.start, event.at - before_s)),
        host=event.host,
        launch=cycle.launch,
        cycle=cycle.number,
        rank=event.record.rank,
        cause=cause,
        what=event.shown("what"),
        detail=event.shown("detail"),
        detected_by=event.text("detected_by") or event.record.src,
        deadline_s=deadline_s,
        late_s=late_s,
    )


def inprocess_restarts(events: Sequence[TimedEvent]) -> list[list[TimedEvent]]:
    """Group the events of each in-process restart; every rank may report it."""
    groups: dict[tuple[int | None, int, int], list[TimedEvent]] = defaultdict(list)
    counts: Counter[tuple[int | None, int, int | None]] = Counter()
    for event in events:
        if event.kind == "inproc_restart":
            call, iteration = event.integer("call"), event.integer("iteration") or 0
            own = call, iteration, event.record.rank
            # Who says it again speaks of another call, of which older records tell no number.
            groups[call, iteration, counts[own]].append(event)
            counts[own] += 1
    return list(groups.values())


def _inprocess_faults(
    cycle: Cycle, events: Sequence[TimedEvent], known: Sequence[FaultNote]
) -> list[FaultNote]:
    """Describe the fault of each in-process restart of which no other event tells."""
    found = []
    after = cycle.start
    for reports in inprocess_restarts(events):
        first, back = reports[0], max(report.at for report in reports)
        if not any(after < fault.at <= back for fault in known):
            phases = first.durations("phases")
            onset = max(cycle.start, first.at - sum(phases.values()))
            text, fields = first.text("cause"), first.record.fields
            ranks = fields.get("culprits") or fields.get("ranks")
            hang = first.shown("hang") if fields.get("culprits") else ""
            cause = next((c for word, c in _INPROCESS_CAUSES.items() if word in text), "exception")
            note = FaultNote(
                at=min(first.at, onset + phases.get("detect", 0.0)),
                onset=onset,
                host=first.host,
                launch=cycle.launch,
                cycle=cycle.number,
                rank=ranks[0] if isinstance(ranks, list) and ranks else None,
                cause=cause,
                what=hang or text,
                detail=text if hang else first.shown("hang"),
                detected_by=first.record.src,
                deadline_s=phases.get("detect"),
                late_s=None,
            )
            found.append(note)
        after = back
    return found


def _first_step_at(events: Sequence[TimedEvent], limit: float) -> float | None:
    """Return when the last rank had done its first step, or when progress first began."""
    firsts = [event.at for event in events if event.kind == "first_step" and event.at <= limit]
    if firsts:
        return max(firsts)
    progress = next((event for event in events if event.kind == "progress"), None)
    if progress is None or progress.at > limit:
        return None
    return max(events[0].at, progress.at - progress.seconds("window_s"))


def _windows(
    cycle: Cycle, events: Sequence[TimedEvent], faults: Sequence[FaultNote]
) -> list[Window]:
    """Walk through a cycle: steps, a fault, an in-process restart, steps again, the end."""
    first_fault_at = min((fault.at for fault in faults), default=cycle.end)
    opened = _first_step_at(events, min(first_fault_at, cycle.end))
    if opened is None:
        return []
    turns: list[tuple[float, FaultNote | float]] = [(fault.at, fault) for fault in faults]
    restarts = [event for event in events if event.kind == "inproc_restart"]
    turns += [(each.at, sum(each.durations("phases").values())) for each in restarts]
    windows: list[Window] = []
    running: float | None = opened
    for at, turn in sorted(turns, key=lambda turn: (turn[0], not isinstance(turn[1], FaultNote))):
        if isinstance(turn, FaultNote):
            if running is not None:
                windows.append(Window(cycle, running, max(running, turn.onset), turn))
                running = None
        elif at > opened:
            if running is not None and at - turn > running:
                windows.append(Window(cycle, running, at - turn, None))
            # Every rank reports the same restart; the last one to be back begins the window.
            running = at
    if running is not None and cycle.end > running:
        windows.append(Window(cycle, running, cycle.end, None))
    return windows
