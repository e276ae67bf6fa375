# SPDX-License-Identifier: Apache-2.0
"""A signal of its own that makes the main thread call a function, even out of a blocking call.

A real-time signal that nothing in the process uses is lent while it is needed. The system call in
which the main thread waits ends with EINTR, whereupon Python calls the handler.
"""

from __future__ import annotations

import _thread
import signal
import threading
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.unused_signal import unused_realtime_signal

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Handler = Callable[[int, FrameType | None], Any]

__all__ = ["Nudge"]


class Nudge:
    """The handler stands from `install` to `withdraw`, both called by the main thread.

    Attributes:
        number: The signal.

    Args:
        handler: Called in the main thread some time after each `send`; several may be one.

    Raises:
        RuntimeError: Every real-time signal is in use.
    """

    def __init__(self, handler: Handler) -> None:
        self.number = unused_realtime_signal()
        self._handler = handler
        self._main_ident = threading.get_ident()
        self._previous: Any = None
        self._blocked: set[Any] = set()

    def install(self) -> None:
        """Take the signal."""
        self._previous = signal.signal(self.number, self._handler)
        self._blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.number})

    def send(self) -> None:
        """Have the handler called; from any thread, and never after `withdraw` has begun."""
        # Ends a system call; and, for a main thread that blocks all signals, the flag behind it.
        signal.pthread_kill(self._main_ident, self.number)
        _thread.interrupt_main(self.number)  # type: ignore[arg-type]  # real-time: no name

    def withdraw(self) -> None:
        """Give the signal back; the handler may be called once more meanwhile.

        One that the function has put in our handler's place stays.
        """
        # What was sent is delivered or taken here: by default it would end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {self.number})
        try:
            while signal.sigtimedwait({self.number}, 0) is not None:
                pass
            if signal.getsignal(self.number) == self._handler:
                signal.signal(self.number, self._previous)
        finally:
            if self.number not in self._blocked:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.number})
