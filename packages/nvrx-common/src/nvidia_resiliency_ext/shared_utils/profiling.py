# SPDX-License-Identifier: Apache-2.0
"""Events of a recovery as log lines, for tools that read logs, and as records.

`shared_utils.events` is the full record of a job; this module keeps the names and the line format
that existing log readers know. Nothing here raises into the caller because of a record.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import index
from typing import Any

from nvidia_resiliency_ext.shared_utils.console import plain

__all__ = [
    "FaultToleranceProfiler", "ProfilingEvent", "ProfilingRecord", "get_profiling_cycle",
    "record_profiling_event", "set_profiling_cycle", "subscribe",
]  # fmt: skip

logger = logging.getLogger("nvrx")

_FILE_VARIABLE = "NVRX_PROFILING_FILE"


class ProfilingEvent(enum.Enum):
    """An event between a failure and the first training after it."""

    FAILURE_DETECTED = "failure_detected"
    WORKER_TERMINATED = "worker_terminated"
    RENDEZVOUS_STARTED = "rendezvous_started"
    HEALTH_CHECK_COMPLETED = "health_check_completed"
    RENDEZVOUS_COMPLETED = "rendezvous_completed"
    WORKER_START_STARTED = "worker_start_started"
    WORKER_START_COMPLETED = "worker_start_completed"
    ATTRIBUTION_GET_STARTED = "attribution_get_started"
    ATTRIBUTION_GET_COMPLETED = "attribution_get_completed"


@dataclass(frozen=True)
class ProfilingRecord:
    """One event that was recorded.

    Attributes:
        id: What `record_event` returned for it.
        event: Which moment, by its value.
        cycle: The cycle that it belongs to.
        node: Of which node, or `None`.
        rank: Of which rank, or `None`.
        t: Wall time, s.
        m: Monotonic time, s: differences of it are durations.
    """

    id: str
    event: str
    cycle: int
    node: str | None
    rank: int | None
    t: float
    m: float


class FaultToleranceProfiler:
    """Counts cycles and records events; all methods may be called from several threads.

    Example:
        >>> profiler = FaultToleranceProfiler()
        >>> identity = profiler.record_event(ProfilingEvent.FAILURE_DETECTED, "node-a")
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _cycle and _subscribers
        self._cycle = 0
        self._subscribers: dict[object, Callable[[ProfilingRecord], object]] = {}
        self._complained = False

    @property
    def cycle(self) -> int:
        """The cycle that events belong to now."""
        return self._cycle

    def set_cycle(self, cycle: int) -> None:
        """Advance to `cycle`; a lower number is ignored with a warning."""
        with self._lock:
            current = self._cycle
            if cycle >= current:
                self._cycle = cycle
                return
        logger.warning("profiling stays at cycle %d: cycle %d is over", current, cycle)

    def record_event(
        self, event: ProfilingEvent, node_id: Any | None = None, rank: int | None = None
    ) -> str:
        """Log `event` of `node_id` and `rank`, tell subscribers and file; return its id.

        A detected failure begins a cycle.
        """
        with self._lock:
            if event is ProfilingEvent.FAILURE_DETECTED:
                self._cycle += 1
            cycle = self._cycle
            now, monotonic = time.time(), time.monotonic()
            subscribers = tuple(self._subscribers.values())
        node = None if node_id is None else _text(node_id)
        shown_node = "unknown" if node is None else node
        try:
            rank = index(rank)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - no event may raise into the caller
            rank = None
        shown_rank = "unknown" if rank is None else rank
        identity = f"{event.value}_{now}_{shown_node}_{shown_rank}"
        record = ProfilingRecord(identity, event.value, cycle, node, rank, now, monotonic)
        whole = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now))
        logger.info(
            "  - Cycle: %d Event: %s Node: %s Rank: %s Time: %s UTC",
            *(cycle, event.value, shown_node, rank, f"{whole}.{int(now * 1000) % 1000:03d}"),
        )
        for subscriber in subscribers:
            try:
                subscriber(record)
            except Exception:
                logger.exception("a subscriber of profiling events failed")
        self._append(record)
        return identity

    def subscribe(self, callback: Callable[[ProfilingRecord], object]) -> Callable[[], None]:
        """Call `callback` with each later record, in its thread; return a function to end this."""
        key = object()
        with self._lock:
            self._subscribers[key] = callback

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers.pop(key, None)

        return unsubscribe

    def _append(self, record: ProfilingRecord) -> None:
        path = os.environ.get(_FILE_VARIABLE)
        if not path:
            return
        import json

        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            line = json.dumps(asdict(record)) + "\n"
            # Opened each time: events are rare, and the file may be moved away in between.
            with open(os.open(path, flags | os.O_NONBLOCK, 0o600), "wb", 0) as file:
                os.write(file.fileno(), line.encode())  # `file.write` tells of no full pipe
        except (OSError, ValueError) as error:
            complained, self._complained = self._complained, True
            if not complained:
                logger.warning("%s: events are not written: %s", _FILE_VARIABLE, error)


_profiler = FaultToleranceProfiler()


def record_profiling_event(
    event: ProfilingEvent, node_id: Any | None = None, rank: int | None = None
) -> str:
    """Record `event` of node `node_id` and `rank` with this process's profiler; return its id."""
    return _profiler.record_event(event, node_id, rank)


def get_profiling_cycle() -> int:
    """Return the cycle of the process's one profiler."""
    return _profiler.cycle


def set_profiling_cycle(cycle: int) -> None:
    """Advance this process's profiler to `cycle`."""
    _profiler.set_cycle(cycle)


def subscribe(callback: Callable[[ProfilingRecord], object]) -> Callable[[], None]:
    """Call `callback` with each later record of this process; return a function that ends this."""
    return _profiler.subscribe(callback)


def _text(value: object) -> str:
    """Return a name, which may be an object of anybody's, as one line."""
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - no event may raise into the caller
        text = f"<{type(value).__name__}>"
    return plain(text)
