# SPDX-License-Identifier: Apache-2.0
"""How long to wait before the next try; it waits for nothing itself."""

from __future__ import annotations

import random

__all__ = ["BATCH_DELAY_S", "SLOW_RETRY_S", "Backoff"]

BATCH_DELAY_S = 0.02
"""Batches that are not full leave at most this often."""

SLOW_RETRY_S = 30.0
"""Between tries that only a person can make succeed."""

_FIRST_S = 0.1
_LONGEST_S = 5.0
_MOST_DOUBLINGS = 10


class Backoff:
    """Delays that double up to 5 s, each drawn between nothing and all of it.

    A thousand clients that lose the same server thus come back spread over time.
    """

    def __init__(self, draw: random.Random | None = None) -> None:
        self._draw = draw or random.Random()  # noqa: S311 - spreads load, guards nothing
        self._failures = 0

    def reset(self) -> None:
        """Begin again with short delays, after something has worked."""
        self._failures = 0

    def next_s(self) -> float:
        """Return the seconds to wait after one more failure."""
        longest_s = min(_LONGEST_S, _FIRST_S * 2.0 ** min(self._failures, _MOST_DOUBLINGS))
        self._failures += 1
        return self._draw.uniform(0.0, longest_s)

    @staticmethod
    def slow_s(draw: float) -> float:
        """Return the seconds to wait where the cause will not go away by itself.

        Args:
            draw: A random number from 0 to 1.
        """
        return SLOW_RETRY_S * (0.75 + 0.5 * draw)
