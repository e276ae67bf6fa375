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

from .sinks import NotYetError

if TYPE_CHECKING:
    from collections.abc import Callable

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
        self.retry_at = 0.0
        self.retry_s = _FIRST_RETRY_S
        self.problem = ""
        self.is_warned = False
        self.pipes: set[int] = set()
        self.gets_no_pipe = False

    @property
    def has_work(self) -> bool:
        """Whether its log has to be opened, written or closed."""
        return not self.is_opened or bool(self.rest or self.queue) or self.has_ended


class Outlet:
    """Writes lines to logs, opened by `open_log`, in a thread of its own.

    `put`, `open` and `end` may be called from any thread.
    """

    def __init__(self, open_log: Callable[[str], LogFile], backlog: Backlog) -> None:
        self._open_log = open_log
        self._backlog = backlog
        self._lock = threading.Lock()  # guards the backlog and the fields below
        self._work = threading.Condition(self._lock)
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
            self._work.notify()
        return target

    def put(self, target: Target, lines: bytes) -> int:
        """Append whole lines to a log, waiting for no log; return how much waits in memory."""
        with self._lock:
            if lines:
                was_idle = not target.queue
                self._backlog.put(target.queue, lines)
                if was_idle:
                    self._work.notify()
            return self._backlog.memory_bytes

    def end(self, target: Target) -> None:
        """Nothing follows to a log: it is closed when all of it is written."""
        with self._lock:
            target.has_ended = True
            self._work.notify()

    def close(self, timeout_s: float) -> bool:
        """Write what is left and end the thread; say whether everything could be written.

        A log that takes nothing is tried until the time is up.
        """
        with self._lock:
            self._closes_at = time.monotonic() + timeout_s
            for target in self._targets:
                target.has_ended = True
                target.retry_at = 0.0
            self._work.notify()
        self._thread.join(timeout_s + _FIRST_RETRY_S)
        if self._thread.is_alive():
            logger.error("the logs do not take the last lines: writing has hung")
            return False
        for text in self._unwritten:
            logger.error("%s", text)
        return not self._unwritten

    # The thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        last: Target | None = None
        while True:
            with self._lock:
                target = self._next(last)
                if target is None:
                    return
                if not target.rest and target.queue:
                    target.rest = memoryview(self._backlog.take(target.queue))
                closes = target.has_ended and not target.rest and target.is_opened
                if closes:
                    self._targets.remove(target)
                    self._backlog.close(target.queue)
            last = target
            if closes:
                _close(target)
            else:
                self._write(target)

    def _next(self, last: Target | None) -> Target | None:
        """Wait for a target with something to do, in turn; None when all is over."""
        while True:
            now = time.monotonic()
            if self._closes_at is not None and (not self._targets or now >= self._closes_at):
                self._give_up()
                return None
            start = self._targets.index(last) + 1 if last in self._targets else 0
            in_turn = (*self._targets[start:], *self._targets[:start])
            waiting = [one for one in in_turn if one.has_work]
            for target in waiting:
                if target.retry_at <= now:
                    return target
            times = [one.retry_at for one in waiting]
            if self._closes_at is not None:
                times.append(self._closes_at)
            self._work.wait(min(times) - now if times else None)

    def _give_up(self) -> None:
        for target in self._targets:
            if target.rest or target.queue:
                self._unwritten.append(f"{target.path}: its last lines are lost: {target.problem}")
            self._backlog.close(target.queue)
            _close(target)

    def _write(self, target: Target) -> None:
        try:
            if target.file is None:
                target.file = self._open_log(target.path)
                target.is_opened = True
            while target.rest:
                target.rest = target.rest[target.file.write(target.rest) :]
        except OSError as error:
            self._failed(target, error)
        except Exception as error:  # A client's bug must not end the writing of all logs.
            logger.exception("%s cannot be written", target.path)
            self._failed(target, OSError(str(error)))
        else:
            if target.is_warned:
                logger.info("%s can be written again", target.path)
            target.problem, target.is_warned = "", False
            target.retry_s, target.retry_at = _FIRST_RETRY_S, 0.0

    def _failed(self, target: Target, error: OSError) -> None:
        if not target.is_warned and not isinstance(error, NotYetError):
            logger.warning("%s cannot be written, its lines wait: %s", target.path, error)
            target.is_warned = True
        target.problem = str(error)
        # Opened anew: after the loss of a network file system the old descriptor stays useless.
        _close(target)
        target.retry_at = time.monotonic() + target.retry_s
        target.retry_s = min(2 * target.retry_s, _LAST_RETRY_S)
        if self._closes_at is not None or isinstance(error, NotYetError):
            target.retry_at = time.monotonic() + _FIRST_RETRY_S


def _close(target: Target) -> None:
    file, target.file = target.file, None
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()
