# SPDX-License-Identifier: Apache-2.0
"""One thread that waits for descriptors and times. It decides nothing."""

from __future__ import annotations

import heapq
import itertools
import selectors
from collections.abc import Callable

from nvidia_resiliency_ext.shared_utils.clock import Clock

# The kernel takes no more than 2**31 ms; waking once an hour costs nothing.
LONGEST_WAIT_S = 3600.0


class Timer:
    """A call at a time of the clock; `cancel` makes it never happen."""

    __slots__ = ("_callback", "at")

    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Forget the call."""
        self._callback = None

    def fire(self) -> None:
        """Call once."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    @property
    def is_cancelled(self) -> bool:
        """Whether nothing would be called."""
        return self._callback is None


class EventLoop:
    """Callbacks for readable descriptors and for times of a monotonic clock.

    One thread only. A callback may add and remove anything; what it removes is not called any
    more, also when it was ready in the same round.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `fd` is readable or hung up."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`; unknown descriptors are ignored."""
        try:
            self._selector.unregister(fd)
        except (KeyError, ValueError):
            return

    def call_at(self, at: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` once when the clock has reached `at`."""
        timer = Timer(at, callback)
        heapq.heappush(self._timers, (at, next(self._order), timer))
        return timer

    def run_once(self, *, until: float | None = None) -> None:
        """Wait for the next event, at most until `until`, and call what is due."""
        for key, _ in self._selector.select(self._timeout(until)):
            if self._is_watched(key):
                key.data()
        now = self._clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].fire()

    def _is_watched(self, key: selectors.SelectorKey) -> bool:
        current = self._selector.get_map().get(key.fd)
        return current is not None and current.data is key.data

    def _timeout(self, until: float | None) -> float | None:
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        ends = [until] if until is not None else []
        if self._timers:
            ends.append(self._timers[0][0])
        if not ends:
            return None
        return min(max(0.0, min(ends) - self._clock.monotonic()), LONGEST_WAIT_S)

    def close(self) -> None:
        """Release the selector; callbacks are dropped."""
        self._selector.close()
        self._timers.clear()
