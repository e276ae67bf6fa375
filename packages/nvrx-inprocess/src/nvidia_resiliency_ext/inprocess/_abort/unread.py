# SPDX-License-Identifier: Apache-2.0
"""Connections that nobody in this process reads any more, while their peers may still write."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading

__all__ = ["UnreadConnections"]


class UnreadConnections:
    """Ends connections for this process first, and for their peers a while later.

    A peer that is being stopped at the same moment may have something to write. It would be told
    that nobody is there, and gloo forgets who waits for an operation that has failed so: its
    `Pair::signalException` tells those that wait for their turn, not those under way. So a
    connection takes in what is written until the peer has stopped, too.

    Of the descriptors that this process may have, the last quarter is left to others; a connection
    for which there is no other is ended for both sides at once, and so it is where no thread can
    be started that would do that later.

    Args:
        linger_s: How long, if nobody calls `let_go` before, in seconds.
    """

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._kept: dict[str, socket.socket] = {}
        self._timer: threading.Timer | None = None

    def add(self, name: str, connection: socket.socket) -> None:
        """Let a connection's reader come to its end, after all that has arrived.

        Args:
            name: The kernel's, which stays the same for each of its descriptors.
            connection: A descriptor of its own; it is closed here.

        Raises:
            OSError: It is no connection any more.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            with self._lock:
                connection.shutdown(socket.SHUT_RD)
                if name in self._kept:
                    return
                if _is_scarce(connection.fileno()) or not self._arm_timer():
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                self._kept[name] = connection
                stack.pop_all()

    def let_go(self) -> None:
        """End them for their peers, too: these have stopped, or have had their time."""
        with self._lock:
            kept, self._kept = self._kept, {}
            timer, self._timer = self._timer, None
        for connection in kept.values():
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if timer is not None and timer is not threading.current_thread():
            timer.cancel()
            timer.join()

    def _arm_timer(self) -> bool:
        """See to it that they are let go of in time; `False` where that cannot be."""
        # In a forked process the parent's thread is not alive.
        if self._timer is None or not self._timer.is_alive():
            timer = threading.Timer(self._linger_s, self.let_go)
            timer.name = "nvrx-unread"
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:  # too many threads, or the interpreter ends
                return False
            self._timer = timer
        return True


def _is_scarce(descriptor: int) -> bool:
    # A new one has the lowest free number: so many are in use.
    return descriptor >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4
