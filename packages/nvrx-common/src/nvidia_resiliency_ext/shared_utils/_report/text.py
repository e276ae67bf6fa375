# SPDX-License-Identifier: Apache-2.0
"""The report as text, once or as a live view."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from shutil import get_terminal_size
from textwrap import wrap

from nvidia_resiliency_ext.shared_utils._events.read import EventFileError
from nvidia_resiliency_ext.shared_utils.console import write_err, write_out

from .timeline import (
    CATEGORIES,
    Remark,
    Timeline,
    clock_time,
    duration,
    ending,
    fault_line,
    goodput_text,
    plain,
    restart_line,
    size,
)

_NARROWEST = 40
_MOST_ROWS = 20
_LABEL_WIDTH = 18
_FIGURES_WIDTH = 24
_HOME = "\x1b[H"
_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"
_TICK_S = 1.0
# Reading a large record again and again must not take more than this part of a core.
_SHARE = 0.2


def render_text(timeline: Timeline, width: int = 100) -> str:
    """Return a summary of `timeline` for a terminal of `width` columns."""
    width = max(_NARROWEST, width)
    blocks = [
        _head(timeline),
        _seconds(timeline, width),
        _list("faults", _faults(timeline)),
        _list("restarts", _restarts(timeline)),
        _list("also", _also(timeline)),
        _list("notes", timeline.notes),
    ]
    lines = [line for block in blocks if block for line in [*block, ""]]
    return "\n".join(wrapped for line in lines for wrapped in _wrap(line, width)).rstrip() + "\n"


def _head(timeline: Timeline) -> list[str]:
    noun = "jobs" if timeline.is_of_many_jobs else "job"
    job = f"{noun} {plain(timeline.job_id)}" if timeline.job_id else noun
    nodes = _count(len(timeline.hosts), "node")
    facts = [nodes, _count(timeline.ranks, "rank"), _count(len(timeline.cycles), "cycle")]
    return [
        f"{job}: {', '.join(facts)}, {duration(timeline.wall_s)}, {ending(timeline)}",
        f"from {clock_time(timeline.start)} to {clock_time(timeline.end)}",
        f"goodput {goodput_text(timeline)}",
    ]


def _seconds(timeline: Timeline, width: int) -> list[str]:
    """Return a bar per kind of time; kinds without any time are left out."""
    if timeline.wall_s <= 0:
        return []
    lines = ["where the time went"]
    space = max(0, width - _LABEL_WIDTH - _FIGURES_WIDTH - 4)
    for name, label in CATEGORIES.items():
        seconds = timeline.seconds.get(name, 0.0)
        if seconds <= 0:
            continue
        share = seconds / timeline.wall_s
        bar = "#" * max(1, round(share * space)) if space else ""
        lines.append(
            f"  {label:<{_LABEL_WIDTH}}{duration(seconds):>14} {share:>7.1%}  {bar}".rstrip()
        )
    return lines


def _faults(timeline: Timeline) -> list[str]:
    counts = [f"{count} {plain(cause)}" for cause, count in timeline.faults_by_cause.items()]
    lines = [", ".join(counts)] if len(timeline.faults) > 1 else []
    return lines + _first(f"{clock_time(each.at)} {fault_line(each)}" for each in timeline.faults)


def _restarts(timeline: Timeline) -> list[str]:
    counts = [f"{count} {layer}" for layer, count in timeline.restarts_by_layer.items()]
    lines = [", ".join(counts)] if timeline.restarts else []
    faults = timeline.faults
    rows = (f"{clock_time(each.at)} {restart_line(each, faults)}" for each in timeline.restarts)
    return lines + _first(rows)


def _also(timeline: Timeline) -> list[str]:
    lines = []
    workers, checkpoints = timeline.workers, timeline.checkpoints
    if workers.warm or workers.cold:
        saved = f", {duration(workers.saved_s)} saved" if workers.saved_s else ""
        lines.append(f"workers started: {workers.warm} warm, {workers.cold} cold{saved}")
    lines.extend(
        f"cold start: {plain(reason)} ({count})" for reason, count in workers.cold_reasons.items()
    )
    if checkpoints.saved or checkpoints.failed or checkpoints.loaded:
        lines.append(
            f"checkpoints: {checkpoints.saved} saved ({size(checkpoints.bytes)}),"
            f" {checkpoints.failed} failed, {checkpoints.loaded} loaded,"
            f" training stood still {duration(checkpoints.stall_s)}"
        )
    if timeline.steps:
        lines.append(f"steps: {timeline.steps}")
    rows = (f"{clock_time(remark.at)} {_remark_line(remark)}" for remark in timeline.remarks)
    return lines + _first(rows)


def _first(rows: Iterable[str]) -> list[str]:
    lines = list(rows)
    more = len(lines) - _MOST_ROWS
    return [*lines[:_MOST_ROWS], f"... and {more} more"] if more > 0 else lines


def _remark_line(remark: Remark) -> str:
    return f"{plain(remark.kind)} on {plain(remark.host)}: {plain(remark.text)}"


def _list(title: str, lines: Iterable[str]) -> list[str]:
    shown = [f"  {line}" for line in lines]
    return [title, *shown] if shown else []


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _wrap(line: str, width: int) -> list[str]:
    """Break a line at blanks; what goes on is indented by four."""
    return wrap(line, width, subsequent_indent="    ", break_on_hyphens=False) or [""]


def draw(timeline: Timeline, width: int, height: int, now: float) -> str:
    """Return the terminal output that draws the report over the previous one."""
    ago = duration(max(0.0, now - timeline.end))
    state = "ended" if timeline.is_ended else "running"
    head = f"{clock_time(now)}  {state}, last event {ago} ago  (Ctrl-C ends this view)"
    lines = [head[:width], "", *render_text(timeline, width=width).splitlines()]
    space = max(3, height - 1)
    if len(lines) > space:
        lines = [*lines[: space - 1], f"... {len(lines) - space + 1} more lines"]
    body = "".join(f"{line}{_CLEAR_LINE}\n" for line in lines)
    return f"{_HOME}{body}{_CLEAR_BELOW}"


def new_lines(before: Timeline | None, timeline: Timeline) -> list[str]:
    """Return a line for each cycle, fault, restart and remark that was not there before."""
    known = {key for key, _, _ in _entries(before)} if before else set()
    found = [(at, line) for key, at, line in _entries(timeline) if key not in known]
    return [f"{clock_time(at)} {line}" for at, line in sorted(found)]


def _entries(timeline: Timeline) -> Iterator[tuple[object, float, str]]:
    """Yield a key, the time and a line for each of them; a longer record keeps the keys."""
    for cycle in timeline.cycles:
        line = f"cycle {cycle.number} begins on {', '.join(map(plain, cycle.hosts))}"
        yield ("cycle", cycle.launch, cycle.number), cycle.start, line
    for number, fault in enumerate(timeline.faults):
        yield ("fault", number), fault.at, fault_line(fault)
    for each in timeline.restarts:
        if each.down_s is not None:
            key = (each.at, each.layer, each.cycle, each.down_s)
            yield key, each.at, f"restart {restart_line(each)}"
    for number, remark in enumerate(timeline.remarks):
        yield ("remark", number), remark.at, _remark_line(remark)


def follow(
    paths: Sequence[str],
    read: Callable[[], Timeline],
    on_change: Callable[[Timeline], object] | None,
    width: int,
) -> int:
    """Show a job until it ends, Ctrl-C, or nobody is there to see it; return the exit code."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    timeline: Timeline | None = None
    known: object = None
    try:
        if is_terminal:
            write_out("\x1b[2J")
        while timeline is None or not timeline.is_ended:
            began = time.monotonic()
            is_first, before, state = known is None, timeline, _state(paths)
            if state != known:
                known, timeline = state, _next(read, timeline, is_terminal=is_terminal)
            if is_first and timeline is None:
                write_err(f"nvrx-report: no record at {', '.join(paths)} yet: waiting for it\n")
            if timeline is not None:
                if timeline is not before and on_change is not None:
                    on_change(timeline)
                is_read = _show(before, timeline, width, is_terminal=is_terminal)
                if not is_read and on_change is None:
                    return 0
            spent_s = time.monotonic() - began
            if timeline is None or not timeline.is_ended:
                # Network disks send no notices, so that only another look finds new events.
                select.poll().poll(min(60.0, max(_TICK_S, spent_s / _SHARE)) * 1000)
    except KeyboardInterrupt:
        write_out("\n")
        return 0
    if not is_terminal:
        write_out(render_text(timeline, width=width or 100))
    return 0


def _state(paths: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    """Return names, sizes and times of the record's files, which differ when it has grown."""
    found = []
    for path in paths:
        names = [path]
        try:
            if os.path.isdir(path):
                names = [os.path.join(path, name) for name in sorted(os.listdir(path))]
            for name in names:
                status = os.stat(name)
                found.append((name, status.st_size, status.st_mtime_ns))
        except OSError:
            continue  # it may be gone or not there yet
    return tuple(found)


def _next(
    read: Callable[[], Timeline], before: Timeline | None, *, is_terminal: bool
) -> Timeline | None:
    try:
        return read()
    except EventFileError as error:
        # The first file appears with its first line, or the job was cleaned up while we looked.
        if before is None and is_terminal:
            write_out(f"{_HOME}waiting: {plain(str(error))}{_CLEAR_LINE}\n{_CLEAR_BELOW}")
        return before


def _show(before: Timeline | None, timeline: Timeline, width: int, *, is_terminal: bool) -> bool:
    """Print new lines, or redraw the terminal; return whether anybody reads the output."""
    if is_terminal:
        lines = get_terminal_size((100, 40)).lines
        return write_out(draw(timeline, width or terminal_width(), lines, time.time()))
    added = new_lines(before, timeline) if timeline is not before else ()
    return write_out("".join(f"{line}\n" for line in added))


def terminal_width() -> int:
    """Return the columns of the terminal, as far as lines are easy to read."""
    return min(get_terminal_size((100, 40)).columns, 120)
