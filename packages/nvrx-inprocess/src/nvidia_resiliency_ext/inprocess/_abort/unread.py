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

    Of the descriptors that this process may have, a quarter at most is used for them; what is more
    is ended for both sides at once.

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
                is_known = name in self._kept
                if not is_known and len(self._kept) >= _room():
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                connection.shutdown(socket.SHUT_RD)
                if is_known:
                    return
                self._kept[name] = connection
                stack.pop_all()
                if self._timer is None:
                    self._timer = threading.Timer(self._linger_s, self.let_go)
                    self._timer.name = "nvrx-unread"
                    self._timer.daemon = True
                    self._timer.start()

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


def _room() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
