# SPDX-License-Identifier: Apache-2.0
"""Gets the main thread out of the function: raises `RankShouldRestart` there, once it is asked to.

All that raises runs in the main thread, as the handler of a signal; so what the main thread does at
its leave cannot race with it. Helper threads ask, wait, and ask again.
"""

from __future__ import annotations

import _thread
import queue
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .nudge import Nudge
from .restart import RankShouldRestart
from .shield import is_shielded, shielded
from .stuck import StuckCalls

if TYPE_CHECKING:
    from types import FrameType, TracebackType

__all__ = ["AtomicLock", "Interruption", "MainThreadGate", "Raised", "require_main_thread"]

# A signal can come just before the system call that it was to end.
_FIRST_LOOK_S = 0.001
# So often it may come too early, or meet a call that is about to end.
_NUDGES = 4
_SHORTEST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 1.0

_RAISED, _LOST, _LEFT = "raised", "lost", "left"


def require_main_thread(what: str) -> None:
    """Refuse any thread but the main one.

    Args:
        what: What needs it, for the message.

    Raises:
        RuntimeError: The calling thread is another one.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"{what} must be called on the main thread: only that thread can be interrupted for a "
            f"restart; this is {threading.current_thread().name!r}"
        )


class AtomicLock:
    """Held by a block that must not be interrupted, and by whoever interrupts.

    Re-entrant. Who waits comes next, even if another thread takes it over and over. A main thread
    that waits for it can be interrupted.
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

    # Whoever interrupts holds the lock: nothing is raised in a thread that has it.

    def __enter__(self) -> None:
        if (self._is_waited_for and not self._is_own()) or not self._acquire(False):
            self._wait()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()

    def _wait(self) -> None:
        with self._turn:
            self._is_waited_for = True
            try:
                self._acquire()
            finally:
                self._is_waited_for = False


@dataclass(frozen=True, slots=True)
class Raised:
    """How an interruption went.

    Attributes:
        first_s: Seconds until the main thread had the exception; `None` if it left by itself.
        left_s: Seconds until it had left.
        count: How often it was raised.
    """

    first_s: float | None
    left_s: float
    count: int


class _Entry:
    """One stay of the main thread inside; nothing of it is used for the next one."""

    def __init__(self) -> None:
        self.message: str | None = None
        self.is_armed = False
        # Its put may be called by a handler that has interrupted the same thread's put.
        self.news: queue.SimpleQueue[str] = queue.SimpleQueue()


class MainThreadGate:
    """Where the main thread can be interrupted: between `enter` and `leave`.

    Raises:
        RuntimeError: It was made on another thread than the main one.
    """

    def __init__(self) -> None:
        require_main_thread("MainThreadGate")
        # Guards the requests: a message and a signal reach only an entry that is still there.
        self._lock = threading.Lock()
        self._entry: _Entry | None = None
        self._nudge: Nudge | None = None
        self._hook = self._on_unraisable
        self._previous_hook: Any = None

    def inside(self) -> _Inside:
        """Return a context manager around what may be interrupted.

        `RankShouldRestart` leaves it if, and only if, it was interrupted while the main thread
        was inside; it takes the place of a result and of an `Exception`. Only what the function
        raises that is no `Exception`, such as `SystemExit`, goes before it.
        """
        return _Inside(self)

    def is_of_another(self, request: RankShouldRestart) -> bool:
        """Say whether a request came through another gate, of a call around this one."""
        return request.gate not in (None, self)

    def request(self, message: str | None) -> RankShouldRestart:
        """Return the exception of an interruption here."""
        request = RankShouldRestart(message)
        request.gate = self
        return request

    @shielded
    def enter(self) -> None:
        """Begin to be interruptible.

        Raises:
            RuntimeError: Not on the main thread, or already inside.
        """
        require_main_thread("the wrapped function")
        if self._entry is not None:
            raise RuntimeError("the main thread is already inside")
        self._nudge = Nudge(self._on_nudge)
        try:
            self._nudge.install()
            self._previous_hook = sys.unraisablehook
            sys.unraisablehook = self._hook
            self._entry = _Entry()
        except BaseException:
            self._restore()
            raise

    @shielded
    def leave(self) -> str | None:
        """Stop being interruptible; from the first statement on nothing is raised any more.

        Returns:
            The message of the interruption that there was, raised or not.
        """
        entry, self._entry = self._entry, None
        try:
            with self._lock:  # whoever is sending has sent
                if entry is None:
                    return None
                entry.news.put(_LEFT)
                return entry.message
        finally:
            self._restore()

    def _restore(self) -> None:
        try:
            # One that was set inside knows ours as its previous one, and keeps working.
            if sys.unraisablehook is self._hook:
                sys.unraisablehook = self._previous_hook
        finally:
            nudge, self._nudge = self._nudge, None
            if nudge is not None:
                nudge.withdraw()

    def begin(self, message: str) -> Interruption | None:
        """Raise in the main thread, and return when it has the exception or has left.

        The caller holds the atomic lock, and gives it back before it sees the main thread out.

        Returns:
            `None` if the main thread was not inside, and nothing was done.
        """
        with self._lock:
            entry = self._entry
            if entry is None:
                return None
            entry.message = message
        interruption = Interruption(self, entry)
        interruption.deliver()
        return interruption

    def nudge(self, entry: _Entry) -> bool:
        """Have the armed entry's exception raised; `False` when the main thread has left it."""
        with self._lock:
            if self._entry is not entry or self._nudge is None:
                return False
            self._nudge.send()
            return True

    def _on_nudge(self, _number: int, frame: FrameType | None) -> None:
        entry = self._entry
        if entry is None or not entry.is_armed or is_shielded(frame):
            return  # too late, again, or not here: in the last case the helper asks again
        entry.is_armed = False
        entry.news.put(_RAISED)
        raise self.request(entry.message)

    @shielded
    def _on_unraisable(self, unraisable: Any) -> None:
        entry = self._entry
        if entry is not None and issubclass(unraisable.exc_type, RankShouldRestart):
            entry.news.put(_LOST)
        self._previous_hook(unraisable)


class Interruption:
    """One request to leave, as the helper thread sees it.

    Args:
        gate: Where.
        entry: The stay that is to end.
    """

    def __init__(self, gate: MainThreadGate, entry: _Entry) -> None:
        self._gate = gate
        self._entry = entry
        self._start = time.monotonic()
        self._first_s: float | None = None
        self._left_s: float | None = None
        self._count = 0
        native_id = threading.main_thread().native_id
        assert native_id is not None
        self._stuck = StuckCalls(native_id)

    def deliver(self) -> None:
        """Raise once; return when it is raised, or the main thread has left."""
        pause_s = _FIRST_LOOK_S
        self._entry.is_armed = True
        nudges = 0
        while self._left_s is None and self._gate.nudge(self._entry):
            if self._next(pause_s) == _RAISED:
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            nudges += 1
            if nudges >= _NUDGES:
                # It is in a call that no signal ends.
                self._stuck.end()

    def see_out(self, quiet_s: float, lock: AtomicLock) -> Raised:
        """Wait until the main thread has left; raise again if it was lost or takes too long."""
        pause_s = _SHORTEST_PAUSE_S
        patience_s = quiet_s
        while self._left_s is None:
            news = self._next(patience_s)
            if news == _LOST:
                # In a destructor or a callback. A new one gets the whole time again.
                self._next(pause_s)
                patience_s = quiet_s
            else:
                patience_s = pause_s
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if self._left_s is None:
                with lock:
                    self.deliver()
        return Raised(self._first_s, self._left_s, self._count)

    def _next(self, timeout_s: float) -> str | None:
        try:
            news = self._entry.news.get(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        except queue.Empty:
            return None
        elapsed_s = time.monotonic() - self._start
        if news == _LEFT:
            self._left_s = elapsed_s
        if news == _RAISED:
            self._count += 1
            self._first_s = elapsed_s if self._first_s is None else self._first_s
        return news


class _Inside:
    def __init__(self, gate: MainThreadGate) -> None:
        self._gate = gate

    @shielded
    def __enter__(self) -> None:
        self._gate.enter()

    @shielded
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        message = self._gate.leave()
        if message is None or isinstance(error, RankShouldRestart):
            return
        if error is None or isinstance(error, Exception):
            raise self._gate.request(message)
