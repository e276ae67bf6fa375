# SPDX-License-Identifier: Apache-2.0
"""Owns the funnel's threads: a few that write, and one that does things at their time."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvidia_resiliency_ext.shared_utils._funnel.target import Target
    from nvidia_resiliency_ext.shared_utils.clock import Clock

__all__ = ["Ticker", "Writers"]

_logger = logging.getLogger("LogAggregationServer")


class Writers:
    """Threads that serve targets, each target by one of them at a time.

    There are two as long as they come along; `relieve` adds one when all hang. They are daemons:
    one that a dead network file system holds must not keep the program from ending.

    Args:
        serve: What to do with a target.
        most: The most threads.
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
        """Have a function called at a monotonic time."""
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
