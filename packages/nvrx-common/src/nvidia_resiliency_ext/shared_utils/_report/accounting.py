# SPDX-License-Identifier: Apache-2.0
"""Owns the rules by which a second counts as productive, lost or spent on a restart; pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .intervals import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cycles import Story, Window
    from .gather import Seen
    from .timeline import Cycle

__all__ = ["ORDER", "PHASES", "Paint", "Save", "paint", "saves"]

# Where spans overlap, the first of these wins. The bracket between a cycle's start and its first
# step is start-up only as far as no phase says more, so it comes last under a name of its own.
ORDER = (
    "detection",
    "stop",
    "rendezvous",
    "startup",
    "restart_other",
    "checkpoint_stall",
    "lost_work",
    "productive",
    "bracket",
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


@dataclass(frozen=True, slots=True)
class Paint:
    """A span of the accounting; ``host`` is None where it holds for the whole job."""

    host: str | None
    span: Span


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint that was written completely: it holds the work done before ``began``."""

    key: str
    began: float
    done: float


def succeeded(event: Seen) -> bool:
    """Say whether a checkpoint event tells of a success."""
    return not event.text("error") and event.text("result").lower() in _GOOD_RESULTS


def key_of(event: Seen) -> str:
    """Return what names the checkpoint of an event."""
    return event.shown("id") or event.shown("iteration")


def saves(story: Story) -> list[Save]:
    """Return the complete checkpoints in the order of their end.

    Each rank may report its own part. A checkpoint is complete when as many ranks reported it as
    any checkpoint of that cycle, and none of them an error.
    """
    complete: list[Save] = []
    for events in story.events.values():
        parts: dict[str, list[Seen]] = defaultdict(list)
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


def paint(story: Story) -> tuple[list[Paint], dict[Window, float]]:
    """Return all spans of the accounting, and the seconds that each window's fault threw away."""
    painted = [Paint(None, Span(each.start, each.end, "productive")) for each in story.windows]
    for cycle in story.cycles:
        painted.extend(_cycle_spans(story, cycle))
        for event in story.events[cycle]:
            painted.extend(_event_spans(event))
    if story.cycles:
        painted.append(Paint(None, Span(story.start, story.cycles[0].start, "bracket")))
    lost_s: dict[Window, float] = {}
    lost_from: dict[Window, float] = {}
    for number, kept_until in _thrown_away(story):
        window = story.windows[number]
        lost_s[window] = 0.0
        for each in (story.windows[before] for before in range(number, -1, -1)):
            if each.end <= kept_until:
                break
            # Work that an earlier fault threw away cannot be lost again.
            until = lost_from.get(each, each.end)
            begin = lost_from[each] = min(until, max(each.start, kept_until))
            lost_s[window] += until - begin
            painted.append(Paint(None, Span(begin, until, "lost_work")))
    return [each for each in painted if each.span.seconds > 0], lost_s


def _cycle_spans(story: Story, cycle: Cycle) -> list[Paint]:
    """Return the way to the first step and the time until the first fault was noticed."""
    windows, faults = story.windows_in(cycle), story.faults_in(cycle)
    spans: list[Paint] = []
    closing = [window.fault for window in windows if window.fault is not None]
    if not windows:
        closing = faults[:1]
    spans.extend(Paint(None, Span(each.onset, each.at, "detection")) for each in closing)
    if windows:
        spans.append(Paint(None, Span(cycle.start, windows[0].start, "bracket")))
    elif story.windows:
        # Steps are reported by this job, so a cycle without any never got that far.
        end = faults[0].onset if faults else cycle.end
        spans.append(Paint(None, Span(cycle.start, end, "bracket")))
    return spans


def _event_spans(event: Seen) -> list[Paint]:
    """Return the spans that one event explains by itself."""
    if event.kind == "phase":
        name = PHASES.get(event.text("name"), "restart_other")
        return [Paint(event.host, Span(event.at - event.seconds("dur_s"), event.at, name))]
    if event.kind == "ckpt_save":
        began = _save_began(event)
        span = Span(began, began + event.seconds("stall_s"), "checkpoint_stall")
        return [Paint(None, span)]
    if event.kind == "inproc_restart":
        spans, end = [], event.at
        for name, seconds in reversed(event.durations("phases").items()):
            category = PHASES.get(name, "restart_other")
            spans.append(Paint(None, Span(end - seconds, end, category)))
            end -= seconds
        return spans
    return []


def _save_began(event: Seen) -> float:
    return event.at - max(event.seconds("write_s"), event.seconds("stall_s"))


def _thrown_away(story: Story) -> list[tuple[int, float]]:
    """Return, for each window that a fault ended, its place and up to when work was kept."""
    complete = saves(story)
    has_saves = bool(story.of_kind("ckpt_save"))
    found: list[tuple[int, float]] = []
    for number, window in enumerate(story.windows):
        if window.fault is None:
            continue
        after = story.windows[number + 1].end if number + 1 < len(story.windows) else story.end
        if has_saves:
            found.append((number, _kept_until(story, complete, window, after)))
        else:
            rewound = _rewound_to(story, window, after)
            if rewound is not None:
                found.append((number, rewound))
    return found


def _kept_until(story: Story, complete: Sequence[Save], window: Window, after: float) -> float:
    """Return the begin of the save that the job went on from, else of the last complete one."""
    noticed = window.fault.at if window.fault else window.end
    loads = [
        key_of(event) for event in story.between("ckpt_load", noticed, after) if succeeded(event)
    ]
    usable = [save for save in complete if save.done <= noticed]
    if loads:
        loaded = Counter(loads).most_common(1)[0][0]
        matching = [save for save in usable if save.key == loaded]
        usable = matching or usable
    return usable[-1].began if usable else story.start


def _rewound_to(story: Story, window: Window, after: float) -> float | None:
    """Return when the iteration with which the job went on had first been reached."""
    noticed = window.fault.at if window.fault else window.end
    later = [
        event
        for event in story.between("progress", noticed, after)
        # What began before the fault was noticed is no progress of those who went on.
        if event.integer("iteration") is not None and event.at - event.seconds("window_s") > noticed
    ]
    if not later:
        return None
    first = later[0]
    resumed_at = (first.integer("iteration") or 0) - (first.integer("steps") or 0)
    for event in reversed(story.between("progress", story.start, noticed)):
        iteration = event.integer("iteration")
        if iteration is not None and iteration <= resumed_at:
            return min(window.end, event.at)
    return story.start
