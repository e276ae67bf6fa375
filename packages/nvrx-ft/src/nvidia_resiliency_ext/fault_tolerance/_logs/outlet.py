# SPDX-License-Identifier: Apache-2.0
"""Write lines to their logs in a thread; who hands lines in never waits for a log.

What a slow or broken log does not take waits: in memory, then in files, then the oldest is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop, Timer

from .sinks import LogFile, NotYetError

logger = logging.getLogger("nvrx")

MEMORY_BYTES = 48 << 20
SPILL_BYTES = 1 << 30
_MOST_FILES = 256
_BATCH_BYTES = 256 << 10
_RECORD_BYTES = 8 << 20
_PART_OVERHEAD_BYTES = 64  # what a part costs beside its bytes
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Record:
    """Lines in a file of their own, which has no name, so nothing is left behind."""

    fd: int
    size: int
    lines: int


class Target:
    """One log and its waiting lines; the outlet's, under its lock or in its thread.

    From oldest to newest wait: a gap (what was dropped), records in files, parts in memory.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.dropped_lines = self.dropped_bytes = 0
        self.spilled: deque[Record] = deque()
        self.parts: deque[bytes] = deque()
        self.cost = 0
        self.file: LogFile | None = None
        self.rest = memoryview(b"")
        self.is_opened = False
        self.has_ended = False
        self.is_scheduled = False
        self.retry: Timer | None = None
        self.retry_s = _FIRST_RETRY_S
        self.problem = ""
        self.is_warned = False
        self.pipes: set[int] = set()  # the reader's, as the next
        self.gets_no_pipe = False

    @property
    def has_lines(self) -> bool:
        """Whether anything waits, a notice included."""
        return bool(self.parts or self.spilled or self.dropped_lines)

    def take_notice(self) -> bytes:
        """Return the line that counts the dropped lines, and reset the counts."""
        said = f"[nvrx] dropped {self.dropped_lines} lines ({self.dropped_bytes} bytes)\n"
        self.dropped_lines = self.dropped_bytes = 0
        return said.encode()

    def pop_parts(self, limit: int) -> bytes:
        """Return the oldest parts in memory: one at least, and no more than cost `limit`."""
        parts = [self.parts.popleft()]
        cost = _cost(parts[0])
        while self.parts and cost + _cost(self.parts[0]) <= limit:
            parts.append(self.parts.popleft())
            cost += _cost(parts[-1])
        self.cost -= cost
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def pop_record(self, *, is_lost: bool) -> None:
        """Forget the oldest record."""
        record = self.spilled.popleft()
        os.close(record.fd)
        if is_lost:
            self.dropped_lines += record.lines
            self.dropped_bytes += record.size

    def close(self) -> None:
        """Close the file; the next write opens it anew."""
        file, self.file = self.file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _cost(part: bytes) -> int:
    return len(part) + _PART_OVERHEAD_BYTES


class Backlog:
    """All logs and one memory limit for what waits; the rest goes to files, or is dropped."""

    def __init__(self, limit_bytes: int, directory: str) -> None:
        self._limit_bytes = limit_bytes
        self._directory = directory
        self.targets: list[Target] = []

    def open(self, path: str) -> Target:
        target = Target(path)
        self.targets.append(target)
        return target

    def close(self, target: Target) -> None:
        """Forget a log and its waiting lines."""
        self.targets.remove(target)
        for record in target.spilled:
            os.close(record.fd)

    @property
    def memory_bytes(self) -> int:
        return sum(target.cost for target in self.targets)

    @property
    def spilled_bytes(self) -> int:
        return sum(record.size for target in self.targets for record in target.spilled)

    def put(self, target: Target, data: bytes) -> None:
        """Append whole lines; what is too much for memory goes to files, or is dropped."""
        target.parts.append(data)
        target.cost += _cost(data)
        while self.memory_bytes > self._limit_bytes:
            self._free_space(max(self.targets, key=lambda one: one.cost))

    def take(self, target: Target) -> bytes:
        """Return the oldest lines of a log that has some."""
        if target.dropped_lines:
            return target.take_notice()
        if not target.spilled:
            return target.pop_parts(_BATCH_BYTES)
        oldest = target.spilled[0]
        data = b""
        with contextlib.suppress(OSError):
            data = os.pread(oldest.fd, oldest.size, 0)
        is_lost = len(data) != oldest.size
        target.pop_record(is_lost=is_lost)
        return target.take_notice() if is_lost else data

    def _free_space(self, target: Target) -> None:
        # Never all of it: the newest lines tell why a job died.
        data = target.pop_parts(min(_RECORD_BYTES, self._limit_bytes // 4))
        lines = data.count(b"\n")
        while True:
            try:
                target.spilled.append(Record(self._write_file(data), len(data), lines))
            except OSError:
                if not target.spilled:
                    target.dropped_lines += lines
                    target.dropped_bytes += len(data)
                    return
                target.pop_record(is_lost=True)
            else:
                return

    def _write_file(self, data: bytes) -> int:
        """Return the descriptor of a new file with `data`."""
        files = sum(len(target.spilled) for target in self.targets)
        if self.spilled_bytes + len(data) > SPILL_BYTES or files == _MOST_FILES:
            raise OSError(errno.ENOSPC, "the limit of the spill files is reached")
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            return os.dup(file.fileno())


class Outlet:
    """Writes lines to logs, opened by `open_log`, in a thread of its own.

    `put`, `open` and `end` may be called from any thread.
    """

    def __init__(self, open_log: Callable[[str], LogFile], backlog: Backlog) -> None:
        self._open_log = open_log
        self._backlog = backlog
        self._loop = EventLoop()
        self._lock = threading.Lock()  # guards the backlog and when targets have a turn
        self._closes_at: float | None = None
        self._unwritten: list[str] = []
        self._thread = threading.Thread(target=self._run, name="nvrx-log-writer", daemon=True)
        self._thread.start()

    def open(self, path: str) -> Target:
        """Return the target for a log; its file is made at once."""
        with self._lock:
            target = self._backlog.open(path)
            self._schedule(target)
        return target

    def put(self, target: Target, lines: bytes) -> int:
        """Append whole lines to a log, waiting for no log; return how much waits in memory."""
        with self._lock:
            if lines:
                self._backlog.put(target, lines)
                self._schedule(target)
            return self._backlog.memory_bytes

    def end(self, target: Target) -> None:
        """Close a log, to which nothing follows, when all of it is written."""
        with self._lock:
            target.has_ended = True
            self._schedule(target)

    def close(self, timeout_s: float) -> bool:
        """Write all remaining lines within `timeout_s`; return whether all of them were written."""
        self._closes_at = time.monotonic() + timeout_s
        self._loop.post(self._end_all)
        self._thread.join(timeout_s + _FIRST_RETRY_S)
        if self._thread.is_alive():
            logger.error("the logs do not take the last lines: writing has hung")
            return False
        for text in self._unwritten:
            logger.error("%s", text)
        return not self._unwritten

    def _schedule(self, target: Target) -> None:
        """Queue a log behind the others, unless it is queued."""
        if not target.is_scheduled:
            target.is_scheduled = True
            self._loop.post(lambda: self._turn(target))

    # The thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        targets = self._backlog.targets
        while self._closes_at is None or (targets and time.monotonic() < self._closes_at):
            self._loop.run_once(until=self._closes_at)
        for target in list(targets):
            if target.rest or target.has_lines:
                self._unwritten.append(f"{target.path}: its last lines are lost: {target.problem}")
            with self._lock:
                self._backlog.close(target)
            target.close()
        self._loop.close()

    def _end_all(self) -> None:
        with self._lock:
            targets = list(self._backlog.targets)
        for target in targets:
            target.has_ended = True
            self._turn(target)

    def _turn(self, target: Target) -> None:
        """Write the oldest lines of a log, or close it when it has ended."""
        with self._lock:
            if target not in self._backlog.targets:
                return
            if target.retry is not None:
                target.retry.cancel()
            if not target.rest and target.has_lines:
                target.rest = memoryview(self._backlog.take(target))
            closes = target.has_ended and not target.rest and target.is_opened
            if closes:
                self._backlog.close(target)
        if closes:
            target.close()
            return
        retry_at = self._write(target)
        with self._lock:
            target.is_scheduled = retry_at is not None
            if retry_at is not None:
                target.retry = self._loop.call_at(retry_at, lambda: self._turn(target))
            elif target.has_lines or target.has_ended:
                self._schedule(target)

    def _write(self, target: Target) -> float | None:
        """Write a log's pending bytes; return when to try again after a failure."""
        try:
            if target.file is None:
                target.file = self._open_log(target.path)
                target.is_opened = True
            while target.rest:
                target.rest = target.rest[target.file.write(target.rest) :]
        except (OSError, NvrxError) as error:
            return self._failed(target, error)
        except Exception as error:  # A client's bug must not end the writing of all logs.
            logger.exception("%s cannot be written", target.path)
            return self._failed(target, error)
        if target.is_warned:
            logger.info("%s can be written again", target.path)
        target.problem, target.is_warned = "", False
        target.retry_s = _FIRST_RETRY_S
        return None

    def _failed(self, target: Target, error: Exception) -> float:
        if not target.is_warned and not isinstance(error, NotYetError):
            logger.warning("%s cannot be written, its lines wait: %s", target.path, error)
            target.is_warned = True
        target.problem = str(error)
        # Opened anew: after the loss of a network file system the old descriptor stays useless.
        target.close()
        retry_s, target.retry_s = target.retry_s, min(2 * target.retry_s, _LAST_RETRY_S)
        if self._closes_at is not None or isinstance(error, NotYetError):
            retry_s = _FIRST_RETRY_S
        return time.monotonic() + retry_s
