# SPDX-License-Identifier: Apache-2.0
"""Owns how often refusals at one socket are logged; who is refused, and why, is decided elsewhere.

A peer that asks again and again, or sends garbage, must not fill the launcher's log.
"""

from __future__ import annotations

import logging

__all__ = ["RefusalLog"]

logger = logging.getLogger("nvrx")

LINES_PER_PERIOD = 5
PERIOD_S = 60.0


class RefusalLog:
    """Logs the first refusals of a period, and how many more there were when it is over."""

    def __init__(self, socket_name: str) -> None:
        """Begin without a period; the first refusal begins one."""
        self._socket_name = socket_name
        self._count = 0
        self.next_check: float | None = None
        """When `check` is due, on the monotonic clock."""

    def note(self, now: float, text: str) -> None:
        """Take a refusal, described in `text`."""
        self.check(now)
        if self.next_check is None:
            self.next_check = now + PERIOD_S
        self._count += 1
        if self._count <= LINES_PER_PERIOD:
            logger.warning("%s", text)

    def check(self, now: float) -> None:
        """End the period if it is over."""
        if self.next_check is not None and self.next_check <= now:
            self.finish()

    def finish(self) -> None:
        """End the period."""
        more = self._count - LINES_PER_PERIOD
        if more > 0:
            logger.warning("%d more refusals at %s", more, self._socket_name)
        self._count, self.next_check = 0, None
