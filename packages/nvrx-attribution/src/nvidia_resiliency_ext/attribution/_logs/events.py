# SPDX-License-Identifier: Apache-2.0
"""Events: lines that say the same, what is kept of them, and the table that lines are put into."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.attribution._logs.dialects import (
    NO_YEAR,
    Line,
    LineReader,
    plain_text,
    rank_in_digits,
)
from nvidia_resiliency_ext.attribution._logs.nodes import MOST_RANKS, NodeMap
from nvidia_resiliency_ext.attribution._logs.progress import Progress, counted
from nvidia_resiliency_ext.attribution._logs.registry import Rule, letters

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._logs.registry import Registry

__all__ = [
    "ABOUT_A_RANK",
    "GUESSED",
    "MOST_RANKS",
    "Block",
    "Event",
    "EventTable",
    "LinePlace",
    "Occurrence",
    "ScanResult",
]

_Raw = bytes  # a class below has an attribute `bytes`
# In the place of a rule's id, for a line whose words alone tell its code.
GUESSED = "wording"

_MOST_EVENTS = 20_000
_LINE_BYTES = 4096
_BACK_LINES = 24
_BACK_LINES_OF_MANY = 80
_QUOTES = 6
_SOURCE_LINES = 3
_TEXT = 400
_KEY_LETTERS = 160
_BLOCK_TRIES = 8
_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d{1,7}), in ([\w.<>]{1,120})')
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen|<string>")
_PATH = re.compile(r"['\"(\s:=](/[\w.@%+=:,-]+(?:/[\w.@%+=:,-]+)+)")
_HOST_FIELD = re.compile(r"host\s*:\s*([A-Za-z][\w.-]{0,62})")
_RANK_FIELD = re.compile(r"rank\s*:\s*(\d{1,7})\s*\(local_rank: (\d{1,3})\)")
_TIME_FIELD = re.compile(r"time\s*:\s*(\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d:\d\d)")
# Lines of a failure block of torchrun that name the end of one rank; its rank and host stand above.
_EXIT_FIELDS = ("exitcode ", "exitcode:", "traceback :")
_EXIT_BLOCK_LINES = 5
_LOCAL = re.compile(r"local_rank:?\s*(\d{1,3})")
_SEQ = re.compile(r"SeqNum=(\d{1,12})|last enqueued(?: NCCL)? work:? (\d{1,12})")
# Lines about the end of a rank, or about the odd one among ranks, name it, whoever wrote them.
ABOUT_A_RANK = frozenset({"host.exit_nonzero", "host.sigkill", "host.segfault", "hang.heartbeat"})
_SUBJECT = re.compile(r"\b(?:(?:[Rr]ank|RANK|[Ww]orker)[ =:#]{1,2}|r)(\d{1,7})\b")
_DID = re.compile(
    r"(?<![\w.])(\d{1,7}(?:[-,]\d{1,7})*) (?:called|issued|ran|runs|entered|posted|started|sent|"
    r"is (?:running|in|at)|are (?:running|in|at)|did|does|has|have|used?)\b"
)
_EXIT_CODES = {
    -9: ("host.sigkill", "either"),
    137: ("host.sigkill", "either"),
    -11: ("host.segfault", "either"),
    139: ("host.segfault", "either"),
    -7: ("host.segfault", "either"),
    135: ("host.segfault", "either"),
    -4: ("host.segfault", "either"),
    132: ("host.segfault", "either"),
    -6: ("unknown", "teardown"),
    134: ("unknown", "teardown"),
    -15: ("unknown", "teardown"),
    143: ("unknown", "teardown"),
    0: ("unknown", "context"),
}


@dataclass(slots=True)
class Occurrence:
    """One line of an event: where it stands and who wrote it."""

    line: int
    byte: int
    time_s: float | None
    rank: int | None
    local_rank: int | None
    node: str | None
    gpu: str | None
    text: str
    raw: str


@dataclass(slots=True, eq=False)
class Event:
    """Lines that say the same, as long as the job did not go on in between.

    Attributes:
        rule: What found it.
        code: Its reason code.
        role: Its role.
        first: The earliest occurrence: by time where lines have one, else by line.
        count: How many lines.
        ranks: Who wrote them.
        nodes: Where these ran.
        mark: Progress at the last occurrence.
        phase: Of the job at the first one.
        frame: Innermost own frame of the traceback: `function (file)`.
        entity: File that the message names.
        evidence: (line number, text) of the block.
        xid: Number of a driver's message.
        exit_code: Of an exit.
        steps_before: Whether a step had been completed before it.
        seqs: Rank -> sequence number that its message names.
        places: (node, local rank) of writers whose rank no line says.
        last_line: Number of its last line.
        version: Of the progress, at its last line.
    """

    rule: Rule
    code: str
    role: str
    first: Occurrence
    mark: tuple[int, int, int]
    phase: str
    count: int = 1
    ranks: set[int] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    frame: str = ""
    entity: str | None = None
    evidence: list[tuple[int, str]] = field(default_factory=list)
    xid: int | None = None
    exit_code: int | None = None
    steps_before: bool = False
    in_traceback: bool = False
    places: set[tuple[str | None, int]] = field(default_factory=set)
    seqs: dict[int, int] = field(default_factory=dict)
    last_line: int = 0
    version: int = 0


@dataclass(slots=True)
class ScanResult:
    """Events and counts of the pass so far.

    Attributes:
        events: In the order of their first line.
        progress: Steps, checkpoints, phase.
        node_map: Rank -> node.
        lines: Lines read.
        bytes: Bytes read.
        world_size: As the log says, or None.
        ranks: Ranks that wrote anything that was looked at.
        dropped_events: Groups beyond the limit.
        truncated: The log was cut, or a limit was met.
        last_time_s: Newest time seen.
        dump_signal_ranks: Ranks that were told to dump because of others.
        departed_ranks: Ranks that others said to have left.
        places: (node, local rank) of writers whose rank no line says.
        year: Of the newest line that had one.
        head: Begin of the log.
        first_line: Number of its first line; those before were skipped.
        tail: End of the log, as far as it was scanned.
    """

    events: list[Event] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    node_map: NodeMap = field(default_factory=NodeMap)
    lines: int = 0
    bytes: int = 0
    world_size: int | None = None
    ranks: set[int] = field(default_factory=set)
    dropped_events: int = 0
    truncated: bool = False
    last_time_s: float | None = None
    dump_signal_ranks: set[int] = field(default_factory=set)
    departed_ranks: set[int] = field(default_factory=set)
    year: int = NO_YEAR
    places: set[tuple[str | None, int]] = field(default_factory=set)
    head: _Raw = b""
    first_line: int = 1
    tail: _Raw = b""

    def sample(self) -> list[tuple[int, str]]:
        """Return number and text of the first and last lines."""
        tail = self.tail.split(b"\n")
        first = self.lines - len(tail) + 2 if tail[-1:] == [b""] else self.lines - len(tail) + 1
        begin = self.first_line
        head = self.head.split(b"\n")[: max(0, first - begin)]
        numbered = [*enumerate(head, begin), *enumerate(tail, first)]
        return [(number, line.decode("utf-8", "replace")) for number, line in numbered]


class Block:
    """Lines that were scanned together.

    Args:
        raw: The lines.
        first_line: Number of the first in the log, from 1.
        start_byte: Where it begins in the log.
        tail: End of the block before.
    """

    def __init__(self, raw: list[bytes], first_line: int, start_byte: int, tail: bytes) -> None:
        self.raw = raw
        self.first_line = first_line
        self.start_byte = start_byte
        self.tail = tail

    @cached_property
    def starts(self) -> list[int]:
        """Where each line begins in the log; most blocks never need it."""
        return list(accumulate((len(line) + 1 for line in self.raw), initial=self.start_byte))


@dataclass(slots=True)
class LinePlace:
    """Where a line stands: its block, and which line of it."""

    block: Block
    index: int

    @property
    def number(self) -> int:
        """The line's number in the log, from 1."""
        return self.block.first_line + self.index

    def byte(self) -> int:
        """Return where the line begins in the log."""
        return self.block.starts[self.index]

    def is_source(self, line: Line) -> bool:
        """Return whether the line is a line of code that a traceback quotes."""
        if not line.indented:
            return False
        return any(_FRAME.search(text) for text in self.lines_before(_SOURCE_LINES))

    def lines_before(self, count: int) -> list[str]:
        """Return the lines before it, as far as they are still there."""
        before = self.block.raw[max(0, self.index - count) : self.index]
        if len(before) < count and self.block.tail:
            earlier = self.block.tail.split(b"\n")
            before = [*earlier[-1 - (count - len(before)) : -1], *before]
        return [plain_text(item[:_LINE_BYTES].decode("utf-8", "replace")) for item in before]


@dataclass(slots=True)
class _Found:
    """Match of a rule in a line, before it goes into an event."""

    code: str
    role: str
    at: Occurrence
    xid: int | None = None
    exit_code: int | None = None
    entity: str | None = None


class EventTable:
    """Put lines into events.

    Args:
        registry: The rules.
        reader: Of the lines.
    """

    def __init__(self, registry: Registry, reader: LineReader) -> None:
        self._registry = registry
        self._reader = reader
        self._open: dict[tuple[object, ...], Event] = {}
        self.result = ScanResult()

    def add(self, rule: Rule, match: re.Match[str], line: Line, place: LinePlace) -> Event | None:
        """Take in a line that a rule found; return its event, or None when it is none."""
        result = self.result
        if rule.id == "nccl.dump_signal":
            if line.rank is not None:
                result.dump_signal_ranks.add(line.rank)
            return None
        found = self._read(rule, match, line, place)
        if rule.id == "peer.departed" and found is not None and found.at.rank is not None:
            result.departed_ranks.add(found.at.rank)
        if found is None or found.role == "context":
            return None
        key = (rule.id, found.xid, found.exit_code, letters(line.text)[:_KEY_LETTERS])
        event = self._open.get(key)
        if event is not None and not result.progress.has_gone_on(event.mark):
            self._add_again(event, found, line, place)
        else:
            if len(result.events) >= _MOST_EVENTS:
                result.dropped_events += 1
                return None
            event = self._open[key] = self._new(rule, found, line, place)
            result.events.append(event)
        event.last_line = place.number
        event.version = result.progress.version
        _add_writer(event, found.at, line)
        return event

    def guessed(self, probability: float, code: str, line: Line, place: LinePlace) -> Event:
        """Return the event of a line that no rule knows; the table does not keep it."""
        rule = Rule(GUESSED, code, "either", (), "", confidence=round(probability, 3))
        at = _occurrence(line, place)
        at.rank = _named_rank(code, line.text, at.rank)
        event = self._new(rule, _Found(code, rule.role, at), line, place)
        event.last_line = place.number
        _add_writer(event, at, line)
        return event

    def _read(
        self, rule: Rule, match: re.Match[str], line: Line, place: LinePlace
    ) -> _Found | None:
        groups = match.groupdict()
        at = _occurrence(line, place)
        names = (rule.rank_group, "rank2", "rank3")
        for name in names:
            if groups.get(name):
                at.rank = rank_in_digits(groups[name])
        at.node = (groups.get(rule.node_group) or at.node or "").rstrip(".,;") or None
        at.gpu = groups.get("gpu") or at.gpu
        found = _Found(rule.code, rule.role, at)
        found.entity = groups.get(rule.entity) if rule.entity is not None else None
        if groups.get("xid"):
            found.xid = int(groups["xid"])
            entry = self._registry.xids.get(found.xid)
            if entry is None:
                return None
            found.code, found.role = entry.code, entry.role
        exit_text = groups.get("exit") or groups.get("exit2")
        if exit_text:
            found.exit_code = int(exit_text)
            unknown = ("host.exit_nonzero", "either")
            found.code, found.role = _EXIT_CODES.get(found.exit_code, unknown)
        if exit_text or line.text.startswith(_EXIT_FIELDS):
            self._read_exit(line, place, at)
        elif not any(groups.get(name) for name in names):
            at.rank = _named_rank(found.code, line.text, at.rank)
        return found

    def _read_exit(self, line: Line, place: LinePlace, at: Occurrence) -> None:
        """Take rank, node and time of an exit from the lines of its block."""
        local = _LOCAL.search(line.text)
        if local is not None:
            at.local_rank = int(local[1])
        if not line.text.startswith(_EXIT_FIELDS):
            return
        for text in place.lines_before(_EXIT_BLOCK_LINES):
            if (match := _RANK_FIELD.search(text)) is not None:
                at.rank, at.local_rank = int(match[1]), int(match[2])
            elif (match := _HOST_FIELD.search(text)) is not None:
                at.node = match[1]
            elif (match := _TIME_FIELD.search(text)) is not None:
                stamp = match[1].replace("_", "T").encode()
                at.time_s = self._reader.read(stamp + b" x").time_s
        if at.rank is not None and at.rank < MOST_RANKS:
            self.result.ranks.add(at.rank)
            if at.node is not None:
                self.result.node_map.add(at.rank, at.node)

    def _new(self, rule: Rule, found: _Found, line: Line, place: LinePlace) -> Event:
        progress = self.result.progress
        found.at.byte = place.byte()
        event = Event(rule, found.code, found.role, found.at, progress.mark(), progress.phase)
        event.steps_before = progress.last_step is not None or bool(
            counted(place.lines_before(_BACK_LINES))
        )
        event.xid, event.exit_code = found.xid, found.exit_code
        event.phase = rule.phase or event.phase
        self._describe(event, line, place)
        event.entity = found.entity or event.entity
        stops = self._registry.code(event.code).action == "STOP"
        if rule.early and event.steps_before and stops:
            event.code = "user.exception"
        if rule.needs_block and not event.in_traceback:
            event.role = "either"
        return event

    def _add_again(self, event: Event, found: _Found, line: Line, place: LinePlace) -> None:
        event.count += 1
        event.mark = self.result.progress.mark()
        if event.rule.needs_block and event.role == "either" and event.count < _BLOCK_TRIES:
            self._describe(event, line, place)
            event.role = "root" if event.in_traceback else "either"
        earlier, first = found.at.time_s, event.first.time_s
        if earlier is not None and first is not None and earlier < first:
            found.at.byte = place.byte()
            event.first = found.at

    def _describe(self, event: Event, line: Line, place: LinePlace) -> None:
        """Keep the block before an event: its frames, as evidence, and the innermost own one."""
        event.evidence = [(place.number, line.text[:_TEXT])]
        if event.rule.entity is not None:
            path = _PATH.search(line.text)
            event.entity = path[1] if path is not None else None
        if event.rule.source in {"kernel", "slurm"} or event.exit_code is not None:
            return
        frames: list[tuple[int, str, str]] = []
        # Without ranks in the prefixes nobody else's lines stand between those of a block.
        count = _BACK_LINES_OF_MANY if line.rank is not None else _BACK_LINES
        for back, text in enumerate(reversed(place.lines_before(count)), 1):
            if "Traceback (most recent" in text and self._is_same(text, line):
                break
            frame = _FRAME.search(text)
            if frame is not None and self._is_same(text, line):
                quote = text.strip()[:_TEXT]
                frames.append((place.number - back, f"{frame[3]} ({frame[1]})", quote))
        event.in_traceback = bool(frames)
        own = [frame for frame in frames if not _LIBRARY.search(frame[1])]
        event.frame = own[0][1] if own else ""
        for code, pattern in event.rule.frames:
            if any(re.search(pattern, frame) for _, frame, _ in frames):
                event.code = code
                break
        quotes = [(at, text) for at, _, text in reversed(frames[:_QUOTES])]
        event.evidence = [*quotes, *event.evidence]

    def _is_same(self, text: str, line: Line) -> bool:
        """Return whether another line comes from the same rank, as far as prefixes say."""
        if line.rank is None and line.local_rank is None:
            return True
        other = self._reader.read(text.encode())
        return (other.rank, other.local_rank) == (line.rank, line.local_rank)


def _occurrence(line: Line, place: LinePlace) -> Occurrence:
    return Occurrence(
        *(place.number, -1, line.time_s, line.rank, line.local_rank, line.node, line.gpu),
        line.text[:_TEXT],
        place.block.raw[place.index][:_TEXT].decode("utf-8", "replace"),
    )


def _named_rank(code: str, text: str, writer: int | None) -> int | None:
    """Return the rank that a line is about; the one that wrote it where it names none."""
    named = set()
    if code in ABOUT_A_RANK:
        named = set(_SUBJECT.findall(text))
    elif code == "user.collective_mismatch":
        groups = [match[1] for match in _DID.finditer(text)]
        single = {ranks for ranks in groups if ranks.isdigit()}
        named = single if len(groups) > len(single) else set()
    return rank_in_digits(named.pop()) if len(named) == 1 else writer


def _add_writer(event: Event, at: Occurrence, line: Line) -> None:
    if at.rank is not None and len(event.ranks) < MOST_RANKS:
        event.ranks.add(at.rank)
        seq = _SEQ.search(line.text)
        if seq is not None:
            event.seqs[at.rank] = int(seq[1] or seq[2])
    if at.rank is None and at.local_rank is not None and len(event.places) < MOST_RANKS:
        event.places.add((at.node, at.local_rank))
    if at.node is not None:
        event.nodes.add(at.node)
