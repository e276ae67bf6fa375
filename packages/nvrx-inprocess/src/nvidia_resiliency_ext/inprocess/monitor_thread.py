# SPDX-License-Identifier: Apache-2.0
"""Interruptions seen in a store end the function in the main thread; how is in `_call/`.

`MonitorThread` is for programs that drive their own loop over a store; the wrapper itself is told
by its monitor.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ._call.gate import AtomicLock, MainThreadGate
from ._call.raising import (
    async_abort_main_thread,
    async_raise,
    delayed_async_raise,
    reraise_if_unraisable,
)
from ._call.restart import RankShouldRestart
from ._call.termination import Phases, terminate
from .attribution import format_interruption_records
from .exception import TimeoutError as ThreadTimeoutError

if TYPE_CHECKING:
    from datetime import timedelta

    from ._abort.base import Abort
    from .progress_watchdog import ProgressWatchdog
    from .state import FrozenState

__all__ = [
    "MonitorThread",
    "RankShouldRestart",
    "async_abort_main_thread",
    "async_raise",
    "delayed_async_raise",
    "reraise_if_unraisable",
]

_EXTRA_S = 5.0


class MonitorThread(threading.Thread):
    """Waits for an interruption of the iteration, then aborts and raises in the main thread.

    Made, started and ended on the main thread, which can be interrupted from `start` on until
    `maybe_join` or `shutdown` is called.

    Args:
        state: State of this rank, given to the abort.
        store: Store of the iteration.
        abort: What unblocks the main thread.
        interval: How long one wait in the store takes at most.
        progress_watchdog: Paused before anything is raised.
        soft_timeout: How long the first unwinding is left in peace.
        last_call_wait: How long further records are waited for.
        atomic_lock: Held by blocks that must not be interrupted.
        daemon: Whether the interpreter may exit without waiting for the thread.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the signature is given
        self,
        state: FrozenState,
        store: Any,
        abort: Abort | None,
        interval: timedelta,
        progress_watchdog: ProgressWatchdog,
        soft_timeout: timedelta,
        last_call_wait: timedelta,
        atomic_lock: AtomicLock,
        daemon: bool = True,
    ) -> None:
        super().__init__(name=f"{type(self).__name__}-{state.rank}", daemon=daemon)
        self.phases: Phases | None = None
        self._state = state
        self._store = store
        self._abort = abort
        self._interval = interval
        self._watchdog = _Paused(progress_watchdog)
        self._soft_timeout = soft_timeout
        self._last_call_wait = last_call_wait
        self._lock = atomic_lock
        self._gate = MainThreadGate()
        self._should_end = threading.Event()
        self._is_interrupted = threading.Event()

    def start(self) -> None:
        """Begin; from here on the main thread can be interrupted."""
        self._gate.enter()
        super().start()

    def run(self) -> None:
        """Wait, and act once."""
        if not self._wait_for_interruption():
            return
        self._is_interrupted.set()
        self._should_end.wait(self._last_call_wait.total_seconds())
        self._store.lock_interruption_records()
        message = format_interruption_records(self._store.get_interruption_records())
        quiet_s = self._soft_timeout.total_seconds()
        self.phases = terminate(
            self._abort,
            self._state,
            self._gate,
            self._lock,
            self._watchdog,
            message,
            quiet_s=quiet_s,
        )

    def maybe_join(self, timeout: float | None = None) -> None:
        """Say that the main thread is out; if there was an interruption, wait for the thread.

        Args:
            timeout: Seconds; by default what an orderly end can take.

        Raises:
            exception.TimeoutError: The thread has not ended.
        """
        self._gate.leave()
        if self._is_interrupted.is_set():
            self._join(timeout)

    def shutdown(self) -> None:
        """End the thread; nothing is raised in the main thread any more.

        Raises:
            exception.TimeoutError: The thread has not ended.
        """
        self._gate.leave()
        self._should_end.set()
        self._join(None)

    def _wait_for_interruption(self) -> bool:
        from torch.distributed import DistStoreError

        while not self._should_end.is_set():
            try:
                self._store.wait_for_interrupted(self._interval)
            except DistStoreError:
                continue
            return not self._should_end.is_set()
        return False

    def _join(self, timeout: float | None) -> None:
        if timeout is None:
            timeout = (5 * self._interval + self._last_call_wait).total_seconds() + _EXTRA_S
        if self.ident is not None:
            self.join(timeout)
        if self.is_alive():
            raise ThreadTimeoutError(f"{self.name} has not ended within {timeout} s")


class _Paused:
    """The watchdog as the termination knows it."""

    def __init__(self, watchdog: ProgressWatchdog) -> None:
        self._watchdog = watchdog

    def pause(self) -> None:
        self._watchdog.pause_and_synchronize()
