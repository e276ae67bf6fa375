# SPDX-License-Identifier: Apache-2.0
"""Owns the live view: what is shown of a job that goes on; when to look again is ``watch``'s.

On a terminal the report is drawn anew in place. Anywhere else, what is new is told line by line,
and the report comes at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .text import render_text
from .words import clock_time, duration, fault_line, plain, restart_line

if TYPE_CHECKING:
    from .timeline import Timeline

__all__ = ["draw", "news", "waiting"]

_HOME = "\x1b[H"
_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"


def draw(timeline: Timeline, width: int, height: int, now: float) -> str:
    """Return what draws the present state over the one before."""
    ago = duration(max(0.0, now - timeline.end))
    state = "ended" if timeline.is_ended else "running"
    head = f"{clock_time(now)}  {state}, last event {ago} ago  (Ctrl-C ends this view)"
    lines = [head[:width], "", *render_text(timeline, width=width).splitlines()]
    room = max(3, height - 1)
    if len(lines) > room:
        lines = [*lines[: room - 1], f"... {len(lines) - room + 1} more lines"]
    body = "".join(f"{line}{_CLEAR_LINE}\n" for line in lines)
    return f"{_HOME}{body}{_CLEAR_BELOW}"


def waiting(why: str) -> str:
    """Return what is drawn before there is anything."""
    return f"{_HOME}waiting: {plain(why)}{_CLEAR_LINE}\n{_CLEAR_BELOW}"


def news(before: Timeline | None, timeline: Timeline) -> list[str]:
    """Return a line for each cycle, fault, restart and remark that was not there before."""
    found: list[tuple[float, str]] = []
    known = before.cycles if before else ()
    told = {(cycle.launch, cycle.number) for cycle in known}
    found.extend(
        (cycle.start, f"cycle {cycle.number} begins on {', '.join(map(plain, cycle.hosts))}")
        for cycle in timeline.cycles
        if (cycle.launch, cycle.number) not in told
    )
    found.extend(
        (fault.at, f"cycle {fault.cycle} {fault_line(fault)}")
        for fault in timeline.faults[len(before.faults) if before else 0 :]
    )
    found.extend(
        (restart.at, f"restart {restart_line(restart)}")
        for restart in timeline.restarts
        if restart.down_s is not None
        and (before is None or _key(restart) not in {_key(each) for each in before.restarts})
    )
    found.extend(
        (remark.at, f"{plain(remark.kind)} on {plain(remark.host)}: {plain(remark.text)}")
        for remark in timeline.remarks[len(before.remarks) if before else 0 :]
    )
    return [f"{clock_time(at)} {line}" for at, line in sorted(found)]


def _key(restart: object) -> tuple[object, ...]:
    return tuple(getattr(restart, name) for name in ("at", "layer", "cycle", "down_s"))
