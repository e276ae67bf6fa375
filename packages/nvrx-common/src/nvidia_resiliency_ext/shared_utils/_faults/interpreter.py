# SPDX-License-Identifier: Apache-2.0
"""Faults of the Python process itself: exceptions, a held GIL, crashes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from .actions import Action, Plain, on_main_thread_only, refusal
from .kinds import InjectedException

if TYPE_CHECKING:
    from types import FrameType

__all__ = [
    "async_exception",
    "async_raise",
    "clear_workload_exception",
    "crash_by_abort",
    "crash_by_segfault",
    "hold_gil",
    "maybe_raise_workload_exception",
    "signal_exception",
    "termination_signal_handler",
    "workload_exception_flag",
    "workload_raise_event",
]

workload_raise_event = threading.Event()
_taking = threading.Lock()

_FOR_EVER_S = 2**31 - 1


def maybe_raise_workload_exception() -> None:
    """Raise `InjectedException` once after `Fault.WORKLOAD_EXC` has happened.

    The workload calls this where it can bear an exception, such as between two steps.

    Raises:
        InjectedException: The fault has happened since the last call.
    """
    if not workload_raise_event.is_set():
        return
    with _taking:
        taken = workload_raise_event.is_set()
        workload_raise_event.clear()
    if taken:
        raise InjectedException("injected workload exception")


def clear_workload_exception() -> None:
    """Forget a `Fault.WORKLOAD_EXC` that has happened."""
    workload_raise_event.clear()


def async_raise(tid: int, exc_type: type[BaseException]) -> None:
    """Raise an exception in another thread, at its next step in Python code.

    Args:
        tid: The thread's `ident`.
        exc_type: An exception class.

    Raises:
        RuntimeError: There is no such thread.
        TypeError: `exc_type` is no exception class.
    """
    import ctypes

    given: object = exc_type
    if not (isinstance(given, type) and issubclass(given, BaseException)):
        raise TypeError(f"an exception class is needed, not {given!r}")
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    if set_exception(ctypes.c_ulong(tid), ctypes.py_object(exc_type)) == 0:
        raise RuntimeError(f"there is no thread {tid}")


def termination_signal_handler(signum: int, frame: FrameType | None) -> None:
    """Raise `InjectedException`; for `signal.signal`.

    Args:
        signum: Number of the signal.
        frame: Not used.

    Raises:
        InjectedException: Always.
    """
    del frame
    raise InjectedException(f"injected by signal {signum}")


def workload_exception_flag(due: float, has_callback: bool) -> Action:
    """Prepare the flag that `maybe_raise_workload_exception` reads."""
    del due, has_callback
    return Plain(lambda _: workload_raise_event.set())


def async_exception(due: float, has_callback: bool) -> Action:
    """Prepare an exception in the main thread."""
    del due, has_callback
    tid = threading.main_thread().ident or 0
    return Plain(lambda _: async_raise(tid, InjectedException))


def signal_exception(due: float, has_callback: bool) -> Action:
    """Prepare SIGUSR1 with a handler that raises in the main thread."""
    del due, has_callback
    on_main_thread_only("SIGNAL_EXC")
    return _SignalException()


def crash_by_abort(due: float, has_callback: bool) -> Action:
    """Prepare `abort()`."""
    del due, has_callback
    return Plain(lambda _: os.abort())


def crash_by_segfault(due: float, has_callback: bool) -> Action:
    """Prepare an invalid read."""
    del due, has_callback
    import ctypes

    return Plain(lambda _: ctypes.string_at(0))


def hold_gil(due: float, has_callback: bool) -> Action:
    """Prepare a call of C code that keeps the GIL for 68 years."""
    del due, has_callback
    import ctypes

    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise refusal("LOCK_GIL", "this interpreter runs without a GIL")
    # Unlike CDLL, PyDLL keeps the GIL during the call.
    sleep = ctypes.PyDLL(None).sleep

    def hold(_: threading.Event) -> None:
        # A signal that this thread took would end the sleep.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        sleep(_FOR_EVER_S)

    return Plain(hold)


class _SignalException(Action):
    """Owns the handler of SIGUSR1 until it has run once."""

    def __init__(self) -> None:
        self._armed = True
        self._previous = signal.signal(signal.SIGUSR1, self._handle)

    def act(self, stop: threading.Event) -> None:
        del stop
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def withdraw(self) -> bool:
        self._armed = False
        if threading.current_thread() is threading.main_thread():
            self._restore()
        return True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        armed, self._armed = self._armed, False
        self._restore()
        if armed:
            termination_signal_handler(signum, frame)
        # Withdrawn by a thread that could not restore the handler: the signal is not ours.
        os.kill(os.getpid(), signum)

    def _restore(self) -> None:
        # None: a handler that C code had installed, which Python cannot put back.
        if signal.getsignal(signal.SIGUSR1) == self._handle:
            signal.signal(signal.SIGUSR1, self._previous or signal.SIG_DFL)
