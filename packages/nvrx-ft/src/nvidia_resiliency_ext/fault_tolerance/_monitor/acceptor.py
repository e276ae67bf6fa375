# SPDX-License-Identifier: Apache-2.0
"""A rank's listening socket and its pending connections; no session.

Only a well-formed first message of a process of the same user reaches the port.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.errors import PeerRefusedError
from nvidia_resiliency_ext.shared_utils.unix_sockets import Channel, listen
from nvidia_resiliency_ext.shared_utils.wire import require_same_user

from .messages import RANK_MESSAGES, Hello

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

HELLO_LIMIT_S = 5.0
MAX_PENDING = 8
ACCEPT_PAUSE_S = 0.1
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(slots=True, eq=False)
class Connection:
    """A connection to a rank's socket; `pid` is the kernel's word, 0 where it cannot tell."""

    number: int
    channel: Channel
    pid: int
    opened_at: float


class Acceptor:
    """Listens at a path and lets in those who say hello."""

    def __init__(
        self,
        path: str,
        loop: EventLoop,
        on_hello: Callable[[Connection, Hello], None],
        on_refused: Callable[[str], None],
    ) -> None:
        """Bind and listen; a path that cannot be bound raises ValueError or OSError."""
        self.path = path
        self._loop = loop
        self._on_hello = on_hello
        self._on_refused = on_refused
        self._pending: deque[Connection] = deque()
        self._count = 0
        self._accepts_at: float | None = None
        self._listener = listen(path)
        status = os.stat(path)
        self._identity = (status.st_dev, status.st_ino)
        loop.watch(self._listener, self._accept)

    def next_expiry(self) -> float | None:
        """When `expire` has something to do, on the monotonic clock."""
        oldest = self._pending[0].opened_at + HELLO_LIMIT_S if self._pending else None
        return min((at for at in (oldest, self._accepts_at) if at is not None), default=None)

    def expire(self, now: float) -> None:
        """Close the connections that said nothing for too long; accept again after a pause."""
        if self._accepts_at is not None and self._accepts_at <= now:
            self._accepts_at = None
            self._loop.watch(self._listener, self._accept)
        while self._pending and self._pending[0].opened_at + HELLO_LIMIT_S <= now:
            self._drop(self._pending[0])

    def close(self) -> None:
        """Stop listening, close who waits, unlink the path if it is still ours."""
        self._loop.unwatch(self._listener)
        self._listener.close()
        while self._pending:
            self._drop(self._pending[0])
        try:
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) == self._identity:
                os.unlink(self.path)
        except FileNotFoundError:
            return

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # Gone before we got to it: the next one may do. Out of descriptors: it stays in the
            # queue, and the listener readable, so that watching it would make the loop spin.
            if error.errno in _EXHAUSTED:
                self._loop.unwatch(self._listener)
                self._accepts_at = monotonic() + ACCEPT_PAUSE_S
            return
        try:
            peer = require_same_user(sock)
        except (PeerRefusedError, OSError) as exc:
            self._on_refused(f"a connection to {self.path} was refused: {exc}")
            sock.close()
            return
        self._count += 1
        connection = Connection(self._count, Channel(sock, RANK_MESSAGES), peer.pid, monotonic())
        self._pending.append(connection)
        if len(self._pending) > MAX_PENDING:
            self._drop(self._pending[0])
        self._loop.watch(connection.channel, lambda: self._read(connection))

    def _read(self, connection: Connection) -> None:
        messages = connection.channel.receive()
        if len(messages) == 1 and isinstance(messages[0], Hello) and not connection.channel.is_over:
            self._pending.remove(connection)
            self._loop.unwatch(connection.channel)
            self._on_hello(connection, messages[0])
        elif messages or connection.channel.is_over:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._pending.remove(connection)
        self._loop.unwatch(connection.channel)
        connection.channel.close()
