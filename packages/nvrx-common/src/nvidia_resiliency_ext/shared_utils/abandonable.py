# SPDX-License-Identifier: Apache-2.0
"""Calls that may never return: each runs in a thread that is abandoned at a deadline.

Nobody waits for such a thread, not even the interpreter at its exit.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .errors import DeadlineExceededError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AbandonableCall", "DeadlineCaller", "StuckError", "call_within"]

T = TypeVar("T")


class StuckError(DeadlineExceededError):
    """A call has not returned in time.

    Args:
        what: The call that hangs.
        seconds: For how long.
    """

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, seconds)
        self.what = what
        self.seconds = seconds

    def __str__(self) -> str:
        return f"{self.what} has not returned for {self.seconds:.1f} s"


class AbandonableCall(Generic[T]):
    """Run a function in a daemon thread for which no caller has to wait.

    `function` takes no argument; its result or exception is kept.

    Attributes:
        name: Name of the call and, after `nvrx-`, of its thread.
        pid: Process in which it runs.
        ended: Set when the function has returned or raised.
    """

    def __init__(self, name: str, function: Callable[[], T]) -> None:
        """Start the thread.

        Raises:
            RuntimeError: The system gives no thread.
        """
        self.name = name
        self.pid = os.getpid()
        self.ended = threading.Event()
        self._function: Callable[[], T] | None = function
        self._values: list[T] = []
        self._errors: list[BaseException] = []
        self._start = time.monotonic()
        thread_name = name if name.startswith("nvrx-") else f"nvrx-{name}"
        threading.Thread(target=self._run, name=thread_name[:60], daemon=True).start()

    def age_s(self) -> float:
        """Return the seconds since the call began."""
        return time.monotonic() - self._start

    def result(self) -> T:
        """Return what the function returned, or raise what it raised; once, after `ended`."""
        try:
            if self._errors:
                raise self._errors[0]
            return self._values[0]
        finally:
            # The error's frames hold this object, which would hold them in turn.
            self._errors.clear()

    def _run(self) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            self._values.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self._errors.append(error)
        finally:
            self.ended.set()


def call_within(name: str, function: Callable[[], T], timeout_s: float) -> T:
    """Call a function in a thread and return what it returns.

    Args:
        name: Name of the call, for the thread and for messages.
        function: Called once.
        timeout_s: How long it may take.

    Raises:
        StuckError: It has not ended; its thread goes on and nobody waits for it.
        BaseException: What the function raised.
    """
    call = AbandonableCall(name, function)
    if not call.ended.wait(min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)):
        raise StuckError(name, call.age_s())
    return call.result()


class DeadlineCaller:
    """Runs one call at a time; while one hangs, all later ones fail at once.

    So a hung driver costs one thread, however often it is asked.
    """

    def __init__(self) -> None:
        self._stuck: AbandonableCall[Any] | None = None
        self._turn = threading.Lock()

    def run(self, what: str, call: Callable[[], Any], timeout_s: float) -> Any:
        """Return what a call returns, or raise what it raises.

        Args:
            what: Name of the call, for errors.
            call: The function; it takes no argument.
            timeout_s: Seconds to wait for it and for an earlier call.

        Raises:
            StuckError: This call, or an earlier one, does not return in time.
        """
        if not self._turn.acquire(timeout=timeout_s):
            raise StuckError(what, timeout_s)
        try:
            return self._run(what, call, timeout_s)
        finally:
            self._turn.release()

    def _run(self, what: str, call: Callable[[], Any], timeout_s: float) -> Any:
        stuck = self._stuck
        # A forked child does not have the threads of its parent.
        if stuck is not None and stuck.pid == os.getpid() and not stuck.ended.is_set():
            raise StuckError(stuck.name, stuck.age_s())
        self._stuck = None
        running = AbandonableCall(what, call)
        if not running.ended.wait(timeout_s):
            self._stuck = running
            raise StuckError(what, running.age_s())
        return running.result()
