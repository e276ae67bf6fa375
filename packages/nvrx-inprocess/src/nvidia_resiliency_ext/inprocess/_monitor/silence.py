# SPDX-License-Identifier: Apache-2.0
"""Decides when a monitor that lives, but says nothing, is no monitor any more; no I/O, no clock.

A monitor that ended closes its connections. One that is stopped, or stuck, does not: its ranks ask
it, and count for how long it owes them an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Patience", "Silence"]

_SHORTEST_STOPPED_S = 1.0
# It may be importing torch, during which nothing else runs in it.
_SHORTEST_MUTE_S = 60.0
_QUESTIONS = 4


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a monitor may say nothing, in seconds.

    Attributes:
        stopped_s: One that the kernel says is stopped.
        mute_s: One that could answer.
    """

    stopped_s: float
    mute_s: float

    @classmethod
    def within(cls, heartbeat_timeout_s: float) -> Patience:
        """Return what leaves time for another monitor before other nodes give this one up."""
        return cls(
            stopped_s=max(heartbeat_timeout_s / 3, _SHORTEST_STOPPED_S),
            mute_s=max(heartbeat_timeout_s, _SHORTEST_MUTE_S),
        )

    @property
    def interval_s(self) -> float:
        """How long to wait for something to be said before asking again."""
        return self.stopped_s / _QUESTIONS


class Silence:
    """How long one monitor has said nothing.

    Args:
        patience: How long it may.
        now: Seconds of the monotonic clock.
    """

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self._looked_s = now
        self.seconds = 0.0

    def heard(self, now: float) -> None:
        """It has said something."""
        self._looked_s = now
        self.seconds = 0.0

    def missed(self, now: float) -> None:
        """It has said nothing since the last look.

        What held us up may have held it, too: no look counts for more than two intervals.
        """
        passed_s = now - self._looked_s
        self._looked_s = now
        self.seconds += min(passed_s, 2 * self._patience.interval_s)

    def is_over(self, *, is_stopped: bool) -> bool:
        """Return whether another monitor is needed."""
        patience = self._patience
        return self.seconds >= (patience.stopped_s if is_stopped else patience.mute_s)
