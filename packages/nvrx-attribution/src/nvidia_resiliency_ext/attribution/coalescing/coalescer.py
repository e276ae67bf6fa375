# SPDX-License-Identifier: Apache-2.0
"""One computation per key, whoever asks; results are kept while their file stays the same."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from nvidia_resiliency_ext.attribution.coalescing.types import (
    CacheEntry,
    CacheResult,
    CoalescerStats,
    InFlightEntry,
    InflightResult,
    LogAnalysisCoalesced,
    StatsResult,
    SubmittedResult,
    coalesced_from_cache,
)
from nvidia_resiliency_ext.attribution.orchestration.config import DEFAULT_COMPUTE_TIMEOUT_SECONDS

__all__ = ["RequestCoalescer"]

_MOST_RESULTS = 3000
_MOST_SUBMITTED = 100000
_GRACE_S = 600.0


class RequestCoalescer:
    """Share computations between requests; for one event loop.

    Keys are paths. A result counts without a look at the file for `grace_period_seconds`, later
    only while time and size of the file are the same.

    `key` is the path that identifies a computation.

    Args:
        compute_timeout: Seconds that one computation may take. Default 300.
        grace_period_seconds: See above.
        max_results: Results that are kept; the oldest go first. Default 3000.

    Example:
        >>> import asyncio
        >>> async def work() -> int: return 7
        >>> async def ask() -> int:
        ...     return (await RequestCoalescer().get_or_compute("/log", work)).value
        >>> asyncio.run(ask())
        7
    """

    def __init__(
        self,
        compute_timeout: float = DEFAULT_COMPUTE_TIMEOUT_SECONDS,
        grace_period_seconds: float = _GRACE_S,
        max_results: int = _MOST_RESULTS,
    ) -> None:
        self._timeout_s = compute_timeout
        self._grace_s = grace_period_seconds
        self._max_results = max_results
        self._cache: dict[str, CacheEntry] = {}
        self._inflight: dict[str, InFlightEntry] = {}
        self._submitted: dict[str, float] = {}
        self._revised: dict[str, Any] = {}
        self._stats = CoalescerStats()

    def peek(self, key: str) -> CacheEntry | None:
        """Return the kept result of a key if it is still valid, else None.

        Args:
            key: The path.
        """
        entry = self._cache.get(key)
        if entry is None:
            return None
        if time.time() - entry.created_s <= self._grace_s or _file_of(key) == (
            entry.mtime_ns,
            entry.size,
        ):
            return entry
        return None

    def is_running(self, key: str) -> bool:
        """Return whether a key is computed now."""
        return key in self._inflight

    def track_submission(self, key: str) -> None:
        """Remember that a key was submitted."""
        if len(self._submitted) < _MOST_SUBMITTED:
            self._submitted.setdefault(key, time.time())

    def forget(self, key: str) -> None:
        """Drop the kept result of a key."""
        self._cache.pop(key, None)

    def revise(self, key: str, value: Any) -> None:
        """Replace a kept result, or the one that is being computed.

        Args:
            key: The path.
            value: The new result.
        """
        if key in self._inflight:
            self._revised[key] = value
        elif key in self._cache:
            self._cache[key] = replace(self._cache[key], value=value)

    async def get_or_compute(
        self, key: str, coro_fn: Callable[[], Awaitable[Any]]
    ) -> LogAnalysisCoalesced:
        """Return the kept result, the one that is being computed, or compute it.

        A request that is cancelled does not end the computation for the others; what fails is not
        kept.

        Args:
            key: The path.
            coro_fn: Starts the computation; called only if no other request has started it.

        Raises:
            TimeoutError: The computation took too long; it is ended.
            Exception: What the computation raised.
        """
        kept = self.peek(key)
        if kept is not None:
            self._stats.hits += 1
            return coalesced_from_cache(kept)
        entry = self._inflight.get(key)
        is_shared = entry is not None
        if entry is None:
            self._stats.misses += 1
            task = asyncio.ensure_future(self._compute(key, coro_fn))
            # A failure that nobody waits for any more is no event for the loop's handler.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            entry = self._inflight[key] = InFlightEntry(task, time.time())
        else:
            self._stats.coalesced += 1
        entry.waiters += 1
        try:
            value = await asyncio.shield(entry.task)
        finally:
            entry.waiters -= 1
        return LogAnalysisCoalesced(value, shared=is_shared)

    def get_cache(self) -> CacheResult:
        """Return the keys of kept results."""
        return CacheResult(len(self._cache), list(self._cache))

    def get_inflight(self) -> InflightResult:
        """Return the keys that are computed now."""
        return InflightResult(len(self._inflight), list(self._inflight))

    def get_submitted(self) -> SubmittedResult:
        """Return the keys that were submitted and have no result."""
        keys = [key for key in self._submitted if key not in self._cache]
        return SubmittedResult(len(keys), keys)

    def get_stats(self) -> StatsResult:
        """Return all counts."""
        waiting = self.get_submitted().count
        return StatsResult(replace(self._stats), len(self._cache), len(self._inflight), waiting)

    def export_cache(self) -> dict[str, Any]:
        """Return the kept results for a file; the values must be JSON."""
        return {key: asdict(entry) for key, entry in self._cache.items()}

    def import_cache(self, data: Mapping[str, Any]) -> int:
        """Load kept results that `export_cache` wrote, and return how many; skip malformed ones.

        Args:
            data: From key to the fields of a `CacheEntry`.
        """
        count = 0
        for key, value in list(data.items())[-self._max_results :]:
            try:
                entry = CacheEntry(**value)
                is_sound = isinstance(entry.created_s, int | float)
            except TypeError:
                continue
            if is_sound:
                self._cache[str(key)] = entry
                count += 1
        return count

    async def close(self) -> None:
        """Cancel the computations that run now."""
        tasks = [entry.task for entry in self._inflight.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _compute(self, key: str, coro_fn: Callable[[], Awaitable[Any]]) -> Any:
        before = _file_of(key)
        try:
            value = await asyncio.wait_for(coro_fn(), self._timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            self._stats.timeouts += 1
            raise TimeoutError(f"{key}: not done within {self._timeout_s:g} s") from None
        except Exception:
            self._stats.failures += 1
            raise
        finally:
            self._inflight.pop(key, None)
            revised = self._revised.pop(key, None)
        self._cache.pop(key, None)
        kept = value if revised is None else revised
        self._cache[key] = CacheEntry(kept, time.time(), *before)
        while len(self._cache) > self._max_results:
            del self._cache[next(iter(self._cache))]
        return value


def _file_of(key: str) -> tuple[int | None, int | None]:
    try:
        status = os.stat(key)
    except (OSError, ValueError):
        return None, None
    return status.st_mtime_ns, status.st_size
