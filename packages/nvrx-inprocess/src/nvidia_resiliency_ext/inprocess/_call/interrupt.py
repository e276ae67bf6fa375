# SPDX-License-Identifier: Apache-2.0
"""Interrupt the main thread: abort, then raise `RankShouldRestart` there until it has left.

The exception is raised in the handler of a signal, so in the main thread; what the main thread does
while it leaves cannot race with it. Helper threads request, wait and request again.
"""

from __future__ import annotations

import _thread
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from nvidia_resiliency_ext.inprocess._unblock.gloo import BlockedCalls
from nvidia_resiliency_ext.inprocess.abort import Abort, run_abort
from nvidia_resiliency_ext.inprocess.state import FrozenState
from nvidia_resiliency_ext.shared_utils.unused_signal import unused_realtime_signal

Handler = Callable[[int, FrameType | None], Any]
F = TypeVar("F", bound=Callable[..., object])


class InterruptSignal:
    """Own an unused real-time signal while the main thread can be interrupted."""

    def __init__(self, handler: Handler) -> None:
        self.number = unused_realtime_signal()
        self._handler = handler
        self._main_ident = threading.get_ident()
        self._previous: Any = None
        self._blocked: set[Any] = set()

    def install(self) -> None:
        self._previous = signal.signal(self.number, self._handler)
        self._blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.number})

    def send(self) -> None:
        """Have the handler called; from any thread, and never after `withdraw` has begun."""
        # Ends a system call; and, for a main thread that blocks all signals, the flag behind it.
        signal.pthread_kill(self._main_ident, self.number)
        _thread.interrupt_main(self.number)  # type: ignore[arg-type]  # real-time: no name

    def withdraw(self) -> None:
        """Give the signal back; a handler that the function has put in the place of ours stays."""
        # What was sent is delivered or taken here: by default it would end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {self.number})
        try:
            while signal.sigtimedwait({self.number}, 0) is not None:
                pass
            if signal.getsignal(self.number) == self._handler:
                signal.signal(self.number, self._previous)
        finally:
            if self.number not in self._blocked:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.number})


_codes: set[CodeType] = set()


def deferred_section(function: F) -> F:
    """Mark a function: nothing is raised in it, nor in what it calls."""
    _codes.add(function.__code__)
    return function


def is_in_deferred_section(frame: FrameType | None) -> bool:
    """Return whether a marked function is running in this frame or around it."""
    while frame is not None:
        if frame.f_code in _codes:
            return True
        frame = frame.f_back
    return False


logger = logging.getLogger("nvrx")
_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class RankShouldRestart(BaseException):
    """Raised in the main thread: the function must be left, and will be called again.

    It is no `Exception`, so that `except Exception` in the function lets it through. Code that
    catches it must raise it again. On level DEBUG a line tells where one has been swallowed.
    """

    __module__ = "nvidia_resiliency_ext.inprocess.monitor_thread"

    interrupter: object = None  # through which it came; None for one that the user's code raises

    def __del__(self) -> None:
        # At the end of the interpreter modules are already empty.
        if not sys.is_finalizing() and logger.isEnabledFor(logging.DEBUG):
            frame = sys._getframe(1)  # noqa: SLF001 - the one way to a frame
            where = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            if not where[0].startswith(_OUR_FOLDER):
                text = "a restart request ended at %s:%d in %s, outside the wrapper: %r"
                logger.debug(text, *where, self.args)


# A signal can come just before the system call that it was to end.
_FIRST_LOOK_S = 0.001

# So many may come too early, or during a call that is about to end.
_FIRST_SIGNALS = 4
_SHORTEST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 1.0
_RAISED, _LOST, _LEFT = "raised", "lost", "left"


def require_main_thread(what: str) -> None:
    """Raise a RuntimeError in any thread but the main one."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"{what} must be called on the main thread: only that thread can be interrupted for a "
            f"restart; this is {threading.current_thread().name!r}"
        )


class AtomicLock:
    """Re-entrant lock held by blocks that must not be interrupted, and by an interrupting thread.

    A thread that waits comes next, even if another one takes the lock over and over. A main thread
    that waits can be interrupted.
    """

    __slots__ = ("_acquire", "_is_own", "_is_waited_for", "_release", "_turn")

    def __init__(self) -> None:
        lock = _thread.RLock()
        self._acquire = lock.acquire
        self._release = lock.release
        # As threading.Condition asks it.
        self._is_own = lock._is_owned  # type: ignore[attr-defined]  # noqa: SLF001
        # Held by the one who is next.
        self._turn = _thread.allocate_lock()
        self._is_waited_for = False

    # The interrupting thread has the lock: nothing is raised in a main thread that has it.

    def __enter__(self) -> None:
        if (self._is_waited_for and not self._is_own()) or not self._acquire(False):
            self._wait()

    def __exit__(self, *_: object) -> None:
        self._release()

    def _wait(self) -> None:
        with self._turn:
            self._is_waited_for = True
            try:
                self._acquire()
            finally:
                self._is_waited_for = False


class Stay:
    """One stay of the main thread inside, and its interruption; helper threads call the methods."""

    def __init__(self, interrupter: MainThreadInterrupter) -> None:
        self.message: str | None = None
        self.is_armed = False
        # Its put may be called by a handler that has interrupted the same thread's put.
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._interrupter = interrupter
        self._has_left = False
        self._raised = 0
        # The kernel's number of the main thread; Python's is the parent's after a fork.
        self._blocked_calls = BlockedCalls(os.getpid())

    def deliver(self) -> None:
        """Raise once; return when it is raised, or the main thread has left."""
        pause_s = _FIRST_LOOK_S
        self.is_armed = True
        sent = 0
        while not self._has_left and self._interrupter.send_signal(self):
            if self._next(pause_s) == _RAISED:
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            sent += 1
            if sent >= _FIRST_SIGNALS:
                # It is in a call that no signal ends.
                self._blocked_calls.end()

    def see_out(self, quiet_s: float, lock: AtomicLock) -> int:
        """Wait until the main thread has left; return how often the exception was raised.

        It is raised again if it was lost, or if the main thread needs longer than `quiet_s`.
        """
        pause_s = _SHORTEST_PAUSE_S
        patience_s = quiet_s
        while not self._has_left:
            event = self._next(patience_s)
            if event == _LOST:
                # In a destructor or a callback. A new one gets the whole time again.
                self._next(pause_s)
                patience_s = quiet_s
            else:
                patience_s = pause_s
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if not self._has_left:
                with lock:
                    self.deliver()
        return self._raised

    def _next(self, timeout_s: float) -> str | None:
        try:
            event = self.events.get(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        except queue.Empty:
            return None
        self._has_left |= event == _LEFT
        self._raised += event == _RAISED
        return event


class MainThreadInterrupter:
    """Interrupt the main thread between `enter` and `leave`, or in a `with` block.

    `RankShouldRestart` leaves the block if, and only if, it was interrupted there, in place of a
    result or an `Exception`; what is no `Exception`, such as `SystemExit`, goes before it.
    """

    def __init__(self) -> None:
        require_main_thread("MainThreadInterrupter")
        # Guards the requests: a message and a signal reach only an stay that is still there.
        self._lock = threading.Lock()
        self._stay: Stay | None = None
        self._signal: InterruptSignal | None = None
        self._hook = self._on_unraisable
        self._previous_hook: Any = None

    @deferred_section
    def __enter__(self) -> None:
        self.enter()

    @deferred_section
    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        message = self.leave()
        if message is None or isinstance(error, RankShouldRestart):
            return
        if error is None or isinstance(error, Exception):
            raise self.request(message)

    def is_of_another(self, request: RankShouldRestart) -> bool:
        """Return whether a request came through another interrupter, of a call around this one."""
        return request.interrupter not in (None, self)

    def request(self, message: str | None) -> RankShouldRestart:
        request = RankShouldRestart(message)
        request.interrupter = self
        return request

    @deferred_section
    def enter(self) -> None:
        require_main_thread("the wrapped function")
        if self._stay is not None:
            raise RuntimeError("the main thread is already inside")
        self._signal = InterruptSignal(self._on_signal)
        try:
            self._signal.install()
            self._previous_hook = sys.unraisablehook
            sys.unraisablehook = self._hook
            self._stay = Stay(self)
        except BaseException:
            self._restore()
            raise

    @deferred_section
    def leave(self) -> str | None:
        """Stop being interruptible; return the interruption's message, if there was one."""
        stay, self._stay = self._stay, None
        try:
            with self._lock:  # no signal is being sent
                if stay is None:
                    return None
                stay.events.put(_LEFT)
                return stay.message
        finally:
            self._restore()

    def _restore(self) -> None:
        try:
            # One that was set inside knows ours as its previous one, and keeps working.
            if sys.unraisablehook is self._hook:
                sys.unraisablehook = self._previous_hook
        finally:
            interrupt_signal, self._signal = self._signal, None
            if interrupt_signal is not None:
                interrupt_signal.withdraw()

    def begin(self, message: str) -> Stay | None:
        """Raise in the main thread, and return when it has the exception or has left.

        None if the main thread was not inside. The caller holds the atomic lock meanwhile.
        """
        with self._lock:
            stay = self._stay
            if stay is None:
                return None
            stay.message = message
        stay.deliver()
        return stay

    def send_signal(self, stay: Stay) -> bool:
        """Have the armed stay's exception raised; `False` when the main thread has left it."""
        with self._lock:
            if self._stay is not stay or self._signal is None:
                return False
            self._signal.send()
            return True

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        stay = self._stay
        if stay is None or not stay.is_armed or is_in_deferred_section(frame):
            return  # too late, again, or not here: in the last case the helper asks again
        stay.is_armed = False
        stay.events.put(_RAISED)
        raise self.request(stay.message)

    @deferred_section
    def _on_unraisable(self, unraisable: Any) -> None:
        stay = self._stay
        if stay is not None and issubclass(unraisable.exc_type, RankShouldRestart):
            stay.events.put(_LOST)
        self._previous_hook(unraisable)


# Of the 30 s between the default soft and hard timeouts. One member may use half of it, as much as
# `AbortTorchDistributed` allows itself.
ABORT_DEADLINE_S = 20.0


def terminate(  # noqa: PLR0913 - one of each part
    abort: Abort | None,
    state: FrozenState,
    interrupter: MainThreadInterrupter,
    lock: AtomicLock,
    pause_watchdog: Callable[[], object],
    message: str,
    *,
    quiet_s: float,
) -> tuple[float, float]:
    """Unblock the main thread and make it leave; from a helper thread, returns when it is out.

    The first unwinding is left undisturbed for `quiet_s`; an abort that is late is abandoned.
    Returns the seconds of the abort, with the wait for the lock, and those of leaving.
    """
    start = time.monotonic()
    with lock:
        try:
            if abort is not None:
                run_abort(abort, state, ABORT_DEADLINE_S)
        except Exception:
            # Whatever a user's abort does, the main thread must leave the function.
            logger.exception("the abort failed")
        aborted = time.monotonic()
        pause_watchdog()
        stay = interrupter.begin(message)
    if stay is not None:
        stay.see_out(quiet_s, lock)
    return aborted - start, time.monotonic() - aborted
