# SPDX-License-Identifier: Apache-2.0
"""Write lines to their logs in a thread; who hands lines in never waits for a log.

What a slow or broken log does not take waits: in memory, then in files, then the oldest is dropped.
A queue holds, from oldest to newest: a gap (what was dropped), records in files, parts in memory.
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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

from .sinks import NotYetError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvidia_resiliency_ext.shared_utils.event_loop import Timer

    from .sinks import LogFile


logger = logging.getLogger("nvrx")

MEMORY_BYTES = 48 << 20
SPILL_BYTES = 1 << 30
_MOST_FILES = 256
_BATCH_BYTES = 256 << 10
_RECORD_BYTES = 8 << 20
# What a part costs beside its bytes.
_PART_OVERHEAD_BYTES = 64
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Record:
    """Lines in a file of their own, which has no name, so nothing is left behind."""

    fd: int
    size: int
    lines: int


class Queue:
    """What waits for one target, and how much of it was dropped. Only `Backlog` changes it."""

    def __init__(self) -> None:
        self.dropped_lines = self.dropped_bytes = 0
        self.spilled: deque[Record] = deque()
        self.parts: deque[bytes] = deque()
        self.cost = 0

    def __bool__(self) -> bool:
        """Whether anything waits, a notice included."""
        return bool(self.parts or self.spilled or self.dropped_lines)

    def take_notice(self) -> bytes:
        """Return the line that says what is gone, and forget that."""
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


def _cost(part: bytes) -> int:
    return len(part) + _PART_OVERHEAD_BYTES


class Backlog:
    """The queues of all targets under one memory limit; the rest goes to files, or is dropped."""

    def __init__(
        self, limit_bytes: int, directory: str, spill_limit_bytes: int = SPILL_BYTES
    ) -> None:
        self._limit_bytes = limit_bytes
        self._directory = directory
        self._spill_limit_bytes = spill_limit_bytes
        self._queues: list[Queue] = []

    def open(self) -> Queue:
        queue = Queue()
        self._queues.append(queue)
        return queue

    def close(self, queue: Queue) -> None:
        """Forget a queue and what is left in it."""
        self._queues.remove(queue)
        for record in queue.spilled:
            os.close(record.fd)

    @property
    def memory_bytes(self) -> int:
        return sum(queue.cost for queue in self._queues)

    @property
    def spilled_bytes(self) -> int:
        return sum(record.size for queue in self._queues for record in queue.spilled)

    def put(self, queue: Queue, data: bytes) -> None:
        """Append whole lines; what is too much for memory goes to files, or is dropped."""
        queue.parts.append(data)
        queue.cost += _cost(data)
        while self.memory_bytes > self._limit_bytes:
            self._free_space(max(self._queues, key=lambda one: one.cost))

    def take(self, queue: Queue) -> bytes:
        """Return the oldest lines of a queue that has some."""
        if queue.dropped_lines:
            return queue.take_notice()
        if not queue.spilled:
            return queue.pop_parts(_BATCH_BYTES)
        oldest = queue.spilled[0]
        data = b""
        with contextlib.suppress(OSError):
            data = os.pread(oldest.fd, oldest.size, 0)
        is_lost = len(data) != oldest.size
        self._forget_oldest(queue, is_lost=is_lost)
        return queue.take_notice() if is_lost else data

    def _free_space(self, queue: Queue) -> None:
        # Never all of it: the newest lines tell why a job died.
        data = queue.pop_parts(min(_RECORD_BYTES, self._limit_bytes // 4))
        lines = data.count(b"\n")
        while True:
            try:
                queue.spilled.append(Record(self._write_file(data), len(data), lines))
            except OSError:
                if not queue.spilled:
                    queue.dropped_lines += lines
                    queue.dropped_bytes += len(data)
                    return
                self._forget_oldest(queue, is_lost=True)
            else:
                return

    def _write_file(self, data: bytes) -> int:
        """Return the descriptor of a new file with `data`."""
        files = sum(len(queue.spilled) for queue in self._queues)
        if self.spilled_bytes + len(data) > self._spill_limit_bytes or files == _MOST_FILES:
            raise OSError(errno.ENOSPC, "the limit of the spill files is reached")
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            return os.dup(file.fileno())

    @staticmethod
    def _forget_oldest(queue: Queue, *, is_lost: bool) -> None:
        record = queue.spilled.popleft()
        os.close(record.fd)
        if is_lost:
            queue.dropped_lines += record.lines
            queue.dropped_bytes += record.size


class Target:
    """One log. Only the outlet changes it, under its lock or in its thread.

    `pipes`, and whether more of them may come, are the reader's.
    """

    def __init__(self, path: str, queue: Queue) -> None:
        self.path = path
        self.queue = queue
        self.file: LogFile | None = None
        self.rest = memoryview(b"")
        self.is_opened = False
        self.has_ended = False
        self.is_scheduled = False
        self.retry: Timer | None = None
        self.retry_s = _FIRST_RETRY_S
        self.problem = ""
        self.is_warned = False
        self.pipes: set[int] = set()
        self.gets_no_pipe = False


class Outlet:
    """Writes lines to logs, opened by `open_log`, in a thread of its own.

    `put`, `open` and `end` may be called from any thread.
    """

    def __init__(self, open_log: Callable[[str], LogFile], backlog: Backlog) -> None:
        self._open_log = open_log
        self._backlog = backlog
        self._loop = EventLoop()
        self._lock = threading.Lock()  # guards the backlog, `_targets` and when they have a turn
        self._targets: list[Target] = []
        self._closes_at: float | None = None
        self._unwritten: list[str] = []
        self._thread = threading.Thread(target=self._run, name="nvrx-log-writer", daemon=True)
        self._thread.start()

    def open(self, path: str) -> Target:
        """Return the target for a log; its file is made at once."""
        with self._lock:
            target = Target(path, self._backlog.open())
            self._targets.append(target)
            self._schedule(target)
        return target

    def put(self, target: Target, lines: bytes) -> int:
        """Append whole lines to a log, waiting for no log; return how much waits in memory."""
        with self._lock:
            if lines:
                self._backlog.put(target.queue, lines)
                self._schedule(target)
            return self._backlog.memory_bytes

    def end(self, target: Target) -> None:
        """Nothing follows to a log: it is closed when all of it is written."""
        with self._lock:
            target.has_ended = True
            self._schedule(target)

    def close(self, timeout_s: float) -> bool:
        """Write what is left and end the thread; say whether everything could be written.

        A log that takes nothing is tried until the time is up.
        """
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
        """Give a log a turn behind the others, unless it has one to come."""
        if not target.is_scheduled:
            target.is_scheduled = True
            self._loop.post(lambda: self._turn(target))

    # The thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._closes_at is None or (self._targets and time.monotonic() < self._closes_at):
            self._loop.run_once(until=self._closes_at)
        for target in self._targets:
            if target.rest or target.queue:
                self._unwritten.append(f"{target.path}: its last lines are lost: {target.problem}")
            with self._lock:
                self._backlog.close(target.queue)
            _close(target)
        self._loop.close()

    def _end_all(self) -> None:
        with self._lock:
            targets = list(self._targets)
        for target in targets:
            target.has_ended = True
            self._turn(target)

    def _turn(self, target: Target) -> None:
        """Write the oldest lines of a log, or close it when it has ended."""
        with self._lock:
            if target not in self._targets:
                return
            if target.retry is not None:
                target.retry.cancel()
            if not target.rest and target.queue:
                target.rest = memoryview(self._backlog.take(target.queue))
            closes = target.has_ended and not target.rest and target.is_opened
            if closes:
                self._targets.remove(target)
                self._backlog.close(target.queue)
        if closes:
            _close(target)
            return
        retry_at = self._write(target)
        with self._lock:
            target.is_scheduled = retry_at is not None
            if retry_at is not None:
                target.retry = self._loop.call_at(retry_at, lambda: self._turn(target))
            elif target.queue or target.has_ended:
                self._schedule(target)

    def _write(self, target: Target) -> float | None:
        """Write what a log was given; return when to try again where that fails."""
        try:
            if target.file is None:
                target.file = self._open_log(target.path)
                target.is_opened = True
            while target.rest:
                target.rest = target.rest[target.file.write(target.rest) :]
        except OSError as error:
            return self._failed(target, error)
        except Exception as error:  # A client's bug must not end the writing of all logs.
            logger.exception("%s cannot be written", target.path)
            return self._failed(target, OSError(str(error)))
        if target.is_warned:
            logger.info("%s can be written again", target.path)
        target.problem, target.is_warned = "", False
        target.retry_s = _FIRST_RETRY_S
        return None

    def _failed(self, target: Target, error: OSError) -> float:
        if not target.is_warned and not isinstance(error, NotYetError):
            logger.warning("%s cannot be written, its lines wait: %s", target.path, error)
            target.is_warned = True
        target.problem = str(error)
        # Opened anew: after the loss of a network file system the old descriptor stays useless.
        _close(target)
        retry_s, target.retry_s = target.retry_s, min(2 * target.retry_s, _LAST_RETRY_S)
        if self._closes_at is not None or isinstance(error, NotYetError):
            retry_s = _FIRST_RETRY_S
        return time.monotonic() + retry_s


def _close(target: Target) -> None:
    file, target.file = target.file, None
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()
