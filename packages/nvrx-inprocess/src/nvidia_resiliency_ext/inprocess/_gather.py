# SPDX-License-Identifier: Apache-2.0
"""All living ranks tell each other their keys through a torch `Store`, in four operations each.

Every rank appends its entry and counts; whoever counts to the number of ranks writes one short
record, and that is all that anybody reads. If that rank dies in between, those who wait write it.
What a former assignment has left in the store is deleted, so it does not grow with restarts.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ._ranks import roll
from .exception import TimeoutError as RestartTimeoutError
from .utils import format_rank_set

if TYPE_CHECKING:
    from ._ranks.roll import Runs

_LOOK_EVERY_S = 5.0
# torch's store closes the connection on a value above 8 MiB, but a list may grow beyond.
_MAX_RECORD_BYTES = 4 << 20
_READ_THE_LIST = "list"
_OPERATIONS = ("append", "add", "set", "get", "wait")


@dataclass
class _Pass:
    """What one rank has gathered through one store."""

    count: int = 0
    iteration: int | None = None
    names: list[str] = field(default_factory=list)
    former: list[str] = field(default_factory=list)

    def begin(self, iteration: int) -> tuple[str, list[str]]:
        """Return the name of the next gathering, and the names that nobody reads any more."""
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
    """Tell whether this is a store with torch's operations, and not a stand-in."""
    return all(callable(getattr(type(store), name, None)) for name in _OPERATIONS)


@dataclass(frozen=True)
class Caller:
    """The rank that gathers.

    Attributes:
        rank: Its present number.
        initial_rank: Its number at the call.
        iteration: Of its state.
    """

    rank: int
    initial_rank: int
    iteration: int


def gather(
    store: Any, caller: Caller, keys: Sequence[str], ranks: Sequence[int], timeout: timedelta
) -> Runs:
    """Return the keys of all ranks, and which ranks have them, ascending by rank.

    Args:
        store: Of the call; without barriers of its own.
        caller: Who calls.
        keys: What the caller tells.
        ranks: All who call this, ascending.
        timeout: How long the others may take.

    Raises:
        exception.TimeoutError: Some have not called in time; the message names them.
        ForeignRollError: Something in the store was not written by this.
        ValueError: The keys are too long.
    """
    entry = roll.entry(caller.rank, keys)
    if len(ranks) == 1:
        return [(tuple(keys), range(caller.rank, caller.rank + 1))]
    name, former = (
        _passes.setdefault(store, {})
        .setdefault(caller.initial_rank, _Pass())
        .begin(caller.iteration)
    )
    deadline = time.monotonic() + timeout.total_seconds()
    gathering = _Gathering(store, name, ranks)
    store.append(gathering.entries, entry)
    if store.add(gathering.counter, 1) >= len(ranks) and gathering.conclude():
        _delete(store, former)
    while not gathering.wait(deadline):
        if not gathering.conclude() and time.monotonic() >= deadline:
            raise RestartTimeoutError(
                f"ranks {format_rank_set(gathering.missing())} have not told their keys within"
                f" {timeout.total_seconds():g} s"
            )
    return gathering.read()


class _Gathering:
    def __init__(self, store: Any, name: str, ranks: Sequence[int]) -> None:
        self._store = store
        self._ranks = ranks
        self.entries, self.counter, self._record = _keys_of(name)

    def conclude(self) -> bool:
        """Write the record if everybody has told; tell whether that is so."""
        found = self._found()
        if not all(rank in found for rank in self._ranks):
            return False
        record = roll.compose(self.entries, found, self._ranks)
        is_short = len(record) <= _MAX_RECORD_BYTES
        self._store.set(self._record, record if is_short else _READ_THE_LIST)
        return True

    def missing(self) -> set[int]:
        return set(self._ranks) - self._found().keys()

    def wait(self, deadline: float) -> bool:
        """Wait for the record, though not for long; tell whether it is there."""
        seconds = max(0.001, min(_LOOK_EVERY_S, deadline - time.monotonic()))
        try:
            self._store.wait([self._record], timedelta(seconds=seconds))
        except RuntimeError:  # expired, or the store is lost: then the next operation says so
            return False
        return True

    def read(self) -> Runs:
        text = self._text(self._record)
        if text == _READ_THE_LIST:
            text = roll.compose(self.entries, self._found(), self._ranks)
        return roll.read(self._record, text, self._ranks)

    def _found(self) -> dict[int, str]:
        return roll.parse(self.entries, self._text(self.entries))

    def _text(self, key: str) -> str:
        value: bytes = self._store.get(key)
        try:
            return value.decode("ascii")
        except UnicodeDecodeError:
            raise roll.ForeignRollError(key, repr(value[:100])) from None


def _keys_of(name: str) -> tuple[str, str, str]:
    return f"{name}/entries", f"{name}/count", f"{name}/record"


def _delete(store: Any, names: Sequence[str]) -> None:
    for name in names:
        for key in _keys_of(name):
            # A store that cannot delete keeps them; nothing depends on it.
            with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
                store.delete_key(key)
