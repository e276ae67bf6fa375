# SPDX-License-Identifier: Apache-2.0
"""Steps, checkpoints and phase of a training job, from the lines that frameworks print."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BAR_TEMPLATE",
    "NOTE_ANCHORS",
    "STEP_ANCHORS",
    "Progress",
    "counted",
    "epoch_in",
    "step_in",
]

# Reduced as templates are. A line with one of these may be that of a completed step.
STEP_ANCHORS = (
    b"consumedsamples",
    b"globalstep",
    b"lmloss",
    b"trainstep",
    b"trainingstep",
    b"loss",
    b"steptime",
    b"epoch",
    b"stepdone",
    b"finishedstep",
    b"completedstep",
)
# A line with one of these changes the phase, or tells the size of the job.
NOTE_ANCHORS = (
    b"savingcheckpoint",
    b"savedcheckpoint",
    b"loadingcheckpoint",
    b"loadedcheckpoint",
    b"checkpointsaved",
    b"checkpointloaded",
    b"savecheckpoint",
    b"loadcheckpoint",
    b"worldsize",
    b"nranks",
)
_STEP = re.compile(
    rb"\biteration\s+(\d{1,12})\s*/\s*\d+"
    rb"|\bglobal[_ ]step[ =:]+(\d{1,12})"
    rb"|['\"]?\bstep['\"]?\s*[=:]\s*(\d{1,12})"
    rb"|\b(?:train(?:ing)?|finished|completed)[ _]step[ =:#]*(\d{1,12})"
    rb"|\bstep (\d{1,12})\b"
    rb"|\biter(?:ation)?[ =:]+(\d{1,12})\b",
    re.IGNORECASE,
)
# A trainer's progress bar has no name before it: its template is `sit`, as often as it was drawn.
BAR_TEMPLATE = re.compile(rb"(?:sit|its)+")
_BAR = re.compile(rb"^.{0,200}\d%\|[^|]{0,400}\|\s*(\d{1,12})/\d+ \[[\d:]+<", re.DOTALL)
_EPOCH = re.compile(rb"['\"]epoch['\"]\s*:\s*(\d{1,6}(?:\.\d{1,6})?)")
_LOSS = re.compile(
    rb"loss|consumed|elapsed|tokens|grad|time|epoch|completed|finished|done", re.IGNORECASE
)
_NOT_DONE = re.compile(
    rb"\b(?:starting|begin(?:ning)?|entering|error|failed|nan in)\b", re.IGNORECASE
)
_SAVED = re.compile(
    r"successfully saved checkpoint (?:from|at) iteration\s+(\d+)"
    r"|(?:saved checkpoint|checkpoint saved)\b.{0,60}?(?:iteration|step)[ =:_]*(\d+)"
    r"|saved checkpoint\b.{0,80}?(\d{1,12})\b",
    re.IGNORECASE,
)
_SAVING = re.compile(r"\b(?:saving|save)[ _]checkpoint\b|saving checkpoint", re.IGNORECASE)
_LOADING = re.compile(r"\b(?:loading|load)[ _](?:\w+ )?checkpoint\b", re.IGNORECASE)
_LOADED = re.compile(
    r"(?:successfully )?loaded (?:\w+ )?checkpoint|checkpoint loaded", re.IGNORECASE
)
# Whole numbers, with or without marks between thousands, that are no part of a time or an address
# and have no unit.
_COUNT = re.compile(
    r"(?<![A-Za-z])([A-Za-z]*)[^\w.]{0,3}(?<![\w.:/-])(?<!\d,)"
    r"(\d{1,3}(?:,\d{3})+|\d{1,12})(?![\w.:/%-]|,\d| ?/| of | ?(?:[KMGT]i?B|ms|s|C|W)\b)"
)
_COUNTED = re.compile(r"(?:\w*step|iter|iteration|update|\w*batch|tick|round)s?", re.IGNORECASE)
_DECIMAL = re.compile(r"(?<![:\d.,\w])\d*\.\d+(?![\d.:Z])")
_NOT_COUNTED = re.compile(
    r"retry|attempt|\btry\b|error|fail|load|layer|shard|heartbeat|watchdog|alive|poll|wait|elapsed|"
    r"agent|monitor",
    re.IGNORECASE,
)
_LEAST_COUNT = 10
_ROLLED_BACK = 3
_LEAST_ADVANCE = 2


def step_in(raw: bytes) -> int | None:
    """Return the completed step that a line reports, or None."""
    raw = raw[:2000]
    match = _STEP.search(raw)
    if match is None:
        bar = _BAR.match(raw.rpartition(b"\r")[2])
        if bar is not None:
            return int(bar[1])
        return None
    if not _LOSS.search(raw) or _NOT_DONE.search(raw):
        return None
    return int(next(group for group in match.groups() if group is not None))


def epoch_in(raw: bytes) -> int | None:
    """Return ten thousandths of an epoch, for trainers that print no number of a step."""
    epoch = _EPOCH.search(raw[:2000])
    return None if epoch is None else int(float(epoch[1]) * 10_000)


def counted(lines: Sequence[str]) -> dict[int, int | None]:
    """Return lines that repeat an earlier one with a larger number: steps in a tool's own words.

    Each is the index of a line. Where none of these words is a usual one, the number has to be
    beside a measurement, and the index of the first line of its kind comes with it; else None.
    """
    newest: dict[tuple[str, int], int] = {}
    begun: dict[tuple[str, int], int] = {}
    found: dict[int, int | None] = {}
    for index, text in enumerate(lines):
        if _NOT_COUNTED.search(text):
            continue
        shape = re.sub(r"[\W\d_]+", " ", text)
        for place, match in enumerate(_COUNT.finditer(text)):
            count = int(match[2].replace(",", ""))
            before = newest.get((shape, place), count)
            newest[shape, place] = max(count, before)
            begun.setdefault((shape, place), index)
            is_usual = _COUNTED.fullmatch(match[1]) is not None
            if match[1].lower() in {"rank", "worker"} or count <= before:
                continue
            if is_usual:
                found[index] = None
            elif before >= _LEAST_COUNT and _DECIMAL.search(text):
                found.setdefault(index, begun[shape, place])
    return found


@dataclass(slots=True)
class Progress:
    """How far the job has come.

    A step number that goes back begins a new segment: the job was started again from a checkpoint.
    """

    first_step: int | None = None
    last_step: int | None = None
    last_step_time_s: float | None = None
    first_step_time_s: float | None = None
    last_checkpoint: int | None = None
    segment: int = 0
    segment_first: int = -1
    phase: str = "startup"
    version: int = 0
    has_step_numbers: bool = False

    def add_step(self, step: int, time_s: float | None) -> None:
        """Take in a completed step."""
        self.version += 1
        if self.first_step is None:
            self.first_step, self.first_step_time_s = step, time_s
            self.segment_first = step
        elif self.last_step is not None and step < self.last_step - _ROLLED_BACK:
            self.segment += 1
            self.segment_first = step
        if self.last_step is None or step > self.last_step or step < self.last_step - _ROLLED_BACK:
            self.last_step = step
        self.last_step_time_s = time_s if time_s is not None else self.last_step_time_s
        if self.phase in {"startup", "checkpoint_load"}:
            self.phase = "training"

    def take_note(self, text: str) -> None:
        """Take in a line about checkpoints."""
        self.version += 1
        saved = _SAVED.search(text)
        if saved is not None:
            step = int(next(group for group in saved.groups() if group is not None))
            self.last_checkpoint = max(step, self.last_checkpoint or 0)
            self.phase = "training"
        elif _LOADED.search(text):
            self.phase = "training" if self.first_step is not None else "startup"
        elif _SAVING.search(text):
            self.phase = "checkpoint_save"
        elif _LOADING.search(text):
            self.phase = "checkpoint_load"

    def mark(self) -> tuple[int, int, int]:
        """Return (segment, step, checkpoint) to compare with later."""
        step = self.last_step if self.last_step is not None else -1
        checkpoint = self.last_checkpoint if self.last_checkpoint is not None else -1
        return self.segment, step, checkpoint

    def has_gone_on(self, mark: tuple[int, int, int]) -> bool:
        """Return whether at least two steps, or a newer checkpoint, came after a mark."""
        _, step, checkpoint = mark
        if self.last_checkpoint is not None and self.last_checkpoint > max(checkpoint, step):
            return True
        return self.has_stepped(mark)

    def has_stepped(self, mark: tuple[int, int, int]) -> bool:
        """Return whether at least two steps came after a mark."""
        segment, step, _ = mark
        if self.last_step is None:
            return False
        if self.segment != segment:
            return self.last_step > self.segment_first
        if step < 0:
            return self.last_step > (self.first_step or 0)
        return self.last_step >= step + _LEAST_ADVANCE
