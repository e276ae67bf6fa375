# SPDX-License-Identifier: Apache-2.0
"""What has been said to this rank, for a main thread that may be interrupted while it waits.

It waits in poll(), not in a condition: an exception that arrives inside a condition's bookkeeping
can leave its lock in the wrong state, here there is none.
"""

from __future__ import annotations

import collections
import contextlib
import select
from collections.abc import Callable
from typing import Generic, TypeVar

from nvidia_resiliency_ext.shared_utils.event_loop import WakeUp

T = TypeVar("T")


class NewsBox(Generic[T]):
    """A list that any thread adds to and the main thread waits on; closed by its owner.

    Args:
        monotonic: Returns seconds.
        slice_s: How long it waits at most before `between` is called again.
        between: Called at the start of each slice, such as to show that the thread lives.
    """

    def __init__(
        self, monotonic: Callable[[], float], slice_s: float, between: Callable[[], object]
    ) -> None:
        self._monotonic = monotonic
        self._slice_s = slice_s
        self._between = between
        self._news: collections.deque[T] = collections.deque()
        self._wake_up = WakeUp()

    def add(self, news: T) -> None:
        """Add to the list and wake who waits."""
        self._news.append(news)
        self.wake()

    def wake(self) -> None:
        """Let who waits look again."""
        self._wake_up.set()

    def find(self, wanted: Callable[[T], bool]) -> T | None:
        """Return the first that is wanted, or None."""
        return next((news for news in tuple(self._news) if wanted(news)), None)

    def wait(self, look: Callable[[], T | None], limit_s: float | None) -> T | None:
        """Return what `look` finds, as soon as it finds something; None when the time is up."""
        deadline = None if limit_s is None else self._monotonic() + limit_s
        poll = select.poll()
        poll.register(self._wake_up, select.POLLIN)
        while True:
            self._between()
            self._wake_up.clear()
            found = look()
            if found is not None:
                return found
            left_s = self._slice_s
            if deadline is not None:
                left_s = min(left_s, deadline - self._monotonic())
                if left_s <= 0:
                    return None
            poll.poll(left_s * 1000)

    def forget(self, old: Callable[[T], bool]) -> None:
        """Drop what is old."""
        for news in tuple(self._news):
            if old(news):
                with contextlib.suppress(ValueError):
                    self._news.remove(news)

    def close(self) -> None:
        """Let the descriptors go; nobody may wait any more."""
        self._wake_up.close()
