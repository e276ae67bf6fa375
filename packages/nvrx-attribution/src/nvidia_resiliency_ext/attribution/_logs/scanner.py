# SPDX-License-Identifier: Apache-2.0
"""The one pass over a log: find the lines that matter and put them into groups.

A chunk is reduced to its letters and split into *templates*: lines that differ in numbers alone
are one. Only templates not seen before are searched for anchors; only lines whose template holds
one are looked at. Memory is bounded: templates and groups have limits, lines are never kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.attribution._logs.dialects import Line, LineReader, rank_in_digits
from nvidia_resiliency_ext.attribution._logs.events import (
    MOST_RANKS,
    Block,
    Event,
    EventTable,
    LinePlace,
)
from nvidia_resiliency_ext.attribution._logs.progress import (
    BAR_TEMPLATE,
    NOTE_ANCHORS,
    STEP_ANCHORS,
    counted,
    epoch_in,
    step_in,
)
from nvidia_resiliency_ext.attribution._logs.registry import templates_of
from nvidia_resiliency_ext.attribution._logs.wording import guess

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._logs.registry import Registry, Rule

__all__ = ["Scanner"]

_PIECE_BYTES = 64 * 1024
_LINE_BYTES = 4096
_BLOCK_BYTES = 1 << 20
_MOST_TEMPLATES = 20_000
_TEMPLATE_BYTES = 12 << 20
_MOST_HOT = 20_000
_MOST_CACHED = 4096
_TAIL_BYTES = 16 * 1024
_SETTLED = 256
_PREFIX_BYTES = 64
_QUICK_RANK = re.compile(rb"\[(?:rank|Rank )(\d{1,7})\]|^(\d{1,7}): ?")
_NEARLY = 0.7  # of the highest probability of a line with the same code
_STEP_TRIES = 64
_LEAST_PROBABILITY = 0.125  # that a line without a rule is about a failure of one kind
_WORLD = re.compile(r"world[ _]?size\s*[=:(]?\s*(\d{1,7})|\bn[Rr]anks\s+(\d{1,7})")
_COMM = re.compile(r"\brank (\d{1,7}) n[Rr]anks (\d{1,7})(?: nNodes \d+ localRanks (\d{1,3}))?")


@dataclass(slots=True)
class _Template:
    """State of the lines of one template.

    Attributes:
        rules: Those with an anchor in it.
        is_step: It may be the line of a completed step.
        is_note: It may tell about checkpoints or the size of the job.
        event: Where its lines went so far.
        same: How often in a row; None: the lines differ in what counts.
        misses: How many of its lines were no completed step.
    """

    rules: tuple[Rule, ...]
    is_step: bool
    is_note: bool
    event: Event | None = None
    same: int | None = 0
    misses: int = 0


@dataclass(slots=True)
class _Read:
    """A line that was looked at, for the next one that is the same."""

    line: Line
    rule: Rule | None
    match: re.Match[str] | None


class Scanner:
    """Scan a log that comes in pieces.

    Args:
        registry: The rules.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._anchors = re.compile(
            b"|".join((registry.anchors.pattern, *STEP_ANCHORS, *NOTE_ANCHORS))
        )
        self._reader = LineReader()
        self._table = EventTable(registry, self._reader)
        self.result = self._table.result
        self._plain: set[bytes] = set()
        self._plain_bytes = 0
        self._hot: dict[bytes, _Template] = {}
        self._cache: dict[bytes, _Read] = {}
        self._rest = b""
        self._has_partial_line = False

    def feed(self, data: bytes) -> None:
        """Scan more bytes; a line is looked at when its end has come."""
        self.result.bytes += len(data)
        view = self._rest + data if self._rest else data
        start = 0
        while True:
            end = view.rfind(b"\n", start, start + _BLOCK_BYTES) + 1
            if end <= 0:
                if len(view) - start <= _PIECE_BYTES:
                    break
                # A line that does not end: it is looked at in pieces, with one number.
                newline = view.find(b"\n", start, start + _PIECE_BYTES)
                end = newline + 1 if newline >= 0 else start + _PIECE_BYTES
                self._scan(view[start:end], start_byte=self._byte_at(view, start))
                start = end
                continue
            self._scan(view[start:end], start_byte=self._byte_at(view, start))
            start = end
        self._rest = view[start:]

    def finish(self) -> None:
        """Look at a last line without an end, too."""
        rest, self._rest = self._rest, b""
        if rest:
            self._scan(rest, start_byte=self.result.bytes - len(rest))
        # The last line tells how long the job was silent, whatever it is about.
        self._note_time(self._reader.read(self.result.tail.rstrip(b"\n").rpartition(b"\n")[2]))

    def guessed(self) -> Event | None:
        """Return the line that most probably reports a failure, or None.

        Looks at lines that no rule matches, in the kept end of the log after the last completed
        step; the first line counts that is nearly as probable as the best one of its code.
        """
        raw = self.result.tail.rstrip(b"\n").split(b"\n")
        first_line = self.result.lines - len(raw) + 1
        block = Block(raw, first_line, self.result.bytes - len(self.result.tail), b"")
        best: list[tuple[float, str, Line, LinePlace]] = []
        counts = counted([line.decode("utf-8", "replace") for line in raw])
        for index in range(len(raw) - 1, -1, -1):
            if index in counts or (
                _has_step_anchor(templates_of(raw[index])) and step_in(raw[index]) is not None
            ):
                break
            line = self._reader.read(raw[index])
            code, probability = guess(line.text, is_quiet=line.is_no_error)
            if probability >= _LEAST_PROBABILITY and not self._registry.has_pattern(line.text):
                best.append((probability, code, line, LinePlace(block, index)))
        if not best:
            return None
        most, code, _, _ = max(best, key=itemgetter(0))
        alike = [each for each in best if each[1] == code and each[0] >= _NEARLY * most]
        return self._table.guessed(*alike[-1])

    def _byte_at(self, view: bytes, start: int) -> int:
        return self.result.bytes - len(view) + start

    def _scan(self, block: bytes, start_byte: int) -> None:
        templates = templates_of(block).split(b"\n")
        ends_line = block.endswith(b"\n")
        if ends_line:
            templates.pop()
        first_line = self.result.lines + (0 if self._has_partial_line else 1)
        distinct = set(templates)
        self._learn(distinct)
        hot = distinct & self._hot.keys()
        if hot:
            self._scan_lines(block, templates, hot, first_line, start_byte)
        self.result.tail = (block if len(block) > _TAIL_BYTES else self.result.tail + block)[
            -_TAIL_BYTES:
        ]
        if len(self.result.head) < _TAIL_BYTES:
            self.result.head += block[: _TAIL_BYTES - len(self.result.head)]
        self.result.year = self._reader.year
        self.result.lines += len(templates) - (1 if self._has_partial_line else 0)
        self._has_partial_line = not ends_line

    def _learn(self, distinct: set[bytes]) -> None:
        """Search the templates that are new for anchors."""
        fresh = distinct - self._plain
        fresh -= self._hot.keys()
        if len(self._plain) > _MOST_TEMPLATES or self._plain_bytes > _TEMPLATE_BYTES:
            self._plain.clear()
            self._plain_bytes = 0
        if len(self._hot) > _MOST_HOT:
            self._hot.clear()
            fresh = distinct - self._plain
        search = self._anchors.search
        for template in fresh:
            is_bar = BAR_TEMPLATE.fullmatch(template) is not None
            if not is_bar and search(template) is None:
                self._plain.add(template)
                self._plain_bytes += len(template)
                continue
            found = _Template(
                self._registry.rules_for(template),
                is_bar or _has_step_anchor(template),
                any(anchor in template for anchor in NOTE_ANCHORS),
            )
            self._hot[template] = found

    def _scan_lines(
        self,
        block: bytes,
        templates: list[bytes],
        hot: set[bytes],
        first_line: int,
        start_byte: int,
    ) -> None:
        raw = block.split(b"\n")
        steps = {template for template in hot if self._hot[template].is_step}
        marked = {t for t in hot if self._hot[t].rules or self._hot[t].is_note}
        where = Block(raw, first_line, start_byte, self.result.tail)
        looked_at = -1
        if marked:
            for index, template in enumerate(templates):
                if template not in marked:
                    continue
                if steps:
                    end = index + (template in steps)
                    self._newest_step(raw, templates, steps, looked_at, end)
                    steps = {step for step in steps if self._hot[step].is_step}
                looked_at = index
                known = self._hot[template]
                number = first_line + index
                is_settled = known.same is not None and known.same > _SETTLED
                if is_settled and self._count(known, raw[index], number):
                    continue
                self._look_at(LinePlace(where, index), known)
        if steps:
            self._newest_step(raw, templates, steps, looked_at, len(templates))

    def _newest_step(
        self, raw: list[bytes], templates: list[bytes], steps: set[bytes], after: int, before: int
    ) -> None:
        """Take in the newest completed step between two lines, and the first one of the log."""
        progress = self.result.progress
        if progress.first_step is None:
            for index in range(after + 1, before):
                if templates[index] in steps and self._add_step(raw[index], templates[index]):
                    break
        tries = 0
        for index in range(before - 1, after, -1):
            if templates[index] in steps:
                tries += 1
                if self._add_step(raw[index], templates[index]) or tries > _STEP_TRIES:
                    break

    def _add_step(self, raw: bytes, template: bytes) -> bool:
        progress = self.result.progress
        step = step_in(raw)
        progress.has_step_numbers |= step is not None
        if not progress.has_step_numbers:
            step = epoch_in(raw)
        if step is None:
            known = self._hot[template]
            known.misses += 1
            known.is_step = known.misses < _STEP_TRIES
            return False
        line = self._reader.read(raw)
        if line.rank is not None:
            self.result.ranks.add(line.rank)
        self._note_time(line)
        progress.add_step(step, line.time_s)
        return True

    def _note_time(self, line: Line) -> None:
        if line.time_s is not None:
            self.result.last_time_s = line.time_s

    def _look_at(self, place: LinePlace, template: _Template) -> None:
        text = place.block.raw[place.index]
        if len(text) <= _LINE_BYTES and b"\r" not in text:
            self._look_at_line(text, place, template)
            return
        for piece in text.split(b"\r"):
            for start in range(0, len(piece), _LINE_BYTES):
                part = piece[start : start + _LINE_BYTES]
                if self._anchors.search(templates_of(part)):
                    self._look_at_line(part, place, template)

    def _look_at_line(self, text: bytes, place: LinePlace, template: _Template) -> None:
        read = self._cache.get(text)
        if read is None:
            line = self._reader.read(text)
            read = _Read(line, None, None)
            for rule in template.rules:
                if rule.only_errors and line.is_no_error:
                    continue
                match = rule.match(line.text)
                if match is not None:
                    read = _Read(line, rule, match)
                    break
            if len(self._cache) >= _MOST_CACHED:
                self._cache.clear()
            self._cache[text] = read
        self._note_writer(read.line)
        if template.is_note:
            self._take_note(read.line)
        event = None
        if read.rule is not None and read.match is not None and not place.is_source(read.line):
            event = self._table.add(read.rule, read.match, read.line, place)
        self._settle(template, read, event)

    def _note_writer(self, line: Line) -> None:
        result = self.result
        if line.time_s is not None:
            result.last_time_s = line.time_s
        if line.rank is not None and len(result.ranks) < MOST_RANKS:
            result.ranks.add(line.rank)
            if line.node is not None:
                result.node_map.add(line.rank, line.node, line.node_first_rank)
        elif line.rank is None and line.local_rank is not None and len(result.places) < MOST_RANKS:
            result.places.add((line.node, line.local_rank))

    def _settle(self, template: _Template, read: _Read, event: Event | None) -> None:
        """Count how often in a row lines of a template went to the same event."""
        has_place = read.line.rank is None and read.line.local_rank is not None
        names = read.match.re.groupindex if read.match is not None else ()
        if template.is_note or names or has_place:
            template.same = None
        elif template.same is not None:
            template.same = template.same + 1 if template.event is event else 0
            template.event = event

    def _count(self, template: _Template, text: bytes, number: int) -> bool:
        """Count one more line of a template whose lines all went the same way.

        Returns:
            False when the job went on since: the line then begins another event.
        """
        event = template.event
        if event is None:
            return True
        progress = self.result.progress
        if event.version != progress.version:
            if progress.has_gone_on(event.mark):
                template.same = 0
                return False
            event.mark = progress.mark()
            event.version = progress.version
        event.count += 1
        event.last_line = number
        found = _QUICK_RANK.search(text, 0, _PREFIX_BYTES)
        rank = rank_in_digits(found[1] or found[2]) if found is not None else None
        if rank is not None and len(event.ranks) < MOST_RANKS:
            event.ranks.add(rank)
        return True

    def _take_note(self, line: Line) -> None:
        comm = _COMM.search(line.text)
        if comm is not None:
            if line.node is not None:
                self.result.node_map.add(int(comm[1]), line.node)
            if comm[3]:
                self.result.node_map.ranks_per_node = int(comm[3])
        world = _WORLD.search(line.text)
        if world is not None:
            size = int(world[1] or world[2])
            if size < MOST_RANKS:
                self.result.world_size = max(size, self.result.world_size or 0)
        self.result.progress.take_note(line.text)


def _has_step_anchor(template: bytes) -> bool:
    return any(anchor in template for anchor in STEP_ANCHORS)
