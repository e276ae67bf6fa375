# SPDX-License-Identifier: Apache-2.0
"""How many restarts a job has left: one count for the whole job, whoever asks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .records import Entry


@dataclass(frozen=True, slots=True)
class Budget:
    """At most `max_restarts`, in all or within the last `window_s` seconds."""

    max_restarts: int
    window_s: float | None = None

    def left(self, entry: Entry, since_entry_s: float = 0.0) -> int:
        """Return how many restarts are left, `since_entry_s` after `entry` was written.

        The number of a round is the number of restarts so far.
        """
        if self.window_s is None:
            return max(0, self.max_restarts - entry.round)
        recent = [age for age in entry.restart_ages_s if age + since_entry_s <= self.window_s]
        return max(0, self.max_restarts - len(recent))
