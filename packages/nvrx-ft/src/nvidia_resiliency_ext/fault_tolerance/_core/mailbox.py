# SPDX-License-Identifier: Apache-2.0
"""A one-way mailbox on a Unix socket, served by its owner's event loop; it has no thread."""

from __future__ import annotations

import contextlib
import resource
import socket
from time import monotonic
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance.data import ErrorMsg, OkMsg

from .acceptor import Acceptor, Connection, RefusalLog
from .messages import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop
    from nvidia_resiliency_ext.shared_utils.wire import MessageSet

_MOST_CLIENTS = 1024
_CLIENTS_SHARE = 4


class Mailbox:
    """Takes messages from any number of senders; `deliver` gets each before it is acknowledged.

    Raises ValueError for a path that is too long, FileExistsError where somebody else listens.
    """

    def __init__(
        self,
        socket_path: str,
        loop: EventLoop,
        deliver: Callable[[object], None],
        messages: MessageSet = MESSAGES,
    ) -> None:
        self.socket_path = socket_path
        self._messages = messages
        self._deliver = deliver
        self._refusals = RefusalLog(socket_path)
        self._acceptor = Acceptor(
            socket_path,
            loop,
            messages,
            most=_most_clients(),
            on_received=self._receive,
            on_refused=self._record,
        )

    def close(self) -> None:
        """Drop all clients and remove the socket; harmless when repeated."""
        self._acceptor.close()
        self._refusals.finish()

    def _receive(self, client: Connection, messages: list[object]) -> None:
        for message in messages:
            self._deliver(message)
            client.channel.send(OkMsg())
            if client.channel.wants_to_write:
                # An answer is tiny: who has no room for one does not read them.
                client.channel.is_over = True
        if client.channel.is_garbled:
            self._record(f"{self.socket_path}: pid {client.pid} sent no message that is known here")
            answer = self._messages.encode(ErrorMsg("this is no message that is known here"))
            with contextlib.suppress(OSError):  # it is gone, or does not read
                client.channel.sock.send(answer, socket.MSG_NOSIGNAL)

    def _record(self, text: str) -> None:
        self._refusals.record(monotonic(), text)


def _most_clients() -> int:
    """Return how many clients may stay connected: the owner needs descriptors for other things."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST_CLIENTS
    return max(1, min(_MOST_CLIENTS, limit // _CLIENTS_SHARE))
