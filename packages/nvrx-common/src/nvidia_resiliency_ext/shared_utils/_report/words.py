# SPDX-License-Identifier: Apache-2.0
"""Owns how values of a timeline read: durations, times, shares, safe text; lays nothing out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .timeline import FaultNote, Restart, Timeline

__all__ = [
    "both",
    "clock_time",
    "duration",
    "ending",
    "fault_line",
    "goodput_text",
    "plain",
    "restart_line",
    "short_cause",
    "size",
]

_MINUTE_S = 60
_HOUR_S = 3600
_DAY_S = 86400
_SHORT_S = 10
_KIB = 1024
_LONGEST_CAUSE = 1000  # what hangs and who waited for it are whole sentences


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
    """Return a time as local date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return f"{at:.0f}"


def size(count: int) -> str:
    """Return a number of bytes."""
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
    """Say how the job ended."""
    if not timeline.is_ended:
        return "no end recorded"
    result = plain(timeline.result, _LONGEST_CAUSE) or "no result"
    code = f"exit code {timeline.exit_code}"
    is_said = timeline.exit_code is None or result.endswith(code)
    return f"ended: {result}" if is_said else f"ended: {result} ({code})"


def fault_line(fault: FaultNote) -> str:
    """Tell one fault in a sentence."""
    told = plain(both(fault.what, fault.detail), _LONGEST_CAUSE)
    who = "" if fault.rank is None else f" rank {fault.rank}"
    where = "" if _names_rank(told, fault.rank) else f"{who} on {plain(fault.host)}"
    what = f": {told}" if told else ""
    late = "" if fault.late_s is None else f", {duration(max(0.0, fault.late_s))} late"
    found = f", found by {plain(fault.detected_by)}{late}" if fault.detected_by else late
    return f"{plain(fault.cause)}{where}{what}{found}"


def short_cause(cause: str, faults: Iterable[FaultNote]) -> str:
    """Return why a cycle ended: of a fault that is told beside it, only its name and rank."""
    for fault in faults:
        if cause and cause == fault.what:
            return fault.cause if fault.rank is None else f"{fault.cause} of rank {fault.rank}"
    return cause


def restart_line(restart: Restart, faults: Iterable[FaultNote] = ()) -> str:
    """Tell one restart in a sentence; a cause that is one of ``faults`` is only named."""
    phases = ", ".join(f"{plain(name)} {duration(s)}" for name, s in restart.phases.items())
    short = short_cause(restart.cause, faults)
    cause = plain(short, _LONGEST_CAUSE) or "no cause given"
    is_told = restart.rank is None or short != restart.cause or _names_rank(cause, restart.rank)
    who = "" if is_told else f" (rank {restart.rank})"
    down = (
        "down for an unknown time" if restart.down_s is None else f"down {duration(restart.down_s)}"
    )
    lost = f", lost work {duration(restart.lost_s)}" if restart.lost_s else ""
    spent = f" [{phases}]" if phases else ""
    return f"{restart.layer}, to cycle {restart.cycle}: {cause}{who}, {down}{spent}{lost}"


def both(what: str, detail: str) -> str:
    """Return what happened with its detail, unless one of them holds the other."""
    if not detail or detail in what:
        return what
    return detail if what in detail else f"{what} ({detail})"


def _names_rank(text: str, rank: int | None) -> bool:
    """Say whether a text begins with the rank, as the launcher's and the monitor's do."""
    return rank is not None and text.startswith(f"rank {rank} ")
