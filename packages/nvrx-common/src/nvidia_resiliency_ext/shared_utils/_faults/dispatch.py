# SPDX-License-Identifier: Apache-2.0
"""From a dispatch to its moment: refusal, waiting, cancelling. What happens then is elsewhere."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from typing import TYPE_CHECKING, final

from .kinds import Fault
from .registry import PREPARERS, handler_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .actions import Action
    from .registry import Callback, Handler

__all__ = ["DispatchedFault", "announce", "dispatch_fault_injection", "switched_off"]

logger = logging.getLogger("nvidia_resiliency_ext.shared_utils.inject_fault")

_SWITCH = "NVRX_FAULT_INJECTION"
_OFF = frozenset({"0", "false", "no", "off"})
_HANDLER_WAIT_S = 0.05
_JOIN_WAIT_S = 1.0


@final
class DispatchedFault:
    """A fault that was dispatched; returned by `dispatch_fault_injection`.

    Attributes:
        fault: What was dispatched.
    """

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
        """Whether it was refused or cancelled in time."""
        return self._cancelled

    def cancel(self) -> bool:
        """Keep the fault from happening, or end one that lasts and can be ended.

        Returns:
            Whether it was cancelled in time, so that nothing has happened.
        """
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

    def _refuse(self) -> DispatchedFault:
        self._cancelled = True
        return self

    def _start(self, due: float, callback: Callback | None, action: Action) -> DispatchedFault:
        self._action = action
        self._launch(lambda: self._make(due, callback, action))
        return self

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

    def _hand_over(
        self, handler: Handler, delay: float, callback: Callback | None
    ) -> DispatchedFault:
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
        return self

    def _launch(self, target: Callable[[], None]) -> None:
        name = f"nvrx-fault-{self.fault.name}"
        self._thread = threading.Thread(target=target, name=name, daemon=True)
        self._thread.start()


def dispatch_fault_injection(
    fault: Fault, delay: float, callback: Callable[[], object] | None = None
) -> DispatchedFault:
    """Make a fault happen to this process after a while; return at once.

    The delay counts from this call. With `NVRX_FAULT_INJECTION=0` in the environment nothing
    happens, and a warning says so.

    Args:
        fault: What is to happen.
        delay: Seconds until then.
        callback: Called right before it, in a background thread.

    Returns:
        A handle that can cancel it.

    Raises:
        RuntimeError: The fault is unknown, or this process or machine cannot be given it; the
            message names the fault and what is missing. Nothing was started.
        ValueError: The delay is negative or not finite.
    """
    due = time.monotonic() + _checked_delay(delay)
    if not isinstance(fault, Fault):
        raise RuntimeError(f"unknown fault {fault!r}")  # noqa: TRY004 - callers catch this one
    if switched_off(fault.name):
        return DispatchedFault(fault)._refuse()  # noqa: SLF001 - its maker
    handler = handler_of(fault)
    if handler is not None:
        return DispatchedFault(fault)._hand_over(handler, delay, callback)  # noqa: SLF001
    if fault not in PREPARERS:
        raise RuntimeError(f"unknown fault {fault!r}")
    action = PREPARERS[fault](due, callback is not None)
    return DispatchedFault(fault)._start(due, callback, action)  # noqa: SLF001


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


def _checked_delay(delay: float) -> float:
    if not 0.0 <= delay < math.inf:
        raise ValueError(f"a fault happens after 0 or more seconds, not after {delay!r}")
    return delay
