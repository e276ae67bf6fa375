# SPDX-License-Identifier: Apache-2.0
"""Faults that hold up the main thread, through a signal handler of its own.

A handler interrupts blocking calls and runs in the main thread, so what it does there looks like
code of the program: an exception that another handler raises, such as that of SIGTERM, ends it.
"""

from __future__ import annotations

import collections
import signal
import threading
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.unused_signal import unused_realtime_signal

from .actions import Action, Plain, on_main_thread_only, refusal

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["hang", "slow_down"]

_SLICE_S = 0.05

_waiting: collections.deque[Callable[[], object]] = collections.deque()
_signal: signal.Signals | int | None = None


def hang(due: float, has_callback: bool) -> Action:
    """Prepare a wait without end in the main thread."""
    del due, has_callback
    _install("HANG")

    def act(stop: threading.Event) -> None:
        _run_in_main_thread(stop.wait)
        stop.wait()

    return Plain(act)


def slow_down(due: float, has_callback: bool) -> Action:
    """Prepare that the main thread rests for half of the time."""
    del due, has_callback
    _install("SLOWDOWN")

    def act(stop: threading.Event) -> None:
        while not stop.wait(2 * _SLICE_S):
            if not _waiting:  # else it has not even come to the last rest
                _run_in_main_thread(lambda: stop.wait(_SLICE_S))

    return Plain(act)


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
