# SPDX-License-Identifier: Apache-2.0
"""Observe the main thread of a call: its stamps, its waits, its activity and its garbage.

The main thread only calls libc's `sem_post` between two bytecodes, where no exception of a signal
handler can get lost; the thread that waits for it stamps. Waits use poll(), as an exception inside
a condition's bookkeeping can leave its lock in the wrong state.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch

from nvidia_resiliency_ext.inprocess._monitor.messages import WAITED
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.event_loop import WakeUp
from nvidia_resiliency_ext.shared_utils.rank_activity import Frame, stack_of

_SEM_T_BYTES = 64  # at least; 32 with glibc on 64 bit
_libc = ctypes.CDLL(None, use_errno=True)
_sem_post = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_add_pending_call.restype = ctypes.c_int

# The interpreter may call long after the watchdog has gone, so its memory stays for ever.
_semaphores: list[_Semaphore] = []


class Watchdog:
    """Call `stamp` once per interval as long as the main thread runs bytecode."""

    def __init__(self, stamp: Callable[[], object], interval_s: float) -> None:
        self._stamp = stamp
        self._interval_s = interval_s
        self._semaphore = _Semaphore()
        self._stopped = threading.Event()
        # Guards the flag with the stamp, so that none comes after `pause` has returned.
        self._lock = threading.Lock()
        self._is_paused = False
        # Not before `start`: a thread that never ran would hold the page until a collection.
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stamp()
        self._thread = threading.Thread(target=self._run, name="nvrx-watchdog", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Stamp once more, then no more until `resume`; does not wait for the main thread."""
        with self._lock:
            if not self._is_paused:
                self._is_paused = True
                self._stamp()

    def resume(self) -> None:
        """Go on after `pause`, with a stamp; harmless when not paused."""
        with self._lock:
            if self._is_paused:
                self._is_paused = False
                self._stamp()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread and return whether it has ended; harmless when repeated."""
        self._stopped.set()
        self._semaphore.post()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            if self._is_paused or not self._semaphore.request():
                continue
            # As long as the main thread runs no bytecode, this is where the thread stays.
            self._semaphore.wait()
            self._stamp_unless_held()

    def _stamp_unless_held(self) -> None:
        with self._lock:
            if not self._is_paused and not self._stopped.is_set():
                self._stamp()


class _Semaphore:
    def __init__(self) -> None:
        self._memory = (ctypes.c_uint64 * (_SEM_T_BYTES // 8))()
        self._address = ctypes.c_void_p(ctypes.addressof(self._memory))
        _libc.sem_init(self._address, 0, 0)
        _semaphores.append(self)

    def request(self) -> bool:
        """Have the main thread post it; `False` if too many others wait for that."""
        return bool(_add_pending_call(_sem_post, self._address) == 0)

    def post(self) -> None:
        _libc.sem_post(self._address)

    def wait(self) -> None:
        while _libc.sem_wait(self._address) != 0:
            pass  # a signal of the process came to this thread


# Python 3.12 begins with 375 frozen objects; a program that freezes has as many as it imported.
_FROZEN_BY_PYTHON = 2000


@contextlib.contextmanager
def old_objects_frozen() -> Iterator[None]:
    """Keep objects from before a call out of garbage collections until the call ends."""
    # A program's own frozen objects could not be distinguished from ours afterwards.
    is_ours = gc.get_freeze_count() < _FROZEN_BY_PYTHON
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


_MOST_FRAMES = 64

# gloo raises a plain RuntimeError, which names the line of its transport.
_GLOO = "gloo/transport/"


@dataclass(frozen=True, slots=True)
class MainThreadActivity:
    """Call and place that the main thread was in, as fields of `messages.Arrived`."""

    call: str = ""
    place: str = ""


WAITS = MainThreadActivity(WAITED)
"""The function has returned, or has nothing to do: this rank waits for the others."""


def of_main_thread() -> MainThreadActivity:
    """Return the main thread's present activity; called by another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    pairs = itertools.islice(traceback.walk_stack(frame), _MOST_FRAMES)
    stack = stack_of([_of_frame(*pair) for pair in pairs])
    return MainThreadActivity(stack.call.value, stack.place)


def of_raised(error: BaseException) -> MainThreadActivity:
    """Return the activity that raised `error`: a wait in a failed collective, or anything else."""
    if not isinstance(error, torch.distributed.DistError) and _GLOO not in str(error):
        return MainThreadActivity()
    frames = [_of_frame(*pair) for pair in traceback.walk_tb(error.__traceback__)]
    return MainThreadActivity(WAITED, stack_of(frames[: -_MOST_FRAMES - 1 : -1]).place)


def _of_frame(frame: FrameType, line: int | None) -> Frame:
    return frame.f_code.co_filename, line or 0, frame.f_code.co_name


T = TypeVar("T")


class EventQueue:
    """Hold the monitor's events, which any thread adds, and have the main thread wait for them.

    The first event of a class and an iteration counts. A wait is cut into slices of `slice_s`;
    `between` is called at the start of each.
    """

    def __init__(self, slice_s: float, between: Callable[[], object]) -> None:
        self._slice_s = slice_s
        self._between = between
        self._events: dict[tuple[type, int | None], Any] = {}
        self._wake_up = WakeUp()

    def add(self, event: object) -> None:
        self._events.setdefault((type(event), getattr(event, "iteration", None)), event)
        self.wake()

    def wake(self) -> None:
        self._wake_up.set()

    def find(self, kind: type[T], iteration: int | None = None) -> T | None:
        found: T | None = self._events.get((kind, iteration))
        return found

    def wait(self, look: Callable[[], T | None], limit_s: float | None) -> T | None:
        """Call `look` after each event; return its first value, or None after `limit_s`."""
        deadline = Deadline.after(limit_s)
        poll = select.poll()
        poll.register(self._wake_up, select.POLLIN)
        while True:
            self._between()
            self._wake_up.clear()
            found = look()
            if found is not None or deadline.expired():
                return found
            poll.poll(min(self._slice_s, deadline.remaining()) * 1000)

    def forget(self, iteration: int) -> None:
        """Drop the events of an iteration and of those before it."""
        for key in tuple(self._events):
            if key[1] is not None and key[1] <= iteration:
                del self._events[key]

    def close(self) -> None:
        """Close the descriptor; no thread may wait any more."""
        self._wake_up.close()
