# SPDX-License-Identifier: Apache-2.0
"""Stamps that show that the main thread still runs bytecode. What is too old is not decided here.

The interpreter is asked to make the main thread call a function between two bytecodes. That
function is libc's `sem_post`: no Python code runs in the main thread, so no exception, of a signal
handler say, can get lost there. The thread that waits for it stamps at once.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Protocol

__all__ = ["Stamped", "Watchdog"]

_SEM_T_BYTES = 64  # at least; 32 with glibc on 64 bit

_libc = ctypes.CDLL(None, use_errno=True)
_sem_post = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_add_pending_call.restype = ctypes.c_int

# The interpreter may call long after the watchdog has gone, so its memory stays for ever.
_semaphores: list[_Semaphore] = []


class Stamped(Protocol):
    """What keeps the stamp."""

    def stamp_auto(self) -> object:
        """Note that the main thread runs bytecode now."""
        ...


class Watchdog:
    """A thread that has the main thread show, once per interval, that it makes progress.

    Args:
        target: Gets the stamps, from this thread, and from the one that pauses or stops it.
        interval_s: Seconds between two stamps.
    """

    def __init__(self, target: Stamped, interval_s: float) -> None:
        self._target = target
        self._interval_s = interval_s
        self._semaphore = _Semaphore()
        self._stopped = threading.Event()
        # Guards the flag with the stamp, so that none comes after `pause` has returned.
        self._lock = threading.Lock()
        self._is_paused = False
        self._is_started = False
        self._thread = threading.Thread(target=self._run, name="nvrx-watchdog", daemon=True)

    def start(self) -> None:
        """Begin, with a stamp."""
        self._target.stamp_auto()
        self._thread.start()
        self._is_started = True

    def pause(self) -> None:
        """Stamp once more, then no more until `resume`; does not wait for the main thread."""
        with self._lock:
            if not self._is_paused:
                self._is_paused = True
                self._target.stamp_auto()

    def resume(self) -> None:
        """Go on after `pause`, with a stamp; harmless when not paused."""
        with self._lock:
            if self._is_paused:
                self._is_paused = False
                self._target.stamp_auto()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread; harmless when repeated.

        Returns:
            Whether it has ended.
        """
        self._stopped.set()
        self._semaphore.post()
        if self._is_started:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _stamp_unless_held(self) -> None:
        if not self._is_paused and not self._stopped.is_set():
            self._target.stamp_auto()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            if self._is_paused or not self._semaphore.request():
                continue
            # As long as the main thread runs no bytecode, this is where the thread stays.
            self._semaphore.wait()
            with self._lock:
                self._stamp_unless_held()


class _Semaphore:
    """A semaphore of libc."""

    def __init__(self) -> None:
        self._memory = (ctypes.c_uint64 * (_SEM_T_BYTES // 8))()
        self._address = ctypes.c_void_p(ctypes.addressof(self._memory))
        _libc.sem_init(self._address, 0, 0)
        _semaphores.append(self)

    def request(self) -> bool:
        """Have the main thread post it; `False` if too many others wait for that."""
        return bool(_add_pending_call(_sem_post, self._address) == 0)

    def post(self) -> None:
        """Post it."""
        _libc.sem_post(self._address)

    def wait(self) -> None:
        """Wait until it is posted."""
        while _libc.sem_wait(self._address) != 0:
            pass  # a signal of the process came to this thread
