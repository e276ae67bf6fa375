# SPDX-License-Identifier: Apache-2.0
"""Owns the lines about cycles in the server's log, which other programs look for."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils._funnel.cycles import CycleFile, Cycles

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils._funnel.state import FunnelState
    from nvidia_resiliency_ext.shared_utils._funnel.threads import Ticker
    from nvidia_resiliency_ext.shared_utils.clock import Clock

__all__ = ["Completion"]

_logger = logging.getLogger("LogAggregationServer")


class Completion:
    """Announces files of cycles once they look complete.

    All but `say` is called with the funnel's lock held.

    Args:
        idle_s: How long nothing must have come for a file.
    """

    def __init__(self, idle_s: float, state: FunnelState, ticker: Ticker, clock: Clock) -> None:
        self._idle_s = idle_s
        self._state = state
        self._ticker = ticker
        self._clock = clock
        self._cycles = Cycles(idle_s)
        self._check_at = float("inf")

    def track(self, path: str, now: float) -> CycleFile | None:
        """Return the record of a file that belongs to a cycle."""
        file = self._cycles.track(path, now)
        if file is not None:
            # It may be the successor that others were waiting for.
            self._check_at_time(now)
        return file

    def arrived(self, file: CycleFile, now: float) -> None:
        """Note a chunk."""
        file.arrived_at = now
        if file.is_complete:
            file.is_complete = False
            _logger.warning(
                "Late chunk after heuristic cycle log complete: file_path=%s", file.path
            )

    def check_after(self, arrived_at: float) -> None:
        """Look again once the idle time since a chunk has passed."""
        self._check_at_time(arrived_at + self._idle_s)

    def say(self, *, at_end: bool = False) -> None:
        """Announce what looks complete; at the end that is all that was written."""
        with self._state.lock:
            self._check_at = float("inf")
            done = self._cycles.take_complete(self._clock.monotonic(), at_end=at_end)
            if not at_end:
                self._check_at_time(self._cycles.next_check())
        for file in done:
            _logger.info(
                "Heuristic cycle log complete: file_path=%s last_flush_time=%s",
                file.path,
                _iso(file.flushed_at or 0.0),
            )

    def _check_at_time(self, when: float) -> None:
        if when < self._check_at:
            self._check_at = when
            self._ticker.call_at(when, self.say)


def _iso(wall_s: float) -> str:
    moment = datetime.fromtimestamp(wall_s, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
