# SPDX-License-Identifier: Apache-2.0
"""The server's queue: bytes in memory, the threads that write, and what is done when they have."""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import os
import re
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import datetime, timezone
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from nvidia_resiliency_ext.shared_utils.clock import Clock

    from .target import Source, Target


_FILE_SHARE = 8
_TROUBLED_SHARE = 2


class Verdict(enum.Enum):
    """What becomes of a chunk."""

    ADMIT = "admit"
    WAIT = "wait"
    REFUSE = "refuse"


class Budget:
    """Bytes that wait for their file.

    One file may hold an eighth, and all files that cannot be written at present a half together, so
    that the others always find space.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.peak_bytes = 0
        self.file_limit_bytes = max(1, limit_bytes // _FILE_SHARE)
        self.troubled_limit_bytes = limit_bytes // _TROUBLED_SHARE

    def evaluate(
        self, size: int, file_held: int, *, is_failing: bool = False, troubled_held: int = 0
    ) -> Verdict:
        """Return what to do with a chunk now.

        Args:
            size: Its bytes.
            file_held: What waits for the same file.
            is_failing: Writing that file gives errors: then waiting would be for nobody knows how
                long, and the sender, who still has the chunk, is told.
            troubled_held: What waits for this and all other files that fail or hang; 0 when this
                file does neither.
        """
        if size > self.limit_bytes:
            return Verdict.REFUSE
        over_file = file_held > 0 and file_held + size > self.file_limit_bytes
        over_troubled = troubled_held > 0 and troubled_held + size > self.troubled_limit_bytes
        if over_file or over_troubled:
            return Verdict.REFUSE if is_failing else Verdict.WAIT
        has_space = self.held_bytes + size <= self.limit_bytes
        return Verdict.ADMIT if has_space else Verdict.WAIT

    def take(self, size: int) -> None:
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def give(self, size: int) -> None:
        self.held_bytes -= size


@dataclass(frozen=True, slots=True)
class FunnelStats:
    """What the funnel did so far; all but the counts of files only grow or are momentary."""

    received_bytes: int = 0
    received_chunks: int = 0
    written_bytes: int = 0
    repeated_chunks: int = 0
    lost_bytes: int = 0
    buffered_bytes: int = 0
    buffered_bytes_peak: int = 0
    files: int = 0
    open_files: int = 0
    failing_files: int = 0


class FunnelState:
    """What all parts of a funnel share. `lock` guards every other field and what is in it.

    Attributes:
        settled: Notified when chunks were written, let in or refused, and when no writer works.
        targets: All files, the one that was not written for longest first.
        working: Those that wait for a writer or are with one.
        troubled: Those that cannot be written at present.
    """

    def __init__(self, max_buffered_bytes: int) -> None:
        self.lock = threading.Lock()
        self.settled = threading.Condition(self.lock)
        self.budget = Budget(max_buffered_bytes)
        self.targets: OrderedDict[str, Target] = OrderedDict()
        self.open: OrderedDict[Target, None] = OrderedDict()
        self.working: set[Target] = set()
        self.troubled: set[Target] = set()
        self.is_flushing = False
        self.is_closed = False
        self.received_bytes = 0
        self.received_chunks = 0
        self.written_bytes = 0
        self.repeated = 0
        self.lost_bytes = 0

    def stats(self) -> FunnelStats:
        with self.lock:
            return FunnelStats(
                received_bytes=self.received_bytes,
                received_chunks=self.received_chunks,
                written_bytes=self.written_bytes,
                repeated_chunks=self.repeated,
                lost_bytes=self.lost_bytes,
                buffered_bytes=self.budget.held_bytes,
                buffered_bytes_peak=self.budget.peak_bytes,
                files=len(self.targets),
                open_files=len(self.open),
                failing_files=sum(t.error is not None for t in self.troubled),
            )


def notify(sources: Iterable[Source]) -> None:
    """Tell connections that their sources moved; with no lock held."""
    for source in sources:
        source.connection.progress(source)


_logger = logging.getLogger("LogAggregationServer")


class Writers:
    """Threads that serve targets, each target by one of them at a time.

    There are two as long as they come along; `relieve` adds one when all hang. They are daemons:
    one that a dead network file system holds must not keep the program from ending.
    """

    _USUAL = 2

    def __init__(self, serve: Callable[[Target], None], most: int) -> None:
        self._serve = serve
        self._most = max(self._USUAL, most)
        # Guards all below.
        self._changed = threading.Condition()
        self._ready: deque[Target] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_closed = False

    def submit(self, target: Target) -> None:
        """Have a target served; the caller makes sure that it is not being served already."""
        with self._changed:
            self._ready.append(target)
            if self._idle:
                self._changed.notify()
            elif len(self._threads) < self._USUAL:
                self._start()

    def relieve(self) -> None:
        """Start another thread if something is ready and nobody is free."""
        with self._changed:
            if self._ready and not self._idle and len(self._threads) < self._most:
                self._start()

    def close(self, timeout_s: float) -> bool:
        """End the threads once nothing is ready; tell whether all have ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        name = f"nvrx-funnel-writer-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ready:
                    if self._is_closed:
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                target = self._ready.popleft()
            try:
                self._serve(target)
            except Exception:
                # The boundary of the thread: one target's bug must not stop all others.
                _logger.exception("writing %r failed in an unforeseen way", target.path)


class Ticker:
    """A thread that calls functions at their time; they must be short."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Guards the heap.
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="nvrx-funnel-ticker", daemon=True)
        self._thread.start()

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._heap, (when, next(self._order), function))
            if self._heap[0][0] == when:
                self._changed.notify()

    def close(self) -> None:
        """End the thread; what was due later is not called."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed:
                    timeout = self._heap[0][0] - self._clock.monotonic() if self._heap else None
                    if timeout is not None and timeout <= 0:
                        break
                    self._changed.wait(timeout)
                if self._is_closed:
                    return
                function = heapq.heappop(self._heap)[2]
            try:
                function()
            except Exception:
                # The boundary of the thread: later calls must still come.
                _logger.exception("a timed call failed in an unforeseen way")


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


class Completion:
    """The files of cycles, and the announcement of those that look complete.

    All but `announce` is called with the funnel's lock held.

    Args:
        idle_s: How long nothing must have come for a file.
    """

    def __init__(self, idle_s: float, state: FunnelState, ticker: Ticker, clock: Clock) -> None:
        self._idle_s = idle_s
        self._state = state
        self._ticker = ticker
        self._clock = clock
        self._families: dict[str, dict[str, CycleFile]] = {}
        self._files: dict[str, CycleFile] = {}
        self._check_at = float("inf")

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
        # It may be the successor that others were waiting for.
        self._check_at_time(now)
        return made

    def take_complete(self, now: float, *, at_end: bool = False) -> list[CycleFile]:
        """Return the files that look complete by now, each once."""
        found = []
        for family in self._families.values():
            newest = _newest(family)
            for file in sorted(family.values(), key=attrgetter("number")):
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

    def arrived(self, file: CycleFile, now: float) -> None:
        file.arrived_at = now
        if file.is_complete:
            file.is_complete = False
            _logger.warning(
                "Late chunk after heuristic cycle log complete: file_path=%s", file.path
            )

    def check_after(self, arrived_at: float) -> None:
        """Look again once the idle time since a chunk has passed."""
        self._check_at_time(arrived_at + self._idle_s)

    def announce(self, *, at_end: bool = False) -> None:
        """Announce what looks complete; at the end that is all that was written."""
        with self._state.lock:
            self._check_at = float("inf")
            done = self.take_complete(self._clock.monotonic(), at_end=at_end)
            if not at_end:
                self._check_at_time(self.next_check())
        for file in done:
            _logger.info(
                "Heuristic cycle log complete: file_path=%s last_flush_time=%s",
                file.path,
                _iso(file.flushed_at or 0.0),
            )

    def _check_at_time(self, when: float) -> None:
        if when < self._check_at:
            self._check_at = when
            self._ticker.call_at(when, self.announce)


def _iso(wall_s: float) -> str:
    moment = datetime.fromtimestamp(wall_s, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _newest(family: Mapping[str, CycleFile]) -> int:
    return max(file.number for file in family.values())
