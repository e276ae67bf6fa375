# SPDX-License-Identifier: Apache-2.0
"""Owns the way from files of events to one sorted list with comparable times; judges nothing.

Fields come from files that anybody may have written: a value of the wrong type is no value.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvidia_resiliency_ext.shared_utils._events.read import EventFile, EventRecord

__all__ = ["Seen", "gather"]

_LARGEST = 1e15


@dataclass(frozen=True, slots=True)
class Seen:
    """One event with its node, its time on the common axis, and which launch it belongs to.

    ``launch`` counts the launches of a job: cycle numbers begin again in each of them.
    """

    at: float
    host: str
    launch: int
    record: EventRecord

    @property
    def kind(self) -> str:
        """Kind of the event."""
        return self.record.kind

    def number(self, name: str) -> float | None:
        """Return a field as a finite number."""
        return _finite(self.record.fields.get(name))

    def seconds(self, name: str) -> float:
        """Return a field as a duration, 0 where there is none."""
        return max(0.0, self.number(name) or 0.0)

    def integer(self, name: str) -> int | None:
        """Return a field as a whole number."""
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


def gather(files: Sequence[EventFile]) -> list[Seen]:
    """Return the events of all files in the order of their times.

    Within a file, times follow the monotonic clock where the header allows it, so that a step of
    the wall clock makes no time appear or vanish. A clock that was found to be off is put right.
    """
    seen: list[Seen] = []
    for launch, own in enumerate(_launches(files)):
        for file in own:
            offset, off_s = _offset(file), _off_s(file)
            seen.extend(
                Seen(_at(event, offset) - off_s, file.host, launch, event) for event in file.events
            )
    return sorted(seen, key=lambda event: event.at)


def _launches(files: Sequence[EventFile]) -> list[list[EventFile]]:
    """Return the files of each launch, in the order of their begins.

    The first launches of all nodes of a job belong together, and so do the second ones; those of
    two jobs never do.
    """
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


def _at(event: EventRecord, offset: float | None) -> float:
    return event.t if offset is None or event.m is None else event.m + offset
