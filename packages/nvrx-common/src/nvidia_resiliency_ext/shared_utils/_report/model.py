# SPDX-License-Identifier: Apache-2.0
"""Owns the meaning of a set of event files: files in, one ``Timeline`` out; reads no file.

The rules are in the modules beside it: ``cycles`` (one time axis, and what happened) and
``accounting`` (what each second was spent on, and the chart).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

from nvidia_resiliency_ext.shared_utils._events.read import EventFile

from .accounting import attribute_spans, flatten, key_of, node_lanes, rank_lanes, saves, succeeded
from .cycles import JobHistory, TimedEvent, Window, build_history, gather, inprocess_restarts
from .timeline import (
    CATEGORIES,
    Checkpoints,
    Cycle,
    Remark,
    Restart,
    Timeline,
    Workers,
    clock_time,
    plain,
)

NO_HEARTBEAT = (
    "No rank sent a heartbeat or finished a section named step, so productive time is unknown."
    " Call RankMonitorClient.send_heartbeat() once per step, or mark steps, to have it measured."
)
NO_CHECKPOINT = (
    "No checkpoint was recorded, so work lost through faults is unknown and goodput an upper bound."
    " Record a CkptSave event when a save is complete, to have it measured."
)
_SILENT_S = 30.0  # A launcher that lives writes sooner: while ranks train, while it stops them.

_LONGEST_PATH = 160
_MOST_JOBS = 20


def build_timeline(files: Sequence[EventFile]) -> Timeline:
    """Reconstruct a job from its nodes' event `files`: cycles, faults, where its time went."""
    events = gather(files)
    job_ids = _job_ids(files)
    hosts = tuple(sorted({file.host for file in files if not file.problem}))
    if not events:
        return Timeline(
            job_id=", ".join(job_ids),
            hosts=hosts,
            bad_lines=sum(file.bad_lines for file in files),
            notes=("Nothing has been recorded yet.", *_unread(files)),
        )
    history = build_history(events)
    attributed, lost_s = attribute_spans(history)
    spans = itertools.chain.from_iterable(attributed.values())
    flat = flatten(spans, history.start, history.end)
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for span in flat:
        seconds[span.name] += span.seconds
    wall_s = history.end - history.start
    is_known = bool(history.windows) and wall_s > 0
    ends = [event for event in events if event.kind == "job_end"]
    is_ended, endings = _endings(events, ends)
    sizes = [cycle.world_size for cycle in history.cycles if cycle.world_size]
    lanes = rank_lanes(history, attributed)
    return Timeline(
        job_id=", ".join(job_ids),
        is_of_many_jobs=len(job_ids) > 1,
        start=history.start,
        end=history.end,
        is_ended=is_ended,
        result=ends[-1].text("result") if ends else "",
        exit_code=ends[-1].integer("exit_code") if ends else None,
        hosts=hosts,
        ranks=max(sizes, default=len(lanes)),
        cycles=history.cycles,
        faults=history.faults,
        restarts=tuple(_restarts(history, lost_s)),
        seconds=seconds,
        goodput=seconds["productive"] / wall_s if is_known else None,
        accounting=tuple(flat),
        nodes=node_lanes(history, attributed, hosts),
        lanes=lanes,
        checkpoints=_checkpoints(history),
        workers=_workers(events),
        remarks=tuple(_remarks(events)),
        steps=_sum(history.of_kind("progress"), "steps"),
        dropped=_sum(history.of_kind("dropped"), "count"),
        bad_lines=sum(file.bad_lines for file in files),
        notes=(*endings, *_notes(files, history)),
    )


def _unread(files: Sequence[EventFile]) -> list[str]:
    """Return a note for each file that could not be read."""
    unread = [file for file in files if file.problem]
    return [f"Left out: {_end_of(file.path)}: {file.problem}" for file in unread]


def _end_of(path: str) -> str:
    """Return a path for a note; of a long one its end, which names the file."""
    return plain(path if len(path) <= _LONGEST_PATH else f"...{path[-_LONGEST_PATH:]}")


def _job_note(job_id: str, files: Sequence[EventFile]) -> str:
    """Return a note on one of several jobs: its time, its result and its files."""
    part = [file for file in files if file.header.get("job_id") == job_id]
    own = gather(part)
    when = f"{clock_time(own[0].at)} to {clock_time(own[-1].at)}" if own else "nothing recorded"
    ends = [event.text("result") for event in own if event.kind == "job_end"]
    how = ends[-1] if ends else "no end recorded"
    names = ", ".join(sorted(_end_of(file.path) for file in part))
    return f"job {plain(job_id)}, {when}, {plain(how)}: {names}"


def _job_ids(files: Sequence[EventFile]) -> list[str]:
    found = [file.header.get("job_id") for file in files]
    return sorted({job_id for job_id in found if isinstance(job_id, str) and job_id})


def _restarts(history: JobHistory, lost_s: dict[Window, float]) -> list[Restart]:
    """Return every restart: of the job's workers, or inside their processes."""
    found = [restart for cycle in history.cycles for restart in _inprocess(history, cycle, lost_s)]
    for before, cycle in zip(history.cycles, history.cycles[1:], strict=False):
        if cycle.launch == before.launch and cycle.number > before.number:
            found.append(_in_job(history, before, cycle, lost_s))
    return sorted(found, key=lambda restart: restart.at)


def _in_job(
    history: JobHistory, before: Cycle, cycle: Cycle, lost_s: dict[Window, float]
) -> Restart:
    faults, windows = history.cycle_faults[before], history.cycle_windows[cycle]
    closed = [window for window in history.cycle_windows[before] if window.fault is not None]
    fault = closed[-1].fault if closed else (faults[0] if faults else None)
    begin = fault.onset if fault else before.end
    back = windows[0].start if windows else None
    phases = _phases(history, begin, cycle.start if back is None else back)
    if back is not None:
        phases["first step"] = back - cycle.start
    return Restart(
        at=cycle.start,
        layer="in-job",
        cycle=cycle.number,
        cause=cycle.reason or (fault.cause if fault else "") or before.result,
        rank=fault.rank if fault else None,
        phases=phases,
        down_s=None if back is None else back - begin,
        lost_s=lost_s.get(closed[-1]) if closed else None,
    )


def _phases(history: JobHistory, begin: float, end: float) -> dict[str, float]:
    """Return the seconds of each phase between two times: of the node that took longest."""
    per_host: dict[str, dict[str, float]] = defaultdict(dict)
    for event in history.between("phase", begin, end):
        hosts = per_host[event.text("name")]
        hosts[event.host] = hosts.get(event.host, 0.0) + event.seconds("dur_s")
    return {name: max(hosts.values()) for name, hosts in per_host.items()}


def _inprocess(history: JobHistory, cycle: Cycle, lost_s: dict[Window, float]) -> list[Restart]:
    windows = history.cycle_windows[cycle]
    found = []
    for reports in inprocess_restarts(history.events[cycle]):
        phases: dict[str, float] = {}
        for report in reports:
            for name, seconds in report.durations("phases").items():
                phases[name] = max(phases.get(name, 0.0), seconds)
        back = max(report.at for report in reports)
        closed = [window for window in windows if window.end <= back]
        began = closed[-1].end if closed else back - sum(phases.values())
        fault = closed[-1].fault if closed else None
        found.append(
            Restart(
                at=back,
                layer="in-process",
                cycle=cycle.number,
                cause=reports[0].text("cause") or (fault.cause if fault else ""),
                rank=fault.rank if fault else None,
                phases=phases,
                down_s=max(back - began, 0.0),
                lost_s=lost_s.get(closed[-1]) if closed else None,
            )
        )
    return found


def _checkpoints(history: JobHistory) -> Checkpoints:
    written = history.of_kind("ckpt_save")
    stalls: dict[str, float] = {}
    for event in written:
        key = key_of(event) or str(event.at)
        stalls[key] = max(stalls.get(key, 0.0), event.seconds("stall_s"))
    return Checkpoints(
        saved=len(saves(history)),
        failed=len({event.shown("id") or event.at for event in written if not succeeded(event)}),
        loaded=len({event.shown("id") or event.at for event in history.of_kind("ckpt_load")}),
        stall_s=sum(stalls.values()),
        bytes=_sum(written, "bytes"),
    )


def _sum(events: Sequence[TimedEvent], name: str) -> int:
    """Return the sum of a field; what is negative or no number counts nothing."""
    return sum(max(0, event.integer(name) or 0) for event in events)


def _workers(events: Sequence[TimedEvent]) -> Workers:
    starts = [event for event in events if event.kind == "worker_start"]
    cold = [event for event in starts if event.record.fields.get("warm") is False]
    reasons = Counter(event.text("cold_reason") or "not given" for event in cold)
    return Workers(
        warm=sum(event.record.fields.get("warm") is True for event in starts),
        cold=len(cold),
        saved_s=sum(event.seconds("saved_s") for event in starts),
        cold_reasons=dict(reasons.most_common()),
    )


def _remarks(events: Sequence[TimedEvent]) -> list[Remark]:
    """Return the events that a reader wants to see one by one."""
    shown = {
        "straggler": ("ranks", "reason"),
        "verdict": ("action", "reason_code", "ranks", "nodes"),
        "dropped": ("count", "why"),
    }
    found = []
    for event in events:
        names = shown.get(event.kind, ())
        if event.kind == "health" and event.text("result") == "fail":
            names = ("check", "evidence")
        if event.kind.startswith("ckpt_") and not succeeded(event):
            names = ("id", "iteration", "result", "error")
        fields = {name.replace("_", " "): event.shown(name) for name in names}
        parts = [f"{name} {text}" for name, text in fields.items() if text]
        if parts:
            found.append(Remark(event.at, event.host, event.kind, ", ".join(parts)))
    return found


def _endings(events: Sequence[TimedEvent], ends: Sequence[TimedEvent]) -> tuple[bool, list[str]]:
    """Return whether the record has an end, with notes on whose end is not in it."""
    last = {(event.host, event.launch): event.at for event in events}
    missing = last.keys() - {(event.host, event.launch) for event in ends}
    # A lost store is the loss of its host alone.
    causes = {"node_lost", "store_lost"} if len(missing) == 1 else {"node_lost"}
    faults = [each for each in events if each.kind == "fault" and each.text("cause") in causes]
    losses = [(each, each.at) for each in faults]
    losses += [(each, each.at - _SILENT_S) for each in ends if each.record.fields.get("is_over")]
    # Lost by the record of another launch, and silent since: who writes again was not lost.
    lost = {
        launch
        for launch in missing
        if any((each.host, each.launch) != launch and at >= last[launch] for each, at in losses)
    }
    if not ends or missing != lost:
        note = "The record has no end: the job is still running, or its launcher was killed."
        return False, [note]
    hosts = sorted({host for host, _ in lost})
    return True, [f"A launcher on {plain(host)} was lost: it recorded no end." for host in hosts]


def _notes(files: Sequence[EventFile], history: JobHistory) -> list[str]:
    notes = []
    if not history.windows:
        notes.append(NO_HEARTBEAT)
    elif any(window.fault for window in history.windows) and not history.of_kind("ckpt_save"):
        notes.append(NO_CHECKPOINT)
    job_ids = _job_ids(files)
    if len(job_ids) > 1:
        notes.append(
            f"These files are of {len(job_ids)} jobs; the time between them is unknown."
            " For a report of one of them name its files:"
        )
        notes += [_job_note(job_id, files) for job_id in job_ids[:_MOST_JOBS]]
    if history.of_kind("dropped"):
        notes.append("Some events were dropped while they were written; see the remarks.")
    bad_lines = sum(file.bad_lines for file in files)
    if bad_lines:
        notes.append(f"{bad_lines} lines could not be read and were skipped.")
    return [*notes, *_unread(files)]
