# SPDX-License-Identifier: Apache-2.0
"""Threads that are inside a library's native code when the interpreter goes: they never come back.

torch cannot be told to stop connecting to a store, and goes on for up to a minute. A thread that
comes back from it while the interpreter is taken down aborts the process (before Python 3.14, which
lets such threads stand still). A process that is ours leaves without that (`program_end`); one that
is somebody else's must not, so there the threads are made to stand still: by a signal that only
they take, and whose handler is `pause`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import signal
import threading
import weakref

from .unused_signal import unused_realtime_signal

__all__ = ["ParkedAtExit", "park"]

PARK_S = 1.0
LOOK_S = 0.005

_threads: weakref.WeakSet[ParkedAtExit] = weakref.WeakSet()
_at_exit = threading.Event()


class ParkedAtExit(threading.Thread):
    """A daemon thread that holds nothing that others need while it is in native code.

    Its `run` calls `begin` first.

    `name` is the thread's name.
    """

    # None: it cannot be parked.
    parking_signal: int | None = None

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; what parks it at exit is registered first."""
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
    """Stop a thread for good while it waits in the kernel; wait for that for 1 s at most.

    It is waited for, for 1 s at most: whoever runs may hold a lock of the C library.

    A thread that runs is not stopped: it may hold a lock of the C library. One that has ended is
    ignored.

    Args:
        thread: The thread.
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
