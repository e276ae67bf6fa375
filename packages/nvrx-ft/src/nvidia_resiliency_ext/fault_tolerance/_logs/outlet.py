# SPDX-License-Identifier: Apache-2.0
"""Owns the thread that writes lines to their logs, and what waits for it.

Whoever hands lines in never waits for a log: what a slow or broken one does not take is kept, in
memory, then in files, and the oldest is dropped at last (`backlog`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from .backlog import Backlog, Queue
from .sinks import NotYetError

if TYPE_CHECKING:
    from .sinks import LogPlace, Sink


logger = logging.getLogger("nvrx")

MEMORY_BYTES = 48 << 20
SPILL_BYTES = 1 << 30
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 5.0


class Target:
    """One log. Only the outlet changes it, under its lock or in its thread."""

    def __init__(self, path: str, queue: Queue) -> None:
        self.path = path
        self.queue = queue
        self.sink: Sink | None = None
        self.rest = memoryview(b"")
        self.is_opened = False
        self.has_ended = False
        self.retry_at = 0.0
        self.retry_s = _FIRST_RETRY_S
        self.problem = ""
        self.is_warned = False

    @property
    def has_work(self) -> bool:
        """Whether its log has to be opened, written or closed."""
        return not self.is_opened or bool(self.rest or self.queue) or self.has_ended


class Outlet:
    """Writes lines to logs in a thread of its own.

    `put`, `open` and `end` may be called from any thread.
    """

    def __init__(self, place: LogPlace, backlog: Backlog) -> None:
        self._place = place
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
            _close(target)

    def _write(self, target: Target) -> None:
        try:
            if target.sink is None:
                target.sink = self._place.open(target.path)
                target.is_opened = True
            while target.rest:
                target.rest = target.rest[target.sink.write(target.rest) :]
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
    sink, target.sink = target.sink, None
    if sink is not None:
        with contextlib.suppress(OSError):
            sink.close()
