# SPDX-License-Identifier: Apache-2.0
"""Values that all parts of the client share: limits, delays, notices."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from typing import NamedTuple

BATCH_BYTES = 64 * 1024  # A batch of this size is sent without waiting for its deadline

MAX_LINE_BYTES = 1024 * 1024  # A longer line goes on in a new line


class Chunk(NamedTuple):
    """Whole lines of one target, numbered; it never changes."""

    seq: int
    data: bytes
    lines: int


class Gap(NamedTuple):
    """Lines that were given up in one place; `seq` is the number of the last chunk among them."""

    seq: int = 0
    lines: int = 0
    size: int = 0

    def joined(self, later: Gap) -> Gap:
        """Return this gap and one that follows it directly as one."""
        return Gap(max(self.seq, later.seq), self.lines + later.lines, self.size + later.size)


def notice_of(gap: Gap) -> Chunk:
    """Return the line that stands in the log where lines were given up."""
    text = f"[nvrx] dropped {gap.lines} lines ({gap.size} bytes)\n"
    return Chunk(gap.seq, text.encode(), 1)


def cut_at(buffer: bytearray) -> int:
    """Return how many of the first bytes are whole lines; an endless line counts as one."""
    end = buffer.rfind(b"\n") + 1
    return end or (MAX_LINE_BYTES if len(buffer) >= MAX_LINE_BYTES else 0)


logger = logging.getLogger("nvrx")

_MOST_KEPT = 100


class Notices:
    """Lines for people, of all targets of one client; for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, str]] = deque(maxlen=_MOST_KEPT)
        self._state = ""

    def add(self, level: int, line: str) -> None:
        """Keep a line until the next `emit`."""
        self._kept.append((level, line))

    def state(self, name: str, level: int, line: str) -> None:
        """Keep a line about a state of the server, unless it was the last one logged."""
        with self._lock:
            if name != self._state:
                self._state = name
                self.add(level, line)

    def is_in_trouble(self) -> bool:
        return self._state not in {"", "up", "plain"}

    def emit(self) -> None:
        """Log the lines that were kept; the caller holds no lock."""
        while self._kept:
            try:
                level, line = self._kept.popleft()
            except IndexError:
                return
            logger.log(level, "log funnel: %s", line)


BATCH_DELAY_S = 0.02  # batches that are not full leave at most this often

SLOW_RETRY_S = 30.0  # between tries that only a person can make succeed

_FIRST_S = 0.1
_LONGEST_S = 5.0


class Backoff:
    """Delays that double up to 5 s, each drawn between 0 and all of it: clients spread out."""

    def __init__(self) -> None:
        self._draw = random.Random()  # noqa: S311 - spreads load, guards nothing
        self.reset()

    def reset(self) -> None:
        self._longest_s = _FIRST_S

    def next_s(self) -> float:
        """Return the seconds to wait after one more failure."""
        longest_s = self._longest_s
        self._longest_s = min(_LONGEST_S, 2.0 * longest_s)
        return self._draw.uniform(0.0, longest_s)

    def slow_s(self) -> float:
        """Return the seconds to wait where the cause will not go away by itself."""
        return SLOW_RETRY_S * self._draw.uniform(0.75, 1.25)


_LARGEST_WINDOW_BYTES = 8 * 1024 * 1024
_WINDOW_SHARE = 4
RESERVE_BYTES = 128 * 1024  # what a target may hold even when the others have used up the memory


class MemoryBudget:
    """Bytes that all targets may hold in memory and in files together; its lock is taken last.

    Read `version` before trying to take, and hand it to `wait` when that failed.
    """

    def __init__(self, memory_limit_bytes: int, spill_limit_bytes: int) -> None:
        self.memory_limit_bytes = memory_limit_bytes
        share = memory_limit_bytes // _WINDOW_SHARE
        self.window_bytes = max(BATCH_BYTES, min(_LARGEST_WINDOW_BYTES, share))  # of a target
        self.spill_limit_bytes = spill_limit_bytes
        self._changed = threading.Condition(threading.Lock())
        self.memory_bytes = 0
        self.spill_bytes = 0
        self.version = 0
        self._waiters = 0

    def take_memory(self, size: int, held: int) -> bool:
        """Count `size` bytes in if there is space, or if the target's `held` is next to nothing."""
        with self._changed:
            fits = self.memory_bytes + size <= self.memory_limit_bytes
            if fits or not held or held + size <= RESERVE_BYTES:
                self.memory_bytes += size
                return True
            return False

    def take_spill(self, size: int) -> bool:
        with self._changed:
            if self.spill_bytes + size > self.spill_limit_bytes:
                return False
            self.spill_bytes += size
            return True

    def add(self, *, memory: int = 0, spill: int = 0) -> None:
        """Change the counts of bytes in memory and in spill files, and wake waiters."""
        with self._changed:
            self.memory_bytes += memory
            self.spill_bytes += spill
            self.version += 1
            if self._waiters:
                self._changed.notify_all()

    def wait(self, version: int, timeout_s: float) -> None:
        """Wait until something has changed since `version` was read."""
        with self._changed:
            self._waiters += 1
            try:
                self._changed.wait_for(lambda: self.version != version, timeout_s)
            finally:
                self._waiters -= 1
