# SPDX-License-Identifier: Apache-2.0
"""Interrupt the function when a store reports an interruption; raise exceptions in other threads.

`MonitorThread` is for programs that run their own loop over a store; the wrapper's own way is
`_call/interrupt.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ._call.interrupt import (
    AtomicLock,
    MainThreadInterrupter,
    RankShouldRestart,
    deferred_section,
    is_in_deferred_section,
    terminate,
)
from .abort import Abort
from .attribution import format_interruption_records
from .exception import TimeoutError as ThreadTimeoutError
from .state import FrozenState

if TYPE_CHECKING:
    from .progress_watchdog import ProgressWatchdog

__all__ = [
    "MonitorThread", "RankShouldRestart", "async_abort_main_thread", "async_raise",
    "delayed_async_raise", "reraise_if_unraisable",
]  # fmt: skip

_PACE_S = 0.01
_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = [ctypes.c_ulong, ctypes.py_object]
_set_async_exc.restype = ctypes.c_int


def async_raise(
    tid: int, exc_type: type[BaseException], event: threading.Event | None = None
) -> None:
    """Raise an exception in a thread, between two bytecodes; does nothing at interpreter exit.

    Args:
        tid: Identifier of the thread.
        exc_type: Class of the exception.
        event: Waited for first.

    Raises:
        RuntimeError: There is no such thread, or several would be hit; then none is.
    """
    if event is not None:
        event.wait()
    if sys.is_finalizing():
        return
    hit = _set_async_exc(tid, exc_type)
    if hit == 0:
        raise RuntimeError(f"no thread has the identifier {tid}")
    if hit > 1:
        _set_async_exc(tid, ctypes.py_object())  # nothing, which `None` would not be
        raise RuntimeError(f"{hit} threads have the identifier {tid}; nothing was raised")


def delayed_async_raise(tid: int, exc_type: type[BaseException]) -> None:
    """Raise `exc_type` in the thread of identifier `tid` a moment later, from a helper thread.

    It waits until the thread is out of a function that could not pass the exception on.
    """

    def raise_outside() -> None:
        _wait_until_outside(tid)
        with contextlib.suppress(RuntimeError):  # the thread may have ended
            async_raise(tid, exc_type)

    _in_helper_thread(raise_outside)


def async_abort_main_thread(msg: str | None = None) -> None:
    """Raise `RankShouldRestart` in the main thread, with `msg` as argument if there is one."""
    ident = threading.main_thread().ident
    if ident is not None:
        async_raise(ident, RankShouldRestart if msg is None else _with_message(msg))


@contextlib.contextmanager
def reraise_if_unraisable(exc_type: type[BaseException]) -> Iterator[None]:
    """Raise exceptions of `exc_type` again that were raised where Python cannot pass them on.

    In a destructor or a callback Python only reports them to `sys.unraisablehook`. While this is
    active they are raised once more in the main thread. The hook that was there is called, too,
    and is there again afterwards.

    Example:
        >>> with reraise_if_unraisable(RuntimeError):
        ...     total = sum(range(10))
    """
    previous = sys.unraisablehook
    main_ident = threading.main_thread().ident
    # Guards what was lost: it is raised by a helper thread, or at the end of this, not by both.
    lock = threading.Lock()
    lost: list[type[BaseException]] = []

    @deferred_section
    def hook(unraisable: Any) -> None:
        try:
            previous(unraisable)
        finally:
            if main_ident is not None and issubclass(unraisable.exc_type, exc_type):
                lost.append(unraisable.exc_type)
                _in_helper_thread(raise_lost)

    def raise_lost() -> None:
        _wait_until_outside(main_ident)
        with lock:
            # The same one several times is one.
            if lost and main_ident is not None:
                async_raise(main_ident, lost[0])
                lost.clear()

    def end() -> list[type[BaseException]]:
        # One that was set meanwhile knows ours as its previous one, and keeps working.
        if sys.unraisablehook is hook:
            sys.unraisablehook = previous
        with lock:
            left, lost[:] = lost[:], []
            return left

    sys.unraisablehook = hook
    try:
        yield
    except BaseException:
        end()
        raise
    left = end()
    if left:
        raise left[0]


def _in_helper_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="nvrx-delayed-raise", daemon=True).start()


def _wait_until_outside(tid: int | None) -> None:
    elsewhere = threading.Event()
    while tid is not None and is_in_deferred_section(sys._current_frames().get(tid)):  # noqa: SLF001 - the way
        elsewhere.wait(_PACE_S)


def _with_message(msg: str) -> type[RankShouldRestart]:
    # The interpreter takes classes only, and calls them without arguments.
    class WithMessage(RankShouldRestart):
        def __new__(cls) -> RankShouldRestart:  # type: ignore[misc]
            return RankShouldRestart(msg)

    return WithMessage


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
        self._state = state
        self._store = store
        self._abort = abort
        self._interval = interval
        self._watchdog = progress_watchdog
        self._soft_timeout = soft_timeout
        self._last_call_wait = last_call_wait
        self._lock = atomic_lock
        self._interrupter = MainThreadInterrupter()
        self._should_end = threading.Event()
        self._is_interrupted = threading.Event()

    def start(self) -> None:
        """Begin; from here on the main thread can be interrupted."""
        self._interrupter.enter()
        super().start()

    def run(self) -> None:
        """Wait, and act once."""
        if not self._wait_for_interruption():
            return
        self._is_interrupted.set()
        self._should_end.wait(self._last_call_wait.total_seconds())
        self._store.lock_interruption_records()
        message = format_interruption_records(self._store.get_interruption_records())
        terminate(
            self._abort,
            self._state,
            self._interrupter,
            self._lock,
            self._watchdog.pause_and_synchronize,
            message,
            quiet_s=self._soft_timeout.total_seconds(),
        )

    def maybe_join(self, timeout: float | None = None) -> None:
        """Report that the main thread is out; after an interruption, wait for the thread.

        Args:
            timeout: Seconds; by default what an orderly end can take.

        Raises:
            exception.TimeoutError: The thread has not ended.
        """
        self._interrupter.leave()
        if self._is_interrupted.is_set():
            self._join(timeout)

    def shutdown(self) -> None:
        """End the thread; nothing is raised in the main thread any more.

        Raises:
            exception.TimeoutError: The thread has not ended.
        """
        self._interrupter.leave()
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
