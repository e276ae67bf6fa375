# SPDX-License-Identifier: Apache-2.0
"""Faults of the interpreter and its process: hangs, exceptions, signals."""

from __future__ import annotations

import collections
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from nvidia_resiliency_ext.shared_utils.unused_signal import unused_realtime_signal

from .kinds import Action, InjectedException, on_main_thread_only, refusal

workload_raise_event = threading.Event()
_taking = threading.Lock()

_FOR_EVER_S = 2**31 - 1
_SLICE_S = 0.05
_HELPER = os.path.join(os.path.dirname(__file__), "signal_helper.py")
# A live interpreter answers within its switch interval of 5 ms.
_GRACE_S = 0.025
_GRACE_WITH_CALLBACK_S = 1.0
_WITHDRAW_WAIT_S = 5.0

_waiting: collections.deque[Callable[[], object]] = collections.deque()
_signal: signal.Signals | int | None = None


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
    """Raise `exc_type` in the thread whose `ident` is `tid`, at its next step in Python code.

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
    """Raise `InjectedException` that names `signum`, for `signal.signal`; `frame` is not used.

    Raises:
        InjectedException: Always.
    """
    del frame
    raise InjectedException(f"injected by signal {signum}")


def async_exception() -> Action:
    """Prepare an exception in the main thread."""
    tid = threading.main_thread().ident or 0
    return Action(lambda _: async_raise(tid, InjectedException))


def hold_gil() -> Action:
    """Prepare a call of C code that keeps the GIL for 68 years."""
    import ctypes

    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise refusal("LOCK_GIL", "this interpreter runs without a GIL")
    # Unlike CDLL, PyDLL keeps the GIL during the call.
    sleep = ctypes.PyDLL(None).sleep

    def hold(_: threading.Event) -> None:
        # A signal that this thread took would end the sleep.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        sleep(_FOR_EVER_S)

    return Action(hold)


class SignalException(Action):
    """Owns the handler of SIGUSR1, which raises in the main thread, until it has run once."""

    def __init__(self) -> None:
        on_main_thread_only("SIGNAL_EXC")
        main_thread = threading.main_thread().ident or 0
        super().__init__(lambda _: signal.pthread_kill(main_thread, signal.SIGUSR1), self._disarm)
        self._armed = True
        self._previous = signal.signal(signal.SIGUSR1, self._handle)

    def _disarm(self) -> None:
        self._armed = False
        if threading.current_thread() is threading.main_thread():
            self._restore()

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


def hang() -> Action:
    """Prepare a wait without end in the main thread."""
    _install("HANG")

    def act(stop: threading.Event) -> None:
        _run_in_main_thread(stop.wait)
        stop.wait()

    return Action(act)


def slow_down() -> Action:
    """Prepare that the main thread rests for half of the time."""
    _install("SLOWDOWN")

    def act(stop: threading.Event) -> None:
        while not stop.wait(2 * _SLICE_S):
            if not _waiting:  # else it has not even come to the last rest
                _run_in_main_thread(lambda: stop.wait(_SLICE_S))

    return Action(act)


def _install(fault: str) -> None:
    # The handler stays: its signal would end the process if one came after it is gone.
    global _signal  # noqa: PLW0603 - the process has one main thread
    if _signal is not None:
        return
    on_main_thread_only(fault)
    try:
        number = unused_realtime_signal()
    except RuntimeError as error:
        raise refusal(fault, str(error)) from None
    signal.signal(number, _handle)
    _signal = number


def _run_in_main_thread(function: Callable[[], object]) -> None:
    _waiting.append(function)
    signal.pthread_kill(threading.main_thread().ident or 0, _signal or 0)


def _handle(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    while _waiting:
        _waiting.popleft()()


class SignalFromOutside(Action):
    """Owns the helper process until it has sent the signal or given up."""

    def __init__(self, number: signal.Signals, due: float, *, has_callback: bool) -> None:
        # Not at the top: it brings subprocess, and importing faults is to be cheap.
        from nvidia_resiliency_ext.shared_utils.children import start_child
        from nvidia_resiliency_ext.shared_utils.errors import ChildStartError

        super().__init__(self._send)
        self._has_callback = has_callback
        pid = os.getpid()
        grace = _GRACE_WITH_CALLBACK_S if has_callback else _GRACE_S
        line = f"FAULT INJECTION: {number.name} to process {pid}, whose interpreter is stuck"
        numbers = (str(pid), str(int(number)), repr(due), repr(grace))
        if not sys.executable:
            raise refusal(number.name, "no Python executable is known to send it")
        try:
            self._helper = start_child(
                [sys.executable, "-I", "-S", _HELPER, *numbers, line], stdin=-1, stdout=-3
            )
        except ChildStartError as error:
            raise refusal(number.name, str(error)) from error

    def begin(self) -> None:
        if self._has_callback:
            self._notify(b"b")

    def _send(self, _: threading.Event) -> None:
        self._notify(b"g")
        self._helper.wait()
        self._helper.close()

    def withdraw(self) -> bool:
        if self._helper.stdin is not None:
            self._helper.stdin.close()
        status = self._helper.wait(_WITHDRAW_WAIT_S)
        self._helper.close()
        return status is None or status.code != 0

    def _notify(self, word: bytes) -> None:
        if self._helper.stdin is not None:
            try:
                os.write(self._helper.stdin.fileno(), word)
            except BrokenPipeError:
                return  # it did not hear from us in time and has acted
