# SPDX-License-Identifier: Apache-2.0
"""Owns the way of news from the writers' threads into the event loop: one wake-up for many."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvidia_resiliency_ext.shared_utils._funnel.streams import Source

__all__ = ["Mailbox"]


class Mailbox:
    """News for streams of one event loop, in which it must be made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news: deque[tuple[Callable[[Source], None], Source]] = deque()
        self._is_waking = False

    def post(self, take: Callable[[Source], None], source: Source) -> None:
        """Have `take(source)` called in the event loop; from any thread."""
        self._news.append((take, source))
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The loop has ended, and the streams with it.
                return

    def _deliver(self) -> None:
        # First: what is added from now on wakes the loop again.
        self._is_waking = False
        for _ in range(len(self._news)):
            take, source = self._news.popleft()
            take(source)
