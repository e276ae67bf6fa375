# SPDX-License-Identifier: Apache-2.0
"""Owns the arithmetic of overlapping spans of time; knows nothing of jobs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Span", "coarsen", "flatten", "merge", "totals"]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time with a name: ``start`` and ``end`` in seconds, ``start <= end``."""

    start: float
    end: float
    name: str
    note: str = ""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


def flatten(
    spans: Iterable[Span], order: Sequence[str], start: float, end: float, rest: str
) -> list[Span]:
    """Return spans without overlap that cover ``start`` to ``end`` exactly.

    Args:
        spans: May overlap; what lies outside the range is cut off.
        order: Names, most important first: where spans overlap, the first name wins.
        start: Begin of the range.
        end: End of the range.
        rest: Name of the time that no span covers.
    """
    changes: dict[float, list[tuple[Span, int]]] = defaultdict(list)
    for span in spans:
        left, right = max(span.start, start), min(span.end, end)
        if left < right:
            changes[left].append((span, 1))
            changes[right].append((span, -1))
    open_counts = dict.fromkeys([*order, rest], 0)
    notes = dict.fromkeys([*order, rest], "")
    flat: list[Span] = []
    at = start
    for moment in sorted({*changes, end}):
        name = next((name for name in order if open_counts[name]), rest)
        if moment > at:
            if flat and flat[-1].name == name:
                flat[-1] = Span(flat[-1].start, moment, name, flat[-1].note)
            else:
                flat.append(Span(at, moment, name, notes[name]))
            at = moment
        for changed, step in changes.get(moment, ()):
            open_counts[changed.name] += step
            if step > 0:
                notes[changed.name] = changed.note
    return flat


def totals(flat: Iterable[Span], names: Iterable[str]) -> dict[str, float]:
    """Return the seconds of each name, 0 for one that does not occur."""
    found = dict.fromkeys(names, 0.0)
    for span in flat:
        found[span.name] = found.get(span.name, 0.0) + span.seconds
    return found


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
    """Return at most ``count`` spans: in each equal part of the range, what took most of it."""
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
