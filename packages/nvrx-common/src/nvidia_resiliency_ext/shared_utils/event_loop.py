# SPDX-License-Identifier: Apache-2.0
"""One thread that waits for descriptors and times, and one beside it for what may block."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import queue
import selectors
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Protocol

from nvidia_resiliency_ext.shared_utils.clock import Clock, SystemClock

__all__ = ["EventLoop", "HasFileno", "SignalQueue", "Timer", "WakeUp", "WorkerThread", "ignore"]

# The kernel takes no more than 2**31 ms; waking once an hour costs nothing.
LONGEST_WAIT_S = 3600.0
MOST_CANCELLED = 8
logger = logging.getLogger("nvrx")


class HasFileno(Protocol):
    """An object with a descriptor, such as a socket."""

    def fileno(self) -> int:
        """Return the descriptor."""
        ...


class WakeUp:
    """A descriptor that any thread, or a signal handler, makes readable.

    Example:
        >>> wake_up = WakeUp()
        >>> wake_up.set()
        >>> wake_up.clear()
        >>> wake_up.close()
    """

    def __init__(self) -> None:
        """Open the descriptor, or raise `OSError` when none is left."""
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Reentrant: a signal handler may call `set` in the middle of `close`.
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def fileno(self) -> int:
        """Return the descriptor; -1 after `close`."""
        return self._fd

    def set(self) -> None:
        """Make the descriptor readable; without effect after `close`."""
        with self._guard():
            if self._fd >= 0:  # else the number may be another file's by now
                with contextlib.suppress(BlockingIOError):  # full: readable already
                    os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next `set`; never waits."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor; nobody may wait for it any more. Harmless when repeated."""
        with self._guard():
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _guard(self) -> contextlib.AbstractContextManager[object]:
        # A forked child may have a lock that a thread of its parent held: it is never released.
        return self._lock if os.getpid() == self._pid else contextlib.nullcontext()


class Timer:
    """A call of `callback` at the clock's time `at`; `cancel` forgets it and calls `on_cancel`."""

    __slots__ = ("_callback", "_on_cancel", "at")

    def __init__(
        self, at: float, callback: Callable[[], None], on_cancel: Callable[[], None]
    ) -> None:
        self.at = at
        self._callback: Callable[[], None] | None = callback
        self._on_cancel = on_cancel

    def cancel(self) -> None:
        """Forget the call."""
        if self._callback is not None:
            self._callback = None
            self._on_cancel()

    def fire(self) -> None:
        """Call once."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    @property
    def is_cancelled(self) -> bool:
        """Whether nothing would be called."""
        return self._callback is None


class EventLoop:
    """Callbacks for ready descriptors, for times of a monotonic clock and from other threads.

    One thread only, except for `post` and `wake`. A callback may add and remove anything; what it
    removes is not called any more, also when it was ready in the same round.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        call: Callable[[Callable[[], None]], None] = lambda callback: callback(),
    ) -> None:
        """Watch nothing yet.

        Args:
            clock: Clock of the timers; default: the machine's.
            call: Calls each callback; default: just that, so that an exception ends `run_once`.

        Raises:
            OSError: There are no descriptors left.
        """
        self._clock = clock or SystemClock()
        self._call = call
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._cancelled = 0
        self._posted: deque[Callable[[], None]] = deque()
        self._wake_up = WakeUp()
        self.watch(self._wake_up, self._run_posted)

    def watch(
        self, fileobj: HasFileno | int, callback: Callable[[], None], *, write: bool = False
    ) -> None:
        """Call `callback` whenever the descriptor of `fileobj` is readable or hung up.

        With `write` also whenever it is writable. A descriptor that is watched already gets this
        callback in place of the one that it had.
        """
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        known = self._selector.get_map().get(fileobj)
        if known is not None and (isinstance(fileobj, int) or known.fileobj is not fileobj):
            # The number may be that of a closed file: the kernel has then forgotten it.
            self._selector.unregister(known.fileobj)
            known = None
        if known is None:
            self._selector.register(fileobj, events, callback)
        else:
            self._selector.modify(fileobj, events, callback)

    def unwatch(self, fileobj: HasFileno | int) -> None:
        """Stop watching the descriptor of `fileobj`; unknown and closed ones are ignored."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fileobj)

    def post(self, callback: Callable[[], None]) -> None:
        """Call `callback` once in the loop's thread; from any thread and from a signal handler."""
        self._posted.append(callback)
        self._wake_up.set()

    def wake(self) -> None:
        """End the wait of `run_once`; from any thread and from a signal handler."""
        self._wake_up.set()

    def call_at(self, at: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` once when the clock has reached `at`."""
        timer = Timer(at, callback, self._count_cancelled)
        heapq.heappush(self._timers, (at, next(self._order), timer))
        return timer

    def _count_cancelled(self) -> None:
        """Drop cancelled timers when they are the larger part: each is dropped for O(log n)."""
        self._cancelled += 1
        if self._cancelled > MOST_CANCELLED and 2 * self._cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].is_cancelled]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _pop(self) -> Timer:
        timer = heapq.heappop(self._timers)[2]
        self._cancelled -= timer.is_cancelled
        return timer

    def run_once(self, *, until: float | None = None) -> None:
        """Wait for the next event, at most until `until`, and call what is due."""
        for key, _ in self._selector.select(self._timeout(until)):
            # Callbacks of this round may have closed the descriptor and opened its number again.
            current = self._selector.get_map().get(key.fd)
            if current is not None and current.data == key.data:
                self._call(key.data)
        now = self._clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._call(self._pop().fire)

    def _run_posted(self) -> None:
        self._wake_up.clear()
        try:
            for _ in range(len(self._posted)):
                self._call(self._posted.popleft())
        finally:
            if self._posted:  # An exception ends this round: the others are called in the next.
                self._wake_up.set()

    def _timeout(self, until: float | None) -> float | None:
        while self._timers and self._timers[0][2].is_cancelled:
            self._pop()
        ends = [until] if until is not None else []
        if self._timers:
            ends.append(self._timers[0][0])
        if not ends:
            return None
        return min(max(0.0, min(ends) - self._clock.monotonic()), LONGEST_WAIT_S)

    def close(self) -> None:
        """Release the descriptors; callbacks are dropped."""
        self._selector.close()
        self._wake_up.close()
        self._timers.clear()
        self._posted.clear()


def _ignore(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing: the number arrives through the wakeup descriptor."""


def ignore(signum: signal.Signals) -> None:
    """Let signal `signum` do nothing; in a thread other than the main one nothing is changed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signum, signal.SIG_IGN)


class SignalQueue:
    """Collects signal numbers while it is installed.

    Only the main thread may install handlers; in another thread (a launcher used as a library)
    the queue stays silent and the program keeps its own handlers.

    `signums` are the signals that it collects.
    """

    def __init__(self, signums: Iterable[signal.Signals]) -> None:
        self._signums = tuple(signums)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a signal came."""
        return self._reader.fileno()

    def receive(self) -> list[int]:
        """Return the numbers that came since the last call, in order."""
        try:
            return [number for number in self._reader.recv(4096) if number in self._signums]
        except BlockingIOError:
            return []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Take the signals over for the time of the context, and give them back."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.getsignal(signum) for signum in self._signums}
        if before.get(signal.SIGHUP) is signal.SIG_IGN:
            del before[signal.SIGHUP]  # nohup: who started us wants us to live on
        old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in before:
            signal.signal(signum, _ignore)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler or signal.SIG_DFL)
            signal.set_wakeup_fd(old_fd)

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()


class WorkerThread:
    """Runs jobs that may block, one after another, and hands their results to the loop.

    The thread starts with the first job. It is a daemon: a job that never returns holds up no
    exit. `fileno` becomes readable when results wait; `collect` runs their callbacks.
    """

    def __init__(self, name: str = "nvrx-slow") -> None:
        """Start nothing yet; the thread will be called `name`."""
        self._name = name
        self._wake_up = WakeUp()
        self._jobs = queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None]()
        self._results = queue.SimpleQueue[tuple[Callable[[Any], None], Any]]()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable while results wait."""
        return self._wake_up.fileno()

    def submit(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run `job` in the thread, later `done(result)` in the thread that calls `collect`.

        The job may block; an exception is logged and gives None.

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
        """Let the waiting jobs finish, for at most `timeout_s`; one that hangs is abandoned."""
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
            except BaseException:  # `SystemExit`, too: the next jobs need the thread.
                logger.exception("a job of the thread %s failed", self._name)
                result = None
            self._results.put((done, result))
            self.wake()
