# SPDX-License-Identifier: Apache-2.0
"""Owns the report for the terminal: a ``Timeline`` in, lines of text out; prints nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .timeline import CATEGORIES
from .words import (
    clock_time,
    duration,
    ending,
    fault_line,
    goodput_text,
    plain,
    restart_line,
    size,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .timeline import Timeline

__all__ = ["render_text"]

_NARROWEST = 40
_MOST_ROWS = 20
_LABEL_WIDTH = 18
_FIGURES_WIDTH = 24


def render_text(timeline: Timeline, width: int = 100) -> str:
    """Return a summary for a terminal.

    Args:
        timeline: The job.
        width: Columns of the terminal. Default 100.
    """
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
    room = max(0, width - _LABEL_WIDTH - _FIGURES_WIDTH - 4)
    for name, label in CATEGORIES.items():
        seconds = timeline.seconds.get(name, 0.0)
        if seconds <= 0:
            continue
        share = seconds / timeline.wall_s
        bar = "#" * max(1, round(share * room)) if room else ""
        lines.append(
            f"  {label:<{_LABEL_WIDTH}}{duration(seconds):>14} {share:>7.1%}  {bar}".rstrip()
        )
    return lines


def _faults(timeline: Timeline) -> list[str]:
    counts = [f"{count} {plain(cause)}" for cause, count in timeline.faults_by_cause.items()]
    lines = [", ".join(counts)] if len(timeline.faults) > 1 else []
    lines.extend(
        f"{clock_time(fault.at)} cycle {fault.cycle} {fault_line(fault)}"
        for fault in timeline.faults[:_MOST_ROWS]
    )
    return lines + _rest(len(timeline.faults))


def _restarts(timeline: Timeline) -> list[str]:
    counts = [f"{count} {layer}" for layer, count in timeline.restarts_by_layer.items()]
    lines = [", ".join(counts)] if timeline.restarts else []
    lines.extend(
        f"{clock_time(restart.at)} {restart_line(restart, timeline.faults)}"
        for restart in timeline.restarts[:_MOST_ROWS]
    )
    return lines + _rest(len(timeline.restarts))


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
    lines.extend(
        f"{clock_time(remark.at)} {plain(remark.kind)} on {plain(remark.host)}:"
        f" {plain(remark.text)}"
        for remark in timeline.remarks[:_MOST_ROWS]
    )
    return lines + _rest(len(timeline.remarks))


def _rest(count: int) -> list[str]:
    return [f"... and {count - _MOST_ROWS} more"] if count > _MOST_ROWS else []


def _list(title: str, lines: Iterable[str]) -> list[str]:
    shown = [f"  {line}" for line in lines]
    return [title, *shown] if shown else []


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _wrap(line: str, width: int) -> list[str]:
    """Break a line at blanks; what goes on is indented by four."""
    wrapped = []
    while len(line) > width:
        indent = len(line) - len(line.lstrip())
        at = line.rfind(" ", indent + 1, width + 1)
        if at <= indent:
            at = width
        wrapped.append(line[:at].rstrip())
        line = "    " + line[at:].lstrip()
    return [*wrapped, line]
