# SPDX-License-Identifier: Apache-2.0
"""What the coalescer keeps and shows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CacheEntry",
    "CacheResult",
    "CoalescerStats",
    "InFlightEntry",
    "InflightResult",
    "LogAnalysisCoalesced",
    "StatsResult",
    "SubmittedResult",
    "coalesced_from_cache",
]


@dataclass
class CacheEntry:
    """A result and the file that it is about.

    Attributes:
        value: The result.
        created_s: When, as `time.time()`.
        mtime_ns: Of the file then; None: there was none.
        size: Of the file then.
    """

    value: Any
    created_s: float
    mtime_ns: int | None = None
    size: int | None = None


@dataclass
class InFlightEntry:
    """A computation that runs, and how many wait for it."""

    task: asyncio.Task[Any]
    started_s: float
    waiters: int = 0


@dataclass
class CoalescerStats:
    """Counts since the start."""

    hits: int = 0
    misses: int = 0
    coalesced: int = 0
    failures: int = 0
    timeouts: int = 0


@dataclass(frozen=True)
class LogAnalysisCoalesced:
    """A result, and whether it was already there or shared with another request."""

    value: Any
    from_cache: bool = False
    shared: bool = False


@dataclass(frozen=True)
class _Keys:
    count: int
    keys: list[str]


class CacheResult(_Keys):
    """Keys of the kept results."""


class InflightResult(_Keys):
    """Keys of what is computed now."""


class SubmittedResult(_Keys):
    """Keys that were submitted and have no result."""


@dataclass(frozen=True)
class StatsResult:
    """All counts together."""

    stats: CoalescerStats = field(default_factory=CoalescerStats)
    cached: int = 0
    inflight: int = 0
    submitted: int = 0


def coalesced_from_cache(entry: CacheEntry) -> LogAnalysisCoalesced:
    """Return a kept result in the form of an answer."""
    return LogAnalysisCoalesced(entry.value, from_cache=True)
