# SPDX-License-Identifier: Apache-2.0
"""The logs of cycles, and the announcement of those that look complete."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from operator import attrgetter

_logger = logging.getLogger("LogAggregationServer")

_CYCLE = re.compile(r"_cycle(\d+)(?!\d)", re.ASCII)
_MAX_DIGITS = 18
_MAX_REMEMBERED = 10_000


@dataclass(slots=True, eq=False)
class CycleFile:
    """One cycle's log."""

    path: str
    family: str
    number: int
    arrived_at: float
    is_whole: bool = False  # nothing waits for the file, and it was written
    flushed_at: float = 0.0  # wall time of the write that made it so
    is_complete: bool = False  # the line that says so was issued and nothing came since


class Completion:
    """The files of cycles. All but `announce` is called with the lock held."""

    def __init__(
        self,
        idle_s: float,
        lock: threading.Lock,
        call_at: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._idle_s = idle_s
        self._lock = lock
        self._call_at = call_at
        self._files: dict[str, CycleFile] = {}
        self._check_at = math.inf

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
        self._forget_old()
        made = self._files[path] = CycleFile(path, family, int(match[1]), now)
        # It may be the successor that others were waiting for.
        self._check_no_later_than(now)
        return made

    def arrived(self, file: CycleFile, now: float) -> None:
        file.arrived_at = now
        if file.is_complete:
            file.is_complete = False
            text = "Late chunk after heuristic cycle log complete: file_path=%s"
            _logger.warning(text, file.path)

    def written(self, file: CycleFile) -> None:
        """Note that all is written; look again once the idle time since then has passed."""
        file.is_whole, file.flushed_at = True, time.time()
        self._check_no_later_than(file.arrived_at + self._idle_s)

    def take_complete(self, now: float, *, at_end: bool = False) -> tuple[list[CycleFile], float]:
        """Return the files that look complete by now, each once, and when another one can.

        Such a file has all its bytes and, before the end, a successor.
        """
        newest: dict[str, int] = {}
        for file in self._files.values():
            newest[file.family] = max(file.number, newest.get(file.family, 0))
        found: list[CycleFile] = []
        next_at = math.inf
        for file in self._files.values():
            is_old = at_end or file.number < newest[file.family]
            if not is_old or not file.is_whole or file.is_complete:
                continue
            if at_end or now - file.arrived_at >= self._idle_s:
                file.is_complete = True
                found.append(file)
            else:
                next_at = min(next_at, file.arrived_at + self._idle_s)
        return sorted(found, key=attrgetter("family", "number")), next_at

    def announce(self, *, at_end: bool = False) -> None:
        """Announce cycle logs that look complete; at the end all that were written."""
        with self._lock:
            self._check_at = math.inf
            done, next_at = self.take_complete(time.monotonic(), at_end=at_end)
            self._check_no_later_than(next_at)
        for file in done:
            moment = datetime.fromtimestamp(file.flushed_at, timezone.utc)
            shown = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            text = "Heuristic cycle log complete: file_path=%s last_flush_time=%s"
            _logger.info(text, file.path, shown)

    def _forget_old(self) -> None:
        if len(self._files) >= _MAX_REMEMBERED:
            done = [file for file in self._files.values() if file.is_complete]
            for file in (done or list(self._files.values()))[: _MAX_REMEMBERED // 10]:
                del self._files[file.path]

    def _check_no_later_than(self, when: float) -> None:
        if when < self._check_at:
            self._check_at = when
            self._call_at(when, self.announce)
