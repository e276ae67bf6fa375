# SPDX-License-Identifier: Apache-2.0
"""The texts with which ranks tell each other their keys: a list of entries, and a short record.

Each rank adds one entry, `<rank> <keys as JSON>` and a newline. The record says the same of all
ranks, each distinct list of keys once, ranks as runs: for 8 ranks per node it is a tenth of the
list, and it is what every rank reads. Whatever is neither raises `ForeignRollError`.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.inprocess.exception import RestartError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Runs = list[tuple[tuple[str, ...], range]]

MAX_ENTRY_BYTES = 4096
_SHOWN = 100
_MAX_DIGITS = 9
_ENTRY = re.compile(rf"([0-9]{{1,{_MAX_DIGITS}}}) (\[.*\])", re.ASCII)


class ForeignRollError(RestartError):
    """A value in the store is not what a rank of this job wrote.

    Args:
        key: Where it stands.
        value: What stands there.
    """

    def __init__(self, key: str, value: str) -> None:
        super().__init__(key, value)
        self.key = key
        self.value = value

    def __str__(self) -> str:
        shown = self.value if len(self.value) <= _SHOWN else f"{self.value[:_SHOWN]}..."
        return f"{self.key!r} in the store holds {shown!r}, which no rank of this job wrote"


def entry(rank: int, keys: Sequence[str]) -> str:
    """Return the line of one rank.

    Raises:
        ValueError: It is longer than `MAX_ENTRY_BYTES`.
    """
    line = f"{rank} {json.dumps(list(keys))}\n"  # ASCII, and without newlines in strings
    if len(line) > MAX_ENTRY_BYTES:
        raise ValueError(
            f"the keys of rank {rank} take {len(line)} bytes, at most {MAX_ENTRY_BYTES} may be"
        )
    return line


def parse(where: str, text: str) -> dict[int, str]:
    """Return by rank what the list says of its keys, still as JSON; the first entry counts.

    Raises:
        ForeignRollError: A line is no entry.
    """
    found: dict[int, str] = {}
    for line in text.split("\n")[:-1]:
        match = _ENTRY.fullmatch(line)
        if match is None or len(line) >= MAX_ENTRY_BYTES:
            raise ForeignRollError(where, line)
        found.setdefault(int(match[1]), match[2])
    return found


def compose(where: str, found: Mapping[int, str], ranks: Iterable[int]) -> str:
    """Return the record of these ranks, which must all be found.

    Raises:
        ForeignRollError: Somebody's keys are not a list of strings.
    """
    indices: dict[str, int] = {}
    runs: list[list[int]] = []
    for rank in ranks:
        index = indices.setdefault(found[rank], len(indices))
        last = runs[-1] if runs else None
        if last and last[2] == index and last[0] + last[1] == rank:
            last[1] += 1
        else:
            runs.append([rank, 1, index])
    keys = [_keys(where, text) for text in indices]
    return json.dumps({"keys": keys, "runs": runs}, separators=(",", ":"))


def read(where: str, text: str, ranks: Sequence[int]) -> Runs:
    """Return keys and the ranks that have them, ascending, from a record of exactly these ranks.

    Raises:
        ForeignRollError: It is no such record.
    """
    record = _loads(where, text)
    try:
        keys = [tuple(each) for each in record["keys"]]
        runs = [
            (keys[_natural(index)], range(_natural(start), _natural(start) + _natural(count)))
            for start, count, index in record["runs"]
        ]
    except (TypeError, ValueError, KeyError, IndexError):
        raise ForeignRollError(where, text) from None
    if not all(type(key) is str for key in chain.from_iterable(keys)):
        raise ForeignRollError(where, text)
    # Sizes first: a record that claims more ranks than there are is not expanded.
    if sum(len(run) for _, run in runs) != len(ranks):
        raise ForeignRollError(where, text)
    if list(chain.from_iterable(run for _, run in runs)) != list(ranks):
        raise ForeignRollError(where, text)
    return runs


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 10**_MAX_DIGITS:
        raise ValueError(value)
    return value


def _keys(where: str, text: str) -> list[str]:
    keys = _loads(where, text)
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise ForeignRollError(where, text)
    return keys


def _loads(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ForeignRollError(where, text) from None
