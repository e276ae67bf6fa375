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
        mtime_ns: Modification time of the file then, in nanoseconds; None: there was none.
        size: Bytes of the file then; None: there was none.
    """

    value: Any
    created_s: float
    mtime_ns: int | None = None
    size: int | None = None


@dataclass
class InFlightEntry:
    """A computation that runs.

    Args:
        task: The running computation.
        started_s: When it began, in seconds since 1970.
        waiters: Requests that wait for it.
    """

    task: asyncio.Task[Any]
    started_s: float
    waiters: int = 0


@dataclass
class CoalescerStats:
    """Count requests since the start.

    Args:
        hits: Answered from a kept result.
        misses: Computed.
        coalesced: Joined to a computation that ran already.
        failures: Computations that raised.
        timeouts: Computations ended because they took too long.
    """

    hits: int = 0
    misses: int = 0
    coalesced: int = 0
    failures: int = 0
    timeouts: int = 0


@dataclass(frozen=True)
class LogAnalysisCoalesced:
    """A result and how the request got it.

    Args:
        value: The result.
        from_cache: It was kept from an earlier request. Default False.
        shared: It was computed for several requests at once. Default False.
    """

    value: Any
    from_cache: bool = False
    shared: bool = False


@dataclass(frozen=True)
class CacheResult:
    """Keys of the kept results.

    Args:
        count: How many there are.
        keys: The keys: paths of logs.
    """

    count: int
    keys: list[str]


@dataclass(frozen=True)
class InflightResult:
    """Keys of the computations that run now.

    Args:
        count: How many there are.
        keys: The keys: paths of logs.
    """

    count: int
    keys: list[str]


@dataclass(frozen=True)
class SubmittedResult:
    """Keys that were submitted and have no result.

    Args:
        count: How many there are.
        keys: The keys: paths of logs.
    """

    count: int
    keys: list[str]


@dataclass(frozen=True)
class StatsResult:
    """All counts together.

    Args:
        stats: Counts of requests.
        cached: Results that are kept.
        inflight: Computations that run.
        submitted: Keys submitted without a result.
    """

    stats: CoalescerStats = field(default_factory=CoalescerStats)
    cached: int = 0
    inflight: int = 0
    submitted: int = 0


def coalesced_from_cache(entry: CacheEntry) -> LogAnalysisCoalesced:
    """Return a kept result as the answer to a request.

    Args:
        entry: The kept result.

    Example:
        >>> coalesced_from_cache(CacheEntry("STOP", created_s=0.0))
        LogAnalysisCoalesced(value='STOP', from_cache=True, shared=False)
    """
    return LogAnalysisCoalesced(entry.value, from_cache=True)
