# SPDX-License-Identifier: Apache-2.0
"""Learn from a log which numbers are ranks, where no known prefix says it.

A label is the word or the mark before a number: `seat 3`, `core-3`, `"idx": 3`. A label near the
begin of lines names who writes them when its numbers differ and do not only grow, as a counter's
do. The same numbers are then found where others speak of a member.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.attribution._logs.dialects import LineReader
from nvidia_resiliency_ext.attribution._logs.events import MOST_RANKS
from nvidia_resiliency_ext.attribution._logs.registry import letters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvidia_resiliency_ext.attribution._logs.events import ScanResult

__all__ = ["Members", "named_members"]

# No part of a time, an address or a size, and no count out of a known total.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_])([A-Za-z_]*)([^\w\n]{0,4}?)(?<!\d[.,:/x-])(?<!\d)(\d{1,6})"
    r"(?![A-Za-z0-9_%]|[.,:/-]\w| ?/ ?\d| of \d| [KMGT]i?B)"
)
_MEMBER = re.compile(
    r"(?:global_|world_)?rank|r|w|p|tr|member|trainer|replica|learner|proc|process|wkr|wk|worker|"
    r"index|idx|peer"
)
_OTHER = re.compile(
    r"step|iter|iteration|epoch|batch|update|tick|line|layer|p?pid|tid|port|try|retry|attempt|of|"
    r"status|code|signal|exit|errno|error|gpus?|device|card|cuda|hca|node|host|local_rank|x|e|i|"
    r"lineno|levelno|exitcode|err|opcode|len|job|jobid|size|files?|block|fold|stage|thread|threadid|"
    r"process(?:_?id)?|[tpdce]p(?:_rank)?|py|cc?|cpp|cu|hh?|hpp|rs|go|java"
)
_MARK = re.compile(r" ?[\[(/.#-]")
_CLOSE = re.compile(r" ?[\]):>|]")
_INDEX = {"index", "idx"}  # in a sentence that of a list
_EXCEPTION = re.compile(r"\b\w+(?:Error|Exception): ")
_BEGIN = -1  # the place of a number that ends a prefix at the begin of a line
_HEAD = 64  # characters at the begin of a line that may name its writer
_OBJECT = 400  # the same of a JSON object, whose keys stand in any order
_LEAST_PID = 300
_MOST_FOLLOWING = 40


class Members:
    """The members of a job, as its first and last lines show them.

    Args:
        scan: The log.

    Attributes:
        numbers: Ranks that the log names.
    """

    def __init__(self, scan: ScanResult) -> None:
        self._sample = scan.sample()
        most = scan.world_size or MOST_RANKS
        seen: dict[str, list[int]] = {}
        known: dict[str, set[int]] = {}
        shown: set[str] = set()
        for _, text in self._sample:
            numbers = [each for each in _numbers(text) if each[2] < most]
            for label, (place, number) in _head(text, numbers).items():
                values, of_label = seen.setdefault(label, []), known.setdefault(label, set())
                has_other = any(n in of_label for _, _, n in numbers if n != number)
                if has_other or place == _BEGIN or (values and number < values[-1]):
                    shown.add(label)
                values.append(number)
                of_label.add(number)
        # Hosts and process ids stand there, too: ranks are more than those and lower than these.
        self._labels = {
            label: (
                _MEMBER.fullmatch(label) is not None,
                len(values),
                len(set(values)),
                -max(values),
            )
            for label, values in seen.items()
            if label in shown and len(set(values)) > 1
        }
        self.numbers = set(scan.ranks)
        if self._labels:
            self.numbers.update(seen[max(self._labels, key=self._labels.__getitem__)])

    def member_of(self, text: str, *, is_report: bool) -> int | None:
        """Return the member that a line is of: its writer, or the only one that it speaks of.

        Args:
            text: The line.
            is_report: Others report such faults: whom the line speaks of comes before its writer.
        """
        writer = self._writer(text)
        named = set() if _EXCEPTION.search(text) else self._named(text)
        named -= {writer if is_report else None}
        return named.pop() if len(named) == 1 and (is_report or writer is None) else writer

    def writers_like(self, text: str) -> set[int]:
        """Return the members that wrote a line that differs from this one in numbers alone."""
        alike = letters(text)
        writers = {self._writer(other) for _, other in self._sample if letters(other) == alike}
        return {writer for writer in writers if writer is not None}

    def blamed(self, line: int) -> int | None:
        """Return the member that most of the others speak of after a line, or None."""
        votes: Counter[int] = Counter()
        for _, text in [each for each in self._sample if each[0] > line][:_MOST_FOLLOWING]:
            rank = LineReader().read(text.encode()).rank
            writer = self._writer(text) if rank is None else rank
            others = self._named(text) - {writer}
            if writer is not None and len(others) == 1:
                votes.update(others)
        first, second = [*votes.most_common(2), (0, 0), (0, 1)][:2]
        return first[0] if first[1] > max(1, second[1]) else None

    def _writer(self, text: str) -> int | None:
        heads = _head(text, _numbers(text))
        found = [(self._labels[k], -at, n) for k, (at, n) in heads.items() if k in self._labels]
        return max(found)[2] if found else None

    def _named(self, text: str) -> set[int]:
        named = named_members(text)
        if named and not self._labels:
            return named
        return {n for _, _, n in _numbers(text) if n in self.numbers & (named or self.numbers)}


def named_members(text: str) -> set[int]:
    """Return the numbers in a text that stand after a word by which members are called."""
    return {
        number
        for _, label, number in _numbers(text)
        if _MEMBER.fullmatch(label) and label not in _INDEX
    }


def _numbers(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield place, label and value of the numbers that may be a member's."""
    for match in _NUMBER.finditer(text):
        word, mark, at = match[1].lower(), match[2], match.start()
        if (
            _OTHER.fullmatch(word)
            # A host: `dgx17`, `gpu-a-17`, `dgx-17:`.
            or (word and mark in {"", "-"} and _MEMBER.fullmatch(word) is None)
            or (mark == "-" and text[:at].endswith("-"))
            # A process: `python[4321]:`.
            or (word and mark == "[" and int(match[3]) >= _LEAST_PID)
            # A device of the node.
            or text.startswith(" NCCL ", match.end() + 1)
        ):
            continue
        place = _BEGIN if at <= 1 and _CLOSE.match(text, match.end()) else at
        yield place, word or ("" if at else "^"), int(match[3])
        if _MARK.fullmatch(mark):
            yield place, mark, int(match[3])


def _head(text: str, numbers: Iterable[tuple[int, str, int]]) -> dict[str, tuple[int, int]]:
    """Return label -> (place, number) of labels at a line's head, which may name its writer."""
    end = _OBJECT if text.startswith("{") else _HEAD
    found: dict[str, tuple[int, int]] = {}
    for place, label, number in numbers:
        if label and place < end:
            found.setdefault(label, (place, number))
    return found
