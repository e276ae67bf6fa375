# SPDX-License-Identifier: Apache-2.0
"""Owns what the client tells people: each state of the server once, and nothing under a lock.

A handler of the logger may itself write to a target of this client, so lines are kept until the
thread that gave rise to them holds no lock.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

__all__ = ["Notices"]

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

    def warn(self, line: str) -> None:
        """Keep a warning until the next `emit`."""
        self.add(logging.WARNING, line)

    def state(self, name: str, level: int, line: str) -> None:
        """Keep a line about a state of the server, unless it was the last one told."""
        with self._lock:
            if name != self._state:
                self._state = name
                self.add(level, line)

    def is_in_trouble(self) -> bool:
        """Say whether the last state told was a bad one."""
        return self._state not in {"", "up", "plain"}

    def emit(self) -> None:
        """Log what was kept; the caller holds no lock."""
        while self._kept:
            try:
                level, line = self._kept.popleft()
            except IndexError:
                return
            logger.log(level, "log funnel: %s", line)
