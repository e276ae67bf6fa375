# SPDX-License-Identifier: Apache-2.0
"""Making a client of a torch store within a limit of our own.

torch's has none: a store that ends each connection, or says nothing, is tried again and again, and
no signal ends that. So torch tries in a thread, which is left to itself when the time is up.
Nothing here imports torch.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from .parking import ParkedAtExit

__all__ = ["Attempt"]

_LONGEST_MS = (1 << 31) - 1  # that poll() takes


class Attempt(ParkedAtExit):
    """Makes a client; nothing but torch can end that.

    Args:
        make: Makes it.

    Attributes:
        client: What was made.
        error: What was raised instead.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__("nvrx-store-connect")
        self._make = make
        self._lock = threading.Lock()
        self._is_given_up = False
        self._told, self._tells = socket.socketpair()
        self.client: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Make it; the end is told by a socket that hangs up."""
        self.begin()
        with self._tells:
            try:
                made = self._make()
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                self.error = error
                return
            with self._lock:
                if not self._is_given_up:
                    self.client = made

    def wait(self, timeout_s: float, witness: socket.socket | None = None) -> bool:
        """Wait for the end; False after `timeout_s`, or when the store hangs up on `witness`."""
        poll = select.poll()
        poll.register(self._told, select.POLLIN)
        if witness is not None:
            poll.register(witness, select.POLLIN)
        ready = poll.poll(min(max(0.0, timeout_s) * 1000, _LONGEST_MS))
        return any(number == self._told.fileno() for number, _ in ready)

    def give_up(self) -> None:
        """Wait no longer; a client that is still made is let go."""
        with self._lock:
            self._is_given_up, self.client = True, None

    def close(self) -> None:
        """Hear nothing more of it."""
        self._told.close()
