# SPDX-License-Identifier: Apache-2.0
"""Owns a thread for what may block, beside a loop that must not; it knows nothing of the jobs."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any

from .event_loop import WakeUp

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WorkerThread"]

logger = logging.getLogger("nvrx")


class WorkerThread:
    """Runs jobs that may block, one after another, and hands their results to the loop.

    The thread starts with the first job. It is a daemon: a job that never returns holds up no
    exit. `fileno` becomes readable when results wait; `collect` runs their callbacks.
    """

    def __init__(self, name: str = "nvrx-slow") -> None:
        """Start nothing yet.

        Args:
            name: The thread's name.
        """
        self._name = name
        self._wake_up = WakeUp()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None]
        self._jobs = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable while results wait."""
        return self._wake_up.fileno()

    def submit(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run `job` in the thread, later `done(result)` in the thread that calls `collect`.

        Args:
            job: May block; an exception is logged and gives None.
            done: Takes the result.

        Raises:
            RuntimeError: The system gives no thread; the job waits for one that a later call gets.
        """
        self._jobs.put((job, done))
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()  # RuntimeError at the limit of threads: the next job tries again
            self._thread = thread

    def wake(self) -> None:
        """Make `fileno` readable; from any thread and from a signal handler, at any time."""
        self._wake_up.set()

    def collect(self) -> None:
        """Run the callbacks of finished jobs."""
        self._wake_up.clear()
        while not self._results.empty():
            done, result = self._results.get()
            done(result)

    def close(self, timeout_s: float = 0.5) -> None:
        """Let the waiting jobs finish, for at most `timeout_s`; one that hangs is left behind."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return
            self._thread = None
        self._wake_up.close()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            try:
                result = job()
            except OSError as error:
                # The machine's fault, not a defect: one line says it.
                logger.error("a job of the thread %s failed: %s", self._name, error)  # noqa: TRY400
                result = None
            except Exception:
                logger.exception("a job of the thread %s failed", self._name)
                result = None
            self._results.put((done, result))
            self.wake()
