# SPDX-License-Identifier: Apache-2.0
"""Divides a job's time among its causes, and lays it out in lanes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .cycles import JobHistory, TimedEvent, Window
from .timeline import Cycle, FaultNote, Lane, Span

# Where spans overlap, the first of these wins. The bracket between a cycle's start and its first
# step is start-up only as far as no phase says more, so it comes late under a name of its own.
_ORDER = (
    "detection",
    "stop",
    "rendezvous",
    "startup",
    "restart_other",
    "checkpoint_stall",
    "lost_work",
    "productive",
    "bracket",
    "unknown",
)
PHASES = {
    "detect": "detection",
    "evidence": "detection",
    "last_call": "detection",
    "stop": "stop",
    "reclaim": "stop",
    "abort": "stop",
    "unwind": "stop",
    "finalize": "stop",
    "rendezvous": "rendezvous",
    "barrier": "rendezvous",
    "health_check": "rendezvous",
    "rank_assignment": "rendezvous",
    "start": "startup",
    "init": "startup",
    "initialize": "startup",
}
_GOOD_RESULTS = frozenset({"", "ok", "success", "succeeded", "pass", "done"})

Attributed = dict[str | None, list[Span]]
"""The spans of the accounting by node; under None those that hold for the whole job."""


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint that was written completely: it holds the work done before ``began``."""

    key: str
    began: float
    done: float


def succeeded(event: TimedEvent) -> bool:
    return not event.text("error") and event.text("result").lower() in _GOOD_RESULTS


def key_of(event: TimedEvent) -> str:
    """Return the id, else the iteration, of the checkpoint of an event."""
    return event.shown("id") or event.shown("iteration")


def saves(history: JobHistory) -> list[Save]:
    """Return the complete checkpoints in the order of their end.

    Complete is one that as many ranks reported as any of that cycle, none of them an error.
    """
    complete: list[Save] = []
    for events in history.events.values():
        parts: dict[str, list[TimedEvent]] = defaultdict(list)
        for event in events:
            if event.kind == "ckpt_save":
                parts[key_of(event) or str(event.at)].append(event)
        writers = {key: len({part.record.rank for part in own}) for key, own in parts.items()}
        wanted = max(writers.values(), default=0)
        for key, own in parts.items():
            if writers[key] == wanted and all(succeeded(part) for part in own):
                began = min(_save_began(part) for part in own)
                complete.append(Save(key, began, max(part.at for part in own)))
    return sorted(complete, key=lambda save: save.done)


def attribute_spans(history: JobHistory) -> tuple[Attributed, dict[Window, float]]:
    """Return all spans of the accounting, and the seconds that each window's fault threw away."""
    attributed: Attributed = {
        None: [Span(each.start, each.end, "productive") for each in history.windows]
    }
    of_job = attributed[None]
    for cycle in history.cycles:
        of_job += _cycle_spans(history, cycle)
        for event in history.events[cycle]:
            host = event.host if event.kind == "phase" else None
            attributed.setdefault(host, []).extend(_event_spans(event))
    if history.cycles:
        of_job.append(Span(history.start, history.cycles[0].start, "bracket"))
    lost_s: dict[Window, float] = {}
    lost_from: dict[Window, float] = {}
    for number, kept_until in _thrown_away(history):
        window = history.windows[number]
        lost_s[window] = 0.0
        for each in (history.windows[before] for before in range(number, -1, -1)):
            if each.end <= kept_until:
                break
            # Work that an earlier fault threw away cannot be lost again.
            until = lost_from.get(each, each.end)
            begin = lost_from[each] = min(until, max(each.start, kept_until))
            lost_s[window] += until - begin
            of_job.append(Span(begin, until, "lost_work"))
    return attributed, lost_s


def flatten(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """Return spans without overlap that cover ``start`` to ``end`` exactly; see `_ORDER`."""
    changes: dict[float, list[tuple[Span, int]]] = defaultdict(list)
    for span in spans:
        left, right = max(span.start, start), min(span.end, end)
        if left < right:
            changes[left].append((span, 1))
            changes[right].append((span, -1))
    open_counts = {**dict.fromkeys(_ORDER, 0), "unknown": 1}
    notes = dict.fromkeys(_ORDER, "")
    flat: list[Span] = []
    at = start
    for moment in sorted({*changes, end}):
        name = next(name for name in _ORDER if open_counts[name])
        if moment > at:
            if flat and flat[-1].name == name:
                flat[-1] = replace(flat[-1], end=moment)
            else:
                flat.append(Span(at, moment, name, notes[name]))
            at = moment
        for changed, step in changes.get(moment, ()):
            open_counts[changed.name] += step
            if step > 0:
                notes[changed.name] = changed.note
    return [replace(span, name="startup") if span.name == "bracket" else span for span in flat]


def _cycle_spans(history: JobHistory, cycle: Cycle) -> list[Span]:
    """Return the way to the first step and the time until the first fault was noticed."""
    windows, faults = history.cycle_windows[cycle], history.cycle_faults[cycle]
    closing = [window.fault for window in windows if window.fault is not None]
    if not windows:
        closing = faults[:1]
    spans = [Span(each.onset, each.at, "detection") for each in closing]
    if windows:
        spans.append(Span(cycle.start, windows[0].start, "bracket"))
    elif history.windows:
        # Steps are reported by this job, so a cycle without any never got that far.
        spans.append(Span(cycle.start, faults[0].onset if faults else cycle.end, "bracket"))
    return spans


def _event_spans(event: TimedEvent) -> list[Span]:
    """Return the spans that one event explains by itself."""
    if event.kind == "phase":
        name = PHASES.get(event.text("name"), "restart_other")
        return [Span(event.at - event.seconds("dur_s"), event.at, name)]
    if event.kind == "ckpt_save":
        began = _save_began(event)
        return [Span(began, began + event.seconds("stall_s"), "checkpoint_stall")]
    if event.kind == "inproc_restart":
        spans, end = [], event.at
        for name, seconds in reversed(event.durations("phases").items()):
            spans.append(Span(end - seconds, end, PHASES.get(name, "restart_other")))
            end -= seconds
        return spans
    return []


def _save_began(event: TimedEvent) -> float:
    return event.at - max(event.seconds("write_s"), event.seconds("stall_s"))


def _thrown_away(history: JobHistory) -> list[tuple[int, float]]:
    """Return, for each window that a fault ended, its place and up to when work was kept."""
    complete = saves(history)
    has_saves = bool(history.of_kind("ckpt_save"))
    found: list[tuple[int, float]] = []
    for number, window in enumerate(history.windows):
        if window.fault is None:
            continue
        noticed = window.fault.at
        following = history.windows[number + 1 : number + 2]
        after = following[0].end if following else history.end
        if has_saves:
            found.append((number, _kept_until(history, complete, noticed, after)))
        else:
            rewound = _rewound_to(history, noticed, after)
            if rewound is not None:
                found.append((number, min(window.end, rewound)))
    return found


def _kept_until(
    history: JobHistory, complete: Sequence[Save], noticed: float, after: float
) -> float:
    """Return the begin of the save that the job went on from, else of the last complete one."""
    events = history.between("ckpt_load", noticed, after)
    loads = [key_of(event) for event in events if succeeded(event)]
    usable = [save for save in complete if save.done <= noticed]
    if loads:
        loaded = Counter(loads).most_common(1)[0][0]
        matching = [save for save in usable if save.key == loaded]
        usable = matching or usable
    return usable[-1].began if usable else history.start


def _rewound_to(history: JobHistory, noticed: float, after: float) -> float | None:
    """Return when the iteration with which the job went on had first been reached."""
    later = [
        event
        for event in history.between("progress", noticed, after)
        # What began before the fault was noticed is no progress of those who went on.
        if event.integer("iteration") is not None and event.at - event.seconds("window_s") > noticed
    ]
    if not later:
        return None
    first = later[0]
    resumed_at = (first.integer("iteration") or 0) - (first.integer("steps") or 0)
    for event in reversed(history.between("progress", history.start, noticed)):
        iteration = event.integer("iteration")
        if iteration is not None and iteration <= resumed_at:
            return event.at
    return history.start


def node_lanes(
    history: JobHistory, attributed: Attributed, hosts: Sequence[str]
) -> tuple[Lane, ...]:
    """Return one lane per node: the job's time as this node saw it."""
    lanes = []
    for host in hosts:
        own = attributed.get(host, [])
        lives = [(cycle.start, cycle.end) for cycle in history.cycles if host in cycle.hosts] or [
            (history.start, history.end)
        ]
        first, last = min(start for start, _ in lives), max(end for _, end in lives)
        first = max(history.start, min([first, *(span.start for span in own if span.seconds > 0)]))
        flat = flatten([*attributed[None], *own], first, last)
        faults = tuple(fault for fault in history.faults if fault.host == host)
        lanes.append(Lane(host, host, None, tuple(flat), faults))
    return tuple(lanes)


def rank_lanes(history: JobHistory, attributed: Attributed) -> tuple[Lane, ...]:
    """Return one lane per rank: start-up, steps, checkpoint stalls, the time until it was gone."""
    spans: dict[int, list[Span]] = defaultdict(list)
    hosts: dict[int, str] = {}
    lost = [span for span in attributed[None] if span.name == "lost_work"]
    faults: dict[int | None, list[FaultNote]] = defaultdict(list)
    for fault in history.faults:
        faults[fault.rank].append(fault)
    for cycle in history.cycles:
        by_rank: dict[int, list[TimedEvent]] = defaultdict(list)
        for event in history.events[cycle]:
            if event.record.rank is not None and event.record.rank >= 0:
                by_rank[event.record.rank].append(event)
        for rank, own in by_rank.items():
            hosts[rank] = own[-1].host
            spans[rank].extend(_rank_spans(history, cycle, own, lost))
    lanes = []
    for rank in sorted(spans):
        ordered = tuple(sorted(spans[rank], key=lambda span: span.start))
        lanes.append(Lane(f"rank {rank}", hosts[rank], rank, ordered, tuple(faults[rank])))
    return tuple(lanes)


def _rank_spans(
    history: JobHistory, cycle: Cycle, own: Sequence[TimedEvent], lost: Sequence[Span]
) -> list[Span]:
    """Return the attributed spans of one rank in one cycle."""
    first = {event.kind: event for event in reversed(own)}
    start = first["worker_start"].at if "worker_start" in first else cycle.start
    exited = first.get("worker_exit")
    end = max(start, exited.at if exited else cycle.end)
    note = ""
    if "worker_start" in first:
        event = first["worker_start"]
        note = f"cold start: {event.text('cold_reason') or 'no reason'}"
        if event.record.fields.get("warm"):
            note = "warm start"
    windows = history.cycle_windows[cycle]
    if not windows:
        name = "bracket" if history.windows else "unknown"
        return flatten([Span(start, end, name, note)], start, end)
    step = first["first_step"].at if "first_step" in first else windows[0].start
    attributed = [Span(start, min(step, end), "bracket", note)]
    attributed.extend(span for span in lost if span.end > step and span.start < end)
    for window in windows:
        attributed.append(Span(max(step, window.start), min(window.end, end), "productive"))
        if window.fault is not None:
            noticed = window.fault.at
            attributed.append(Span(window.end, noticed, "detection"))
            again = next((each.start for each in windows if each.start > noticed), end)
            attributed.append(Span(noticed, min(again, end), "stop"))
    for event in own:
        if event.kind == "inproc_restart":
            attributed.append(Span(event.at, end, "productive"))
        if event.kind == "ckpt_save" and event.seconds("stall_s"):
            attributed.extend(_event_spans(event))
    return flatten(attributed, start, end)
