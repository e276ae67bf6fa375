# SPDX-License-Identifier: Apache-2.0
"""Calls that may never return: each runs in a thread that is abandoned at a deadline.

Nobody waits for such a thread, not even the interpreter at its exit. One that is inside a library's
native code then stands still (`ParkedAtExit`), as in Python 3.14, and aborts nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError
from nvidia_resiliency_ext.shared_utils.unused_signal import unused_realtime_signal

__all__ = ["AbandonableCall", "DeadlineCaller", "ParkedAtExit", "StuckError", "park"]

T = TypeVar("T")

PARK_S = 1.0
LOOK_S = 0.005

_threads: weakref.WeakSet[ParkedAtExit] = weakref.WeakSet()
_at_exit = threading.Event()


class StuckError(DeadlineExceededError):
    """Call `what` has not returned for `seconds` seconds."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, seconds)
        self.what = what
        self.seconds = seconds

    def __str__(self) -> str:
        return f"{self.what} has not returned for {self.seconds:.1f} s"


class AbandonableCall(Generic[T]):
    """Run a function in a daemon thread for which no caller has to wait.

    `function` takes no argument; its result or exception is kept.

    Attributes:
        name: Name of the call and, after `nvrx-`, of its thread.
        pid: Process in which it runs.
        ended: Set when the function has returned or raised.
    """

    def __init__(self, name: str, function: Callable[[], T]) -> None:
        """Start the thread, or raise `RuntimeError` when the system gives none."""
        self.name = name
        self.pid = os.getpid()
        self.ended = threading.Event()
        self._values: list[T] = []
        self._errors: list[BaseException] = []
        self._start = time.monotonic()
        title = (name if name.startswith("nvrx-") else f"nvrx-{name}")[:60]
        threading.Thread(target=self._run, args=(function,), name=title, daemon=True).start()

    def age_s(self) -> float:
        """Return the seconds since the call began."""
        return time.monotonic() - self._start

    def result(self) -> T:
        """Return the function's result or raise its error; once, after `ended`."""
        try:
            if self._errors:
                raise self._errors[0]
            return self._values[0]
        finally:
            # The error's frames hold this object, which would hold them in turn.
            self._errors.clear()

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._values.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self._errors.append(error)
        finally:
            self.ended.set()


class DeadlineCaller:
    """Runs one call at a time; while one hangs, all later ones fail at once.

    So a hung driver costs one thread, however often it is asked.

    Example:
        >>> DeadlineCaller().run("driver query", lambda: "570.86.10", timeout_s=60.0)
        '570.86.10'
    """

    def __init__(self) -> None:
        self._stuck: AbandonableCall[Any] | None = None
        self._turn = threading.Lock()

    def run(self, what: str, call: Callable[[], Any], timeout_s: float) -> Any:
        """Return the result of `call()` or raise its error; `what` names the call in our errors.

        It waits `timeout_s` seconds for it, and as long for an earlier call.

        Raises:
            StuckError: This call, or an earlier one, does not return in time.
        """
        if not self._turn.acquire(timeout=timeout_s):
            raise StuckError(what, timeout_s)
        try:
            stuck = self._stuck
            # A forked child does not have the threads of its parent.
            if stuck is not None and stuck.pid == os.getpid() and not stuck.ended.is_set():
                raise StuckError(stuck.name, stuck.age_s())
            self._stuck = None
            running = AbandonableCall(what, call)
            if not running.ended.wait(timeout_s):
                self._stuck = running
                raise StuckError(what, running.age_s())
            return running.result()
        finally:
            self._turn.release()


class ParkedAtExit(threading.Thread):
    """A daemon thread that holds nothing that others need while it is in native code.

    It is called `name` and runs `work`; a subclass with a `run` of its own calls `begin` first.
    """

    # None: it cannot be parked.
    parking_signal: int | None = None

    def __init__(self, name: str, work: Callable[[], None] = lambda: None) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work

    def run(self) -> None:
        """Run the work, and let go of it."""
        self.begin()
        work, self._work = self._work, lambda: None
        work()

    def start(self) -> None:
        """Start the thread, after registering the hook that parks it at exit."""
        _register()
        _threads.add(self)
        super().start()

    def begin(self) -> None:
        """Take no signals but the one by which this thread is parked.

        Raises:
            SystemExit: The interpreter goes already; it ends this thread only.
        """
        try:
            number = unused_realtime_signal()
        except RuntimeError:
            return
        wanted = signal.valid_signals() - {number}
        signal.pthread_sigmask(signal.SIG_SETMASK, wanted)
        self.parking_signal = number
        # Whoever parks sets the event first: a thread without a signal by then comes by here.
        if _at_exit.is_set():
            raise SystemExit


def park(thread: ParkedAtExit) -> None:
    """Stop `thread` for good while it waits in the kernel; wait for that for 1 s at most.

    A thread that runs (it may hold a lock of the C library) or has ended is not stopped.
    """
    if thread.parking_signal is None:
        return
    for _ in range(round(PARK_S / LOOK_S)):
        if not thread.is_alive():
            return
        if _waits(thread):
            break
        thread.join(LOOK_S)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(thread.parking_signal, ctypes.cast(libc.pause, ctypes.c_void_p))
    with contextlib.suppress(ProcessLookupError):
        signal.pthread_kill(thread.ident or 0, thread.parking_signal)


@functools.cache
def _register() -> None:
    atexit.register(_park_all)


def _park_all() -> None:
    _at_exit.set()
    for thread in list(_threads):
        if thread.is_alive():
            park(thread)


def _waits(thread: threading.Thread) -> bool:
    """Return whether a thread sleeps in a system call."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"S"
    except OSError:
        return False
