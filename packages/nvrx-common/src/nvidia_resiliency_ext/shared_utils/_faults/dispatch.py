# SPDX-License-Identifier: Apache-2.0
"""Which fault is prepared by what, and the handlers that programs have registered."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, final

from . import interpreter, resources
from .interpreter import SignalFromOutside, async_raise
from .kinds import Action, Fault, InjectedException, add_fault

Callback = Callable[[], object]
Handler = Callable[[float, Callback | None], object]

PREPARERS: dict[Fault, Callable[[], Action]] = {
    Fault.GPU_ERROR: resources.gpu_assert,
    Fault.GPU_SLEEP: resources.gpu_spin,
    Fault.WORKLOAD_EXC: lambda: Action(lambda _: interpreter.workload_raise_event.set()),
    Fault.ASYNC_EXC: interpreter.async_exception,
    Fault.SIGNAL_EXC: interpreter.SignalException,
    Fault.OS_ABORT: lambda: Action(lambda _: os.abort()),
    Fault.LOCK_GIL: interpreter.hold_gil,
    Fault.SEGFAULT: lambda: Action(_read_address_0),
    Fault.HANG: interpreter.hang,
    Fault.SLOWDOWN: interpreter.slow_down,
    Fault.CPU_SPIN: lambda: Action(resources.spin),
    Fault.NET_DROP: resources.drop_network,
    Fault.OOM_CPU: lambda: Action(resources.exhaust_memory),
    Fault.OOM_GPU: resources.exhaust_gpu_memory,
    Fault.DISK_FULL: resources.disk_full,
    Fault.CLOCK_SKEW: resources.skew_clock,
}
SIGNALS = {
    fault: signal.Signals[fault.name]
    for fault in (Fault.SIGINT, Fault.SIGKILL, Fault.SIGTERM, Fault.SIGSTOP)
}

_handlers: dict[Fault, Handler] = {}
_registering = threading.Lock()

logger = logging.getLogger("nvidia_resiliency_ext.shared_utils.inject_fault")
_SWITCH = "NVRX_FAULT_INJECTION"
_OFF = frozenset({"0", "false", "no", "off"})
_HANDLER_WAIT_S = 0.05
_JOIN_WAIT_S = 1.0


def register_fault(
    fault_name_or_enum: str | Fault, handler: Callable[[float, Any], object]
) -> Fault:
    """Set the handler of a fault, or add a fault.

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


@final
class DispatchedFault:
    """A dispatched `fault`, as `dispatch_fault_injection` returns it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._lock = threading.Lock()  # guards _fired and _cancelled
        self._fired = False
        self._cancelled = False
        self._action: Action | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def fired(self) -> bool:
        """Whether its time has come and nothing had stopped it."""
        return self._fired

    @property
    def cancelled(self) -> bool:
        """Whether the fault was refused or cancelled in time."""
        return self._cancelled

    def cancel(self) -> bool:
        """Keep the fault from happening, or end one that lasts; return whether nothing happened."""
        with self._lock:
            if not self._fired:
                self._cancelled = True
            withdrawn = self._action if self._cancelled else None
            self._action = None
        if withdrawn is not None and not withdrawn.withdraw():
            self._cancelled, self._fired = False, True
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_WAIT_S)
        return self._cancelled

    def __repr__(self) -> str:
        """Return the fault and where it stands."""
        state = "fired" if self._fired else "cancelled" if self._cancelled else "pending"
        return f"DispatchedFault({self.fault.name}, {state})"

    def _start(self, due: float, callback: Callback | None) -> None:
        self._action = action = _prepare(self.fault, due, callback)
        self._launch(lambda: self._make(due, callback, action))

    def _make(self, due: float, callback: Callback | None, action: Action) -> None:
        self._stop.wait(min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX))
        with self._lock:
            if self._cancelled:
                return
            self._fired = True
        action.begin()
        announce(self.fault.name)
        try:
            if callback is not None:
                callback()
        except Exception:
            logger.exception("the callback of fault %s failed", self.fault.name)
        try:
            action.act(self._stop)
        except Exception:
            logger.exception("fault %s did not happen", self.fault.name)

    def _hand_over(self, handler: Handler, delay: float, callback: Callback | None) -> None:
        # The handler owns the delay; nobody can know whether it could still be stopped.
        self._fired = True
        errors: list[Exception] = []
        returned = threading.Event()

        def run() -> None:
            try:
                handler(delay, callback)
            except Exception as error:
                logger.exception("the handler of fault %s failed", self.fault.name)
                errors.append(error)
            returned.set()

        self._launch(run)
        # A moment for handlers that only take note, and for errors that the caller should see.
        returned.wait(_HANDLER_WAIT_S)
        if errors:
            raise errors[0]

    def _launch(self, target: Callable[[], None]) -> None:
        name = f"nvrx-fault-{self.fault.name}"
        self._thread = threading.Thread(target=target, name=name, daemon=True)
        self._thread.start()


def dispatch_fault_injection(
    fault: Fault, delay: float, callback: Callable[[], object] | None = None
) -> DispatchedFault:
    """Make `fault` happen to this process in `delay` s; return at once, with what cancels it.

    The delay counts from this call; `callback` is called right before the fault, in a background
    thread. `NVRX_FAULT_INJECTION=0` turns it into a warning.

    Raises:
        RuntimeError: The fault is unknown, or this process or machine cannot be given it; the
            message names the fault and what is missing. Nothing was started.
        ValueError: The delay is negative or not finite.
    """
    if not 0.0 <= delay < math.inf:
        raise ValueError(f"a fault happens after 0 or more seconds, not after {delay!r}")
    due = time.monotonic() + delay
    if not isinstance(fault, Fault):
        raise RuntimeError(f"unknown fault {fault!r}")  # noqa: TRY004 - callers catch this one
    dispatched = DispatchedFault(fault)
    if switched_off(fault.name):
        dispatched._cancelled = True  # noqa: SLF001 - its maker
    elif (handler := _handlers.get(fault)) is not None:
        dispatched._hand_over(handler, delay, callback)  # noqa: SLF001
    else:
        dispatched._start(due, callback)  # noqa: SLF001
    return dispatched


def _prepare(fault: Fault, due: float, callback: Callback | None) -> Action:
    if fault in SIGNALS:
        return SignalFromOutside(SIGNALS[fault], due, has_callback=callback is not None)
    if fault not in PREPARERS:
        raise RuntimeError(f"unknown fault {fault!r}")
    return PREPARERS[fault]()


def _read_address_0(_: threading.Event) -> None:
    import ctypes

    ctypes.string_at(0)


def switched_off(name: str) -> bool:
    """Return whether the environment forbids faults; then a line says so."""
    if os.environ.get(_SWITCH, "").strip().lower() not in _OFF:
        return False
    logger.warning("fault %s is refused: %s switches faults off", name, _SWITCH)
    return True


def announce(name: str) -> None:
    """Log the line that says which fault happens now, and where."""
    rank = os.environ.get("RANK", "?")
    logger.critical("FAULT INJECTION: %s in process %d, rank %s", name, os.getpid(), rank)


def workload_exception(delay: float, callback: Callback | None) -> None:
    """Set the flag of `maybe_raise_workload_exception` after `delay` s and `callback()`."""
    _make(Fault.WORKLOAD_EXC, delay, callback)


def async_raise_exception(tid: int, delay: float, callback: Callback | None) -> None:
    """Raise `InjectedException` in thread `tid` (its ident) after `delay` s and `callback()`."""
    action = Action(lambda _: async_raise(tid, InjectedException))
    _run("ASYNC_EXC", action, delay, callback)


def raise_gpu_error(delay: float, callback: Callback | None) -> None:
    """Trigger an assertion of the current CUDA device after `delay` s and `callback()`."""
    _make(Fault.GPU_ERROR, delay, callback)


def gpu_sleep(delay: float, device: Any, callback: Callback | None) -> None:
    """Start an endless kernel on the CUDA `device`, after `delay` s and `callback()`."""
    _run("GPU_SLEEP", resources.gpu_spin(device), delay, callback)


def lock_gil(delay: float, callback: Callback | None) -> None:
    """Hold the GIL in C code after `delay` s and `callback()`; does not return."""
    _make(Fault.LOCK_GIL, delay, callback)


def segfault(delay: float, callback: Callback | None) -> None:
    """Read an invalid address after `delay` s and `callback()`."""
    _make(Fault.SEGFAULT, delay, callback)


def abort(delay: float, callback: Callback | None) -> None:
    """Call `abort()` after `delay` s and `callback()`."""
    _make(Fault.OS_ABORT, delay, callback)


def send_signal(pid: int, signal: int, delay: float, callback: Callback | None) -> None:
    """Send `signal` to the process `pid`, after `delay` s and `callback()`."""
    _run(f"signal {signal} to {pid}", Action(lambda _: os.kill(pid, signal)), delay, callback)


def _make(fault: Fault, delay: float, callback: Callback | None) -> None:
    action = _prepare(fault, time.monotonic() + delay, callback)
    _run(fault.name, action, delay, callback)


def _run(name: str, action: Action, delay: float, callback: Callback | None) -> None:
    if switched_off(name):
        return
    time.sleep(delay)
    announce(name)
    if callback is not None:
        callback()
    action.act(threading.Event())
