# SPDX-License-Identifier: Apache-2.0
"""Exchange the keys of all living ranks through a torch `Store`, with four operations per rank.

Every rank appends one entry and adds to a counter. The rank that counts to the number of ranks
writes one record, with each distinct list of keys once and its ranks; every rank reads that record
only. If that rank dies in between, a waiting rank writes the record.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any

from nvidia_resiliency_ext.inprocess._store.endpoint import ForeignValueError, require_json
from nvidia_resiliency_ext.inprocess.exception import TimeoutError as RestartTimeoutError
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.inprocess.utils import format_rank_set
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks, parse_ranks

Groups = list[tuple[tuple[str, ...], list[int]]]

MAX_ENTRY_BYTES = 4096
_ENTRY = re.compile(r"([0-9]{1,9}) (\[.*\])", re.ASCII)


def entry(rank: int, keys: Sequence[str]) -> str:
    """Return the line of one rank; a ValueError if it is longer than `MAX_ENTRY_BYTES`."""
    line = f"{rank} {json.dumps(list(keys))}\n"  # ASCII, and without newlines in strings
    if len(line) > MAX_ENTRY_BYTES:
        raise ValueError(
            f"the keys of rank {rank} take {len(line)} bytes, at most {MAX_ENTRY_BYTES} may be"
        )
    return line


def parse(where: str, text: str) -> dict[int, str]:
    """Return each rank's keys in the list, as JSON; the first entry of a rank counts."""
    found: dict[int, str] = {}
    for line in text.split("\n")[:-1]:
        match = _ENTRY.fullmatch(line)
        if match is None or len(line) >= MAX_ENTRY_BYTES:
            raise ForeignValueError(where, line)
        found.setdefault(int(match[1]), match[2])
    return found


def compose(where: str, found: Mapping[int, str], ranks: Iterable[int]) -> str:
    """Return the record of these ranks, which must all be found."""
    by_keys: dict[str, list[int]] = {}
    for rank in ranks:
        by_keys.setdefault(found[rank], []).append(rank)
    groups = [
        (_keys(where, require_json(where, text)), format_ranks(group))
        for text, group in by_keys.items()
    ]
    return json.dumps(groups, separators=(",", ":"))


def read(where: str, text: str, ranks: Sequence[int]) -> Groups:
    """Return keys and the ranks that have them, from a record of exactly these ranks."""
    groups: Groups = []
    left = len(ranks)
    try:
        for keys, members in require_json(where, text):
            group = parse_ranks(members)
            groups.append((_keys(where, keys), group))
            left -= len(group)
            if left < 0:
                break  # a record that claims more ranks than there are is not expanded
    except (TypeError, ValueError, AttributeError):
        raise ForeignValueError(where, text) from None
    if sorted(chain.from_iterable(group for _, group in groups)) != list(ranks):
        raise ForeignValueError(where, text)
    return groups


def _keys(where: str, keys: Any) -> tuple[str, ...]:
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise ForeignValueError(where, repr(keys))
    return tuple(keys)


_LOOK_EVERY_S = 5.0

# torch's store closes the connection on a value above 8 MiB, but a list may grow beyond.
_MAX_RECORD_BYTES = 4 << 20
_READ_THE_LIST = "list"
_OPERATIONS = ("append", "add", "set", "get", "wait")


@dataclass
class _Pass:
    """Names of the exchanges that one rank made through one store."""

    count: int = 0
    iteration: int | None = None
    names: list[str] = field(default_factory=list)

    def begin(self, iteration: int) -> tuple[str, list[str]]:
        """Return the next exchange's name, and names that no rank reads any more."""
        former: list[str] = []
        if iteration != self.iteration:
            # Everybody was through the last restart's gatherings before this restart began.
            self.iteration, former, self.names = iteration, self.names, []
        name = f"rank_assignment/{iteration}/{self.count}"
        self.count += 1
        self.names.append(name)
        return name, former


# Global state: passes by store and initial rank. All ranks do the same gatherings in the same
# order through the store of a call, so equal counts name the same gathering; several instances in
# one Compose, which do not know of each other, stay apart. Goes when the store goes.
_passes: weakref.WeakKeyDictionary[Any, dict[int, _Pass]] = weakref.WeakKeyDictionary()


def can_gather(store: object) -> bool:
    """Return whether this is a store with torch's operations, and not a stand-in."""
    return all(callable(getattr(type(store), name, None)) for name in _OPERATIONS)


def gather(
    store: Any, caller: State, keys: Sequence[str], ranks: Sequence[int], timeout: timedelta
) -> Groups:
    """Return the keys of all ranks, and which have them; a TimeoutError names missing ranks."""
    assert caller.rank is not None
    assert caller.initial_rank is not None
    line = entry(caller.rank, keys)
    if len(ranks) == 1:
        return [(tuple(keys), [caller.rank])]
    passes = _passes.setdefault(store, {})
    name, former = passes.setdefault(caller.initial_rank, _Pass()).begin(caller.iteration)
    deadline = time.monotonic() + timeout.total_seconds()
    gathering = _Gathering(store, name, ranks)
    store.append(gathering.entries, line)
    if store.add(gathering.counter, 1) >= len(ranks) and gathering.conclude():
        _delete(store, former)
    while not gathering.wait(deadline):
        if not gathering.conclude() and time.monotonic() >= deadline:
            raise RestartTimeoutError(
                f"ranks {format_rank_set(gathering.missing())} have not sent their keys within"
                f" {timeout.total_seconds():g} s"
            )
    return gathering.read()


class _Gathering:
    def __init__(self, store: Any, name: str, ranks: Sequence[int]) -> None:
        self._store = store
        self._ranks = ranks
        self.entries, self.counter, self._record = _keys_of(name)

    def conclude(self) -> bool:
        """Write the record if all ranks have entries; return whether they have."""
        found = self._found()
        if not all(rank in found for rank in self._ranks):
            return False
        record = compose(self.entries, found, self._ranks)
        is_short = len(record) <= _MAX_RECORD_BYTES
        self._store.set(self._record, record if is_short else _READ_THE_LIST)
        return True

    def missing(self) -> set[int]:
        return set(self._ranks) - self._found().keys()

    def wait(self, deadline: float) -> bool:
        """Wait some seconds for the record; return whether it is there."""
        seconds = max(0.001, min(_LOOK_EVERY_S, deadline - time.monotonic()))
        try:
            self._store.wait([self._record], timedelta(seconds=seconds))
        except RuntimeError:  # expired, or the store is lost: then the next operation says so
            return False
        return True

    def read(self) -> Groups:
        text = self._text(self._record)
        if text == _READ_THE_LIST:
            text = compose(self.entries, self._found(), self._ranks)
        return read(self._record, text, self._ranks)

    def _found(self) -> dict[int, str]:
        return parse(self.entries, self._text(self.entries))

    def _text(self, key: str) -> str:
        value: bytes = self._store.get(key)
        try:
            return value.decode("ascii")
        except UnicodeDecodeError:
            raise ForeignValueError(key, repr(value[:100])) from None


def _keys_of(name: str) -> tuple[str, str, str]:
    return f"{name}/entries", f"{name}/count", f"{name}/record"


def _delete(store: Any, names: Sequence[str]) -> None:
    for name in names:
        for key in _keys_of(name):
            # A store that cannot delete keeps them; nothing depends on it.
            with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
                store.delete_key(key)
