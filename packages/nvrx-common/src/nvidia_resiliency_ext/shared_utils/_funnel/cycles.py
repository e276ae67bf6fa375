# SPDX-License-Identifier: Apache-2.0
"""Owns which log of a cycle looks complete; pure, time is an argument.

A file whose name has `_cycle<digits>` is one cycle of the family named by the rest of its path. It
looks complete when a later cycle of the family exists and nothing came for it for a while.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CycleFile", "Cycles"]

_CYCLE = re.compile(r"_cycle(\d+)(?!\d)", re.ASCII)
_MAX_DIGITS = 18
_MAX_REMEMBERED = 10_000


@dataclass(slots=True, eq=False)
class CycleFile:
    """One cycle's log.

    Attributes:
        unwritten: Bytes that have arrived and are not in the file.
        flushed_at: Wall time of the last write; `None` before the first.
        is_complete: The line that says so was issued and nothing came since.
    """

    path: str
    family: str
    number: int
    arrived_at: float
    unwritten: int = 0
    flushed_at: float | None = None
    is_complete: bool = False


class Cycles:
    """All files of cycles that a server has seen; one thread at a time.

    Args:
        idle_s: How long nothing must have come for a file.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._families: dict[str, dict[str, CycleFile]] = {}
        self._files: dict[str, CycleFile] = {}

    def track(self, path: str, now: float) -> CycleFile | None:
        """Return the record of a file that belongs to a cycle, a new one at first sight."""
        known = self._files.get(path)
        if known is not None:
            return known
        folder, name = os.path.split(path)
        match = _CYCLE.search(name)
        if match is None or len(match[1]) > _MAX_DIGITS:
            return None
        family = os.path.join(folder, name[: match.start()] + name[match.end() :])
        made = CycleFile(path, family, int(match[1]), now)
        self._forget_old()
        self._files[path] = made
        self._families.setdefault(family, {})[path] = made
        return made

    def take_complete(self, now: float, *, at_end: bool = False) -> list[CycleFile]:
        """Return the files that look complete by now, each once.

        Args:
            now: The monotonic time.
            at_end: Nothing will come any more: the newest cycle counts too, and no time must pass.
        """
        found = []
        for family in self._families.values():
            newest = _newest(family)
            for file in sorted(family.values(), key=_number_of):
                if (file.number < newest or at_end) and self._is_ripe(file, now, at_end=at_end):
                    file.is_complete = True
                    found.append(file)
        return found

    def next_check(self) -> float:
        """Return when a file can look complete at the earliest; infinite if none can."""
        times = [
            file.arrived_at + self._idle_s
            for family in self._families.values()
            for newest in (_newest(family),)
            for file in family.values()
            if not file.is_complete and not file.unwritten and file.flushed_at is not None
            and file.number < newest
        ]  # fmt: skip
        return min(times, default=float("inf"))

    def _is_ripe(self, file: CycleFile, now: float, *, at_end: bool) -> bool:
        if file.is_complete or file.unwritten or file.flushed_at is None:
            return False
        return at_end or now - file.arrived_at >= self._idle_s

    def _forget_old(self) -> None:
        if len(self._files) < _MAX_REMEMBERED:
            return
        done = [file for file in self._files.values() if file.is_complete]
        for file in (done or list(self._files.values()))[: _MAX_REMEMBERED // 10]:
            del self._files[file.path]
            family = self._families[file.family]
            del family[file.path]
            if not family:
                del self._families[file.family]


def _newest(family: Mapping[str, CycleFile]) -> int:
    return max(file.number for file in family.values())


def _number_of(file: CycleFile) -> int:
    return file.number
