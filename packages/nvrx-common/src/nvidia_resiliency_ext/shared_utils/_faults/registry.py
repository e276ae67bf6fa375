# SPDX-License-Identifier: Apache-2.0
"""Which fault is prepared by what, and the handlers that programs have registered."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

from . import clock_skew, gpu, interpreter, main_thread, resources
from .kinds import Fault, add_fault
from .signals import signal_from_outside

if TYPE_CHECKING:
    from collections.abc import Callable

    from .actions import Preparer

    Callback = Callable[[], object]
    Handler = Callable[[float, Callback | None], object]

__all__ = ["PREPARERS", "handler_of", "register_fault"]

PREPARERS: dict[Fault, Preparer] = {
    Fault.GPU_ERROR: gpu.gpu_assert,
    Fault.GPU_SLEEP: gpu.gpu_spin,
    Fault.WORKLOAD_EXC: interpreter.workload_exception_flag,
    Fault.ASYNC_EXC: interpreter.async_exception,
    Fault.SIGNAL_EXC: interpreter.signal_exception,
    Fault.OS_ABORT: interpreter.crash_by_abort,
    Fault.LOCK_GIL: interpreter.hold_gil,
    Fault.SEGFAULT: interpreter.crash_by_segfault,
    Fault.SIGINT: signal_from_outside(signal.SIGINT),
    Fault.SIGKILL: signal_from_outside(signal.SIGKILL),
    Fault.SIGTERM: signal_from_outside(signal.SIGTERM),
    Fault.SIGSTOP: signal_from_outside(signal.SIGSTOP),
    Fault.HANG: main_thread.hang,
    Fault.SLOWDOWN: main_thread.slow_down,
    Fault.CPU_SPIN: resources.spin,
    Fault.NET_DROP: resources.drop_network,
    Fault.OOM_CPU: resources.exhaust_memory,
    Fault.OOM_GPU: gpu.exhaust_gpu_memory,
    Fault.DISK_FULL: resources.disk_full,
    Fault.CLOCK_SKEW: clock_skew.skew_clock,
}

_handlers: dict[Fault, Handler] = {}
_registering = threading.Lock()


def register_fault(
    fault_name_or_enum: str | Fault, handler: Callable[[float, Any], object]
) -> Fault:
    """Set what a fault does, or add one.

    A new name gets the largest number so far plus one: ranks that exchange numbers must register
    the same names in the same order.

    Args:
        fault_name_or_enum: A fault, or a name. A new name should be in upper case, as Megatron-LM
            looks faults up by their upper-cased names.
        handler: Called at the dispatch, in a thread of its own, as `handler(delay, callback)`. It
            waits `delay` seconds, calls `callback` unless that is `None`, and makes the fault.

    Returns:
        The fault, also reachable as `Fault["NAME"]`, `Fault.NAME` and `Fault(number)`.

    Raises:
        TypeError: The handler cannot be called, or the first argument is neither name nor fault.
        ValueError: The name is not one that an enum can have.
    """
    if not callable(handler):
        raise TypeError(f"a handler is called with delay and callback; {handler!r} cannot be")
    if not isinstance(fault_name_or_enum, (str, Fault)):
        raise TypeError(f"a fault or its name is needed, not {fault_name_or_enum!r}")
    with _registering:
        if isinstance(fault_name_or_enum, Fault):
            fault = fault_name_or_enum
        else:
            fault = add_fault(fault_name_or_enum)
        _handlers[fault] = handler
    return fault


def handler_of(fault: Fault) -> Handler | None:
    """Return the handler that a program has registered for the fault."""
    return _handlers.get(fault)
