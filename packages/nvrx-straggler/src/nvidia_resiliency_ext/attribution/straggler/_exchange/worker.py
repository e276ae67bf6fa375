# SPDX-License-Identifier: Apache-2.0
"""Runs collectives of reports in a thread, so that a missing peer costs a report and not the job.

Every rank runs the same collectives in the same order. A collective that is not done in time
stays in the queue, and so do later ones: when the missing rank arrives, the order still fits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from nvidia_resiliency_ext.attribution.straggler._errors import StragglerError

__all__ = ["Exchange", "ExchangeSkippedError", "ExchangeWorker"]

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 2.0


class ExchangeSkippedError(StragglerError):
    """A collective goes on without its caller: other ranks have not joined it in time."""


class Exchange(Generic[T]):
    """A collective of reports: its result once all ranks have joined."""

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has a result or has failed."""
        return self._done.is_set()

    def run(self) -> None:
        """Run it in this thread and keep what comes of it."""
        try:
            self._result = self._run()
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error
        self._done.set()

    def refuse(self, reason: str) -> None:
        """End it without running it."""
        self._error = ExchangeSkippedError(reason)
        self._done.set()

    @property
    def failure(self) -> str:
        """What it has raised, empty if nothing."""
        return "" if self._error is None else str(self._error)

    def result(self, timeout_s: float) -> T:
        """Return the result, at the latest after `timeout_s`.

        Raises:
            ExchangeSkippedError: Other ranks have not joined by then; it goes on without this
                caller. Or it was not run, because an earlier one has failed.
            Exception: What the collective raised.
        """
        if not self._done.wait(timeout_s):
            raise ExchangeSkippedError(
                f"other ranks have not joined the report within {timeout_s:g} s"
            )
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class ExchangeWorker:
    """One daemon thread with a queue of collectives; started by the first one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Exchange[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Exchange[Any] | None = None
        self._failure = ""

    @property
    def is_behind(self) -> bool:
        """Whether a collective still waits for other ranks."""
        return self._last is not None and not self._last.is_done

    def submit(self, run: Callable[[], T]) -> Exchange[T]:
        """Queue a collective behind those that were submitted before."""
        exchange = Exchange(run)
        if self._failure:
            exchange.refuse(self._failure)
            return exchange
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="nvrx-straggler-exchange", daemon=True
            )
            self._thread.start()
        self._last = exchange
        self._queue.put(exchange)
        return exchange

    def close(self) -> None:
        """End the thread; one that waits for a rank that never comes is left behind."""
        thread, self._thread = self._thread, None
        self._failure = "the detector is shut down"
        if thread is not None:
            self._queue.put(None)
            if not self.is_behind:
                thread.join(_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        while True:
            exchange = self._queue.get()
            if exchange is None:
                return
            if self._failure:
                exchange.refuse(self._failure)
                continue
            exchange.run()
            if exchange.failure:
                self._failure = f"an earlier collective has failed: {exchange.failure}"
