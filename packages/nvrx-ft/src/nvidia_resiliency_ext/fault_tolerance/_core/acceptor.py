# SPDX-License-Identifier: Apache-2.0
"""A listening Unix socket and its clients on its owner's event loop: a silent one delays nobody."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from time import monotonic

from nvidia_resiliency_ext.shared_utils.errors import PeerRefusedError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop, Timer
from nvidia_resiliency_ext.shared_utils.unix_sockets import Channel, listen
from nvidia_resiliency_ext.shared_utils.wire import MessageSet, require_same_user

logger = logging.getLogger("nvrx")

ACCEPT_PAUSE_S = 0.1
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
LINES_PER_PERIOD = 5
PERIOD_S = 60.0


class RefusalLog:
    """Logs the first refusals of a period, and how many more there were when it is over."""

    def __init__(self, socket_name: str) -> None:
        self._socket_name = socket_name
        self._count = 0
        self.next_check: float | None = None  # When `check` is due (monotonic s).

    def record(self, now: float, text: str) -> None:
        self.check(now)
        if self.next_check is None:
            self.next_check = now + PERIOD_S
        self._count += 1
        if self._count <= LINES_PER_PERIOD:
            logger.warning("%s", text)

    def check(self, now: float) -> None:
        if self.next_check is not None and self.next_check <= now:
            self.finish()

    def finish(self) -> None:
        more = self._count - LINES_PER_PERIOD
        if more > 0:
            logger.warning("%d more refusals at %s", more, self._socket_name)
        self._count, self.next_check = 0, None


@dataclass(slots=True, eq=False)
class Connection:
    """A client; `pid` is the kernel's word, 0 where it cannot tell."""

    channel: Channel
    pid: int
    expiry: Timer | None = None


@dataclass(eq=False)
class Acceptor:
    """Listens at a path and reads what clients of the same user send; drops those that are over."""

    path: str
    loop: EventLoop
    messages: MessageSet
    _: KW_ONLY
    most: int  # Of more clients the oldest is dropped.
    limit_s: float | None = None  # A client is dropped then, unless it is released before.
    on_received: Callable[[Connection, list[object]], None]  # Also at the client's end.
    on_refused: Callable[[str], None]  # Gets a sentence.

    def __post_init__(self) -> None:
        """Bind and listen; a path that cannot be bound raises ValueError or OSError."""
        self._clients: dict[Connection, None] = {}  # In the order in which they came.
        self._pause: Timer | None = None
        self._listener = listen(self.path)
        status = os.stat(self.path)
        self._identity = (status.st_dev, status.st_ino)
        self._listen()

    def release(self, connection: Connection) -> None:
        """Let the caller have a client: it is read here no longer."""
        del self._clients[connection]
        self.loop.unwatch(connection.channel)
        if connection.expiry is not None:
            connection.expiry.cancel()

    def drop(self, connection: Connection) -> None:
        self.release(connection)
        connection.channel.close()

    def close(self) -> None:
        """Stop listening, drop all clients, unlink the path if it is still ours."""
        if self._pause is not None:
            self._pause.cancel()
        self.loop.unwatch(self._listener)
        self._listener.close()
        for connection in list(self._clients):
            self.drop(connection)
        try:
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) == self._identity:
                os.unlink(self.path)
        except FileNotFoundError:
            return

    def _listen(self) -> None:
        self.loop.watch(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # Gone before we got to it: the next one may do. Out of descriptors: it stays in the
            # queue, and the listener readable, so that watching it would make the loop spin.
            if error.errno in _EXHAUSTED:
                self.loop.unwatch(self._listener)
                self._pause = self.loop.call_at(monotonic() + ACCEPT_PAUSE_S, self._listen)
            return
        try:
            peer = require_same_user(sock)
        except (PeerRefusedError, OSError) as exc:
            self.on_refused(f"a connection to {self.path} was refused: {exc}")
            sock.close()
            return
        connection = Connection(Channel(sock, self.messages), peer.pid)
        if self.limit_s is not None:
            at = monotonic() + self.limit_s
            connection.expiry = self.loop.call_at(at, lambda: self.drop(connection))
        if len(self._clients) >= self.most:
            oldest = next(iter(self._clients))
            self.on_refused(f"{self.path}: too many clients, dropped pid {oldest.pid}")
            self.drop(oldest)
        self._clients[connection] = None
        self.loop.watch(connection.channel, lambda: self._read(connection))

    def _read(self, connection: Connection) -> None:
        self.on_received(connection, connection.channel.receive())
        if connection.channel.is_over and connection in self._clients:
            self.drop(connection)
