# SPDX-License-Identifier: Apache-2.0
"""The faults as plain functions: each waits, logs, calls back and acts, in the calling thread."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from . import gpu
from .actions import Plain
from .dispatch import announce, switched_off
from .interpreter import async_raise
from .kinds import Fault, InjectedException
from .registry import PREPARERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from .actions import Action

    Callback = Callable[[], object] | None

__all__ = [
    "abort",
    "async_raise_exception",
    "gpu_sleep",
    "lock_gil",
    "raise_gpu_error",
    "segfault",
    "send_signal",
    "workload_exception",
]


def workload_exception(delay: float, callback: Callback) -> None:
    """Set the flag that `maybe_raise_workload_exception` reads.

    Args:
        delay: Seconds to wait first.
        callback: Called without arguments just before the fault; None: nothing.
    """
    _make(Fault.WORKLOAD_EXC, delay, callback)


def async_raise_exception(tid: int, delay: float, callback: Callback) -> None:
    """Raise `InjectedException` in a thread.

    Args:
        tid: `ident` of the thread.
        delay: Seconds to wait first.
        callback: Called without arguments just before the fault; None: nothing.
    """
    action = Plain(lambda _: async_raise(tid, InjectedException))
    _run("ASYNC_EXC", action, delay, callback)


def raise_gpu_error(delay: float, callback: Callback) -> None:
    """Trigger a device-side assertion on the current CUDA device.

    Args:
        delay: Seconds to wait first.
        callback: Called without arguments just before the fault; None: nothing.
    """
    _make(Fault.GPU_ERROR, delay, callback)


def gpu_sleep(delay: float, device: Any, callback: Callback) -> None:
    """Start an endless kernel on a device.

    Args:
        delay: Seconds to wait first.
        device: The CUDA device.
        callback: Called without arguments just before the fault; None: nothing.
    """
    action = gpu.gpu_spin_on(gpu.require_cuda("GPU_SLEEP"), device)
    _run("GPU_SLEEP", action, delay, callback)


def lock_gil(delay: float, callback: Callback) -> None:
    """Hold the GIL in C code; does not return.

    Args:
        delay: Seconds to wait first.
        callback: Called without arguments just before the fault; None: nothing.
    """
    _make(Fault.LOCK_GIL, delay, callback)


def segfault(delay: float, callback: Callback) -> None:
    """Read an invalid address.

    Args:
        delay: Seconds to wait first.
        callback: Called without arguments just before the fault; None: nothing.
    """
    _make(Fault.SEGFAULT, delay, callback)


def abort(delay: float, callback: Callback) -> None:
    """Call `abort()`.

    Args:
        delay: Seconds to wait first.
        callback: Called without arguments just before the fault; None: nothing.
    """
    _make(Fault.OS_ABORT, delay, callback)


def send_signal(pid: int, signal: int, delay: float, callback: Callback) -> None:
    """Send a signal to a process.

    Args:
        pid: The process.
        signal: Number of the signal.
        delay: Seconds to wait first.
        callback: Called without arguments just before the fault; None: nothing.
    """
    _run(f"signal {signal} to {pid}", Plain(lambda _: os.kill(pid, signal)), delay, callback)


def _make(fault: Fault, delay: float, callback: Callback) -> None:
    action = PREPARERS[fault](time.monotonic() + delay, callback is not None)
    _run(fault.name, action, delay, callback)


def _run(name: str, action: Action, delay: float, callback: Callback) -> None:
    if switched_off(name):
        return
    time.sleep(delay)
    announce(name)
    if callback is not None:
        callback()
    action.act(threading.Event())
