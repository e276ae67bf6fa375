# SPDX-License-Identifier: Apache-2.0
"""Ranks that check each other by heartbeats in the store, for programs without a monitor.

The wrapper does not use these threads: there one monitor per node watches the next node.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from datetime import timedelta
from typing import Any

from nvidia_resiliency_ext.inprocess._inputs import check_duration
from nvidia_resiliency_ext.inprocess._monitor.timeouts import Ring
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.exception import RestartError

__all__ = ["Heartbeat", "SiblingMonitor"]

logger = logging.getLogger("nvrx")

_AT_ONCE = timedelta(0)


class _Periodic(threading.Thread):
    """Daemon thread `name` that does one thing once per `interval` until it is shut down."""

    def __init__(self, name: str, interval: timedelta) -> None:
        check_duration("interval", interval)
        super().__init__(name=name, daemon=True)
        self._interval_s = interval.total_seconds()
        self._should_end = threading.Event()

    def run(self) -> None:
        """Run once per interval, the first time at once."""
        while True:
            try:
                self._do()
            except Exception as error:  # noqa: BLE001 - stores raise all sorts
                logger.warning("%s: %s", self.name, error)
            if self._should_end.wait(self._interval_s):
                return

    def shutdown(self, timeout: timedelta | None = None) -> None:
        """End the thread and wait for it, for `timeout` at most."""
        self._should_end.set()
        self.join(None if timeout is None else timeout.total_seconds())

    def _do(self) -> None:
        raise NotImplementedError


class Heartbeat(_Periodic):
    """Renews the heartbeat of a rank.

    Args:
        rank: Whose.
        store: A `StoreMixin` that nobody else uses.
        interval: How often.
        timeout: Age of a heartbeat at which others regard the rank as lost.
    """

    def __init__(self, rank: int, store: Any, interval: timedelta, timeout: timedelta) -> None:
        check_duration("timeout", timeout)
        super().__init__(f"Heartbeat-{rank}", interval)
        self.rank = rank
        self.timeout = timeout
        self._store = store

    def _do(self) -> None:
        self._store.send_heartbeat(self.rank)


class SiblingMonitor(_Periodic):
    """Checks the heartbeat of the next rank, and of all ranks when that one is late.

    It measures with this host's clock whether a heartbeat changes; clocks are not compared.

    Args:
        store: A `StoreMixin` of the iteration that nobody else uses.
        rank: Who watches.
        world_size: Ranks of the iteration.
        initial_world_size: Ranks at the start.
        timeout: How long a heartbeat may stay unchanged.
        interval: How often to look.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        initial_world_size: int,
        timeout: timedelta,
        interval: timedelta,
    ) -> None:
        check_duration("timeout", timeout)
        super().__init__(f"SiblingMonitor-{rank}", interval)
        self.rank = rank
        self._store = store
        self._world_size = world_size
        self._initial_world_size = initial_world_size
        self._ring = Ring(interval.total_seconds(), timeout.total_seconds())
        self._ring.update({each: (each,) for each in range(world_size)})

    def _do(self) -> None:
        wanted = self._ring.to_read(self.rank, range(self._world_size))
        values = {each: self._store.get_heartbeat(each) for each in wanted}
        beats = {each: int(value * 1e6) for each, value in values.items() if value is not None}
        lost = self._ring.looked(beats, time.monotonic())
        if not lost:
            return
        logger.warning("%s: no sign of ranks %s", self.name, lost)
        self._store.record_interrupted(
            [InterruptionRecord(rank, Interruption.UNRESPONSIVE) for rank in lost]
        )
        self._store.record_terminated_ranks(lost)
        initial = self._store.get_initial_ranks(lost)
        base = getattr(self._store, "base_store", self._store)
        # That not everybody has arrived is no matter of ours.
        with contextlib.suppress(RestartError):
            self._store.iteration_barrier(lost, self._world_size, _AT_ONCE)
        with contextlib.suppress(RestartError):
            base.termination_barrier(initial, self._initial_world_size, _AT_ONCE)
