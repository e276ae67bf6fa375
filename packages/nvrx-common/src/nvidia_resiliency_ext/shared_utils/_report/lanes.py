# SPDX-License-Identifier: Apache-2.0
"""Owns the rows of the chart: what each node and each rank did when; sums nothing."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from .accounting import ORDER
from .intervals import Span, flatten
from .timeline import Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .accounting import Paint
    from .cycles import Story
    from .gather import Seen
    from .timeline import Cycle, FaultNote

__all__ = ["node_lanes", "rank_lanes"]


def node_lanes(story: Story, painted: Sequence[Paint], hosts: Sequence[str]) -> tuple[Lane, ...]:
    """Return one lane per node: the job's time as this node saw it."""
    lanes = []
    for host in hosts:
        own = [each.span for each in painted if each.host in {None, host}]
        lives = [(cycle.start, cycle.end) for cycle in story.cycles if host in cycle.hosts] or [
            (story.start, story.end)
        ]
        first, last = min(start for start, _ in lives), max(end for _, end in lives)
        first = min([first, *(each.span.start for each in painted if each.host == host)])
        flat = flatten(own, ORDER, max(first, story.start), last, "unknown")
        faults = tuple(fault for fault in story.faults if fault.host == host)
        lanes.append(Lane(host, host, None, tuple(_unbracketed(flat)), faults))
    return tuple(lanes)


def _unbracketed(spans: Sequence[Span]) -> list[Span]:
    return [
        Span(span.start, span.end, "startup", span.note) if span.name == "bracket" else span
        for span in spans
    ]


def rank_lanes(story: Story, painted: Sequence[Paint]) -> tuple[Lane, ...]:
    """Return one lane per rank: start-up, steps, checkpoint stalls, the time until it was gone."""
    spans: dict[int, list[Span]] = defaultdict(list)
    hosts: dict[int, str] = {}
    lost = [each.span for each in painted if each.span.name == "lost_work"]
    faults: dict[int | None, list[FaultNote]] = defaultdict(list)
    for fault in story.faults:
        faults[fault.rank].append(fault)
    for cycle in story.cycles:
        by_rank: dict[int, list[Seen]] = defaultdict(list)
        for event in story.events[cycle]:
            if event.record.rank is not None and event.record.rank >= 0:
                by_rank[event.record.rank].append(event)
        for rank, own in by_rank.items():
            hosts[rank] = own[-1].host
            spans[rank].extend(_rank_spans(story, cycle, own, lost))
    return tuple(
        Lane(
            f"rank {rank}",
            hosts[rank],
            rank,
            tuple(_unbracketed(sorted(spans[rank], key=lambda span: span.start))),
            tuple(faults[rank]),
        )
        for rank in sorted(spans)
    )


def _rank_spans(
    story: Story, cycle: Cycle, own: Sequence[Seen], lost: Sequence[Span]
) -> list[Span]:
    """Return what one rank did in one cycle."""
    first = {event.kind: event for event in reversed(own)}
    start = first["worker_start"].at if "worker_start" in first else cycle.start
    exited = first.get("worker_exit")
    end = max(start, exited.at if exited else cycle.end)
    note = ""
    if "worker_start" in first:
        event = first["worker_start"]
        is_warm = event.record.fields.get("warm")
        note = (
            "warm start" if is_warm else f"cold start: {event.text('cold_reason') or 'no reason'}"
        )
    windows = story.windows_in(cycle)
    if not windows:
        name = "bracket" if story.windows else "unknown"
        return flatten([Span(start, end, name, note)], ORDER, start, end, "unknown")
    step = first["first_step"].at if "first_step" in first else windows[0].start
    painted = [Span(start, min(step, end), "bracket", note)]
    painted.extend(span for span in lost if span.end > step and span.start < end)
    for window in windows:
        painted.append(Span(max(step, window.start), min(window.end, end), "productive"))
        if window.fault is not None:
            painted.append(Span(window.end, window.fault.at, "detection"))
            painted.append(Span(window.fault.at, end, "stop"))
    for event in own:
        if event.kind == "inproc_restart":
            painted.append(Span(event.at, end, "productive"))
        if event.kind == "ckpt_save" and event.seconds("stall_s"):
            began = event.at - max(event.seconds("write_s"), event.seconds("stall_s"))
            painted.append(Span(began, began + event.seconds("stall_s"), "checkpoint_stall"))
    return flatten(_trimmed(painted, windows), ORDER, start, end, "unknown")


def _trimmed(painted: list[Span], windows: Sequence[object]) -> list[Span]:
    """Let the stop after a fault end where the next window of the same cycle begins."""
    begins = sorted(getattr(window, "start", 0.0) for window in windows)
    trimmed = []
    for span in painted:
        if span.name == "stop":
            after = next((begin for begin in begins if begin > span.start), span.end)
            trimmed.append(Span(span.start, max(span.start, min(span.end, after)), span.name))
        elif span.seconds > 0:
            trimmed.append(span)
    return trimmed
