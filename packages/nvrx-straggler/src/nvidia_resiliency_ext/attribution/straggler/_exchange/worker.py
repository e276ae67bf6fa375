# SPDX-License-Identifier: Apache-2.0
"""Runs collectives of reports in a thread, so that a missing peer costs a report and not the job.

Every rank runs the same collectives in the same order. A collective that is not done in time
stays in the queue, and so do later ones: when the missing rank arrives, the order still fits.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from nvidia_resiliency_ext.attribution.straggler._errors import StragglerError

__all__ = ["ExchangeSkippedError", "ExchangeWorker"]

logger = logging.getLogger("nvrx")

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 2.0


class ExchangeSkippedError(StragglerError):
    """A collective goes on without its caller: other ranks have not joined it in time."""


class _Job(Generic[T]):
    def __init__(self, run: Callable[[], T]) -> None:
        self.run = run
        self.done = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None


class ExchangeWorker:
    """One daemon thread with a queue of collectives; started by the first one.

    Args:
        timeout_s: How long a caller waits for its collective.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Job[object] | None = None
        self._failure = ""

    def call(self, run: Callable[[], T]) -> T:
        """Run a collective and return its result.

        Raises:
            ExchangeSkippedError: It is not done in time, or an earlier one is not done yet: it runs
                later and its result is lost. Or an earlier one has failed, and no more are run.
            Exception: What the collective raised.
        """
        if self._failure:
            raise ExchangeSkippedError(self._failure)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="nvrx-straggler-exchange", daemon=True
            )
            self._thread.start()
        is_behind = self._last is not None and not self._last.done.is_set()
        job: _Job[T] = _Job(run)
        self._last = job  # type: ignore[assignment]
        self._jobs.put(job)  # type: ignore[arg-type]
        if is_behind:
            raise ExchangeSkippedError("an earlier report still waits for other ranks")
        if not job.done.wait(self._timeout_s):
            raise ExchangeSkippedError(
                f"other ranks have not joined the report within {self._timeout_s:g} s"
            )
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]

    def close(self) -> None:
        """End the thread; one that waits for a rank that never comes is left behind."""
        thread, self._thread = self._thread, None
        self._failure = "the detector is shut down"
        if thread is not None:
            self._jobs.put(None)
            if self._last is None or self._last.done.is_set():
                thread.join(_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            if self._failure:
                job.error = ExchangeSkippedError(self._failure)
            else:
                self._run(job)
            job.done.set()

    def _run(self, job: _Job[object]) -> None:
        try:
            job.result = job.run()
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            job.error = error
            self._failure = f"an earlier collective has failed: {error}"
