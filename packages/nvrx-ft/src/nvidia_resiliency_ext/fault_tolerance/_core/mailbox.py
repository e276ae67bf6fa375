# SPDX-License-Identifier: Apache-2.0
"""A one-way mailbox on a Unix socket, served from whatever loop its owner runs; it has no thread.

All clients are served at once: each has its own frame reader, and nothing waits for a client. A
client that says nothing, dies in the middle of a message or sends garbage costs itself its
connection and the others nothing.

A peer that asks again and again, or sends garbage, must not fill the launcher's log.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import select
import socket
import time
from collections.abc import Callable

from nvidia_resiliency_ext.fault_tolerance.data import ErrorMsg, OkMsg
from nvidia_resiliency_ext.shared_utils.errors import PeerRefusedError, WireError
from nvidia_resiliency_ext.shared_utils.unix_sockets import listen
from nvidia_resiliency_ext.shared_utils.wire import FrameReader, MessageSet, require_same_user

from .messages import MESSAGES

logger = logging.getLogger("nvrx")

LINES_PER_PERIOD = 5
PERIOD_S = 60.0


class RefusalLog:
    """Logs the first refusals of a period, and how many more there were when it is over."""

    def __init__(self, socket_name: str) -> None:
        """Begin without a period; the first refusal begins one."""
        self._socket_name = socket_name
        self._count = 0
        self.next_check: float | None = None
        """When `check` is due, on the monotonic clock."""

    def record(self, now: float, text: str) -> None:
        """Take a refusal, described in `text`."""
        self.check(now)
        if self.next_check is None:
            self.next_check = now + PERIOD_S
        self._count += 1
        if self._count <= LINES_PER_PERIOD:
            logger.warning("%s", text)

    def check(self, now: float) -> None:
        """End the period if it is over."""
        if self.next_check is not None and self.next_check <= now:
            self.finish()

    def finish(self) -> None:
        """End the period."""
        more = self._count - LINES_PER_PERIOD
        if more > 0:
            logger.warning("%d more refusals at %s", more, self._socket_name)
        self._count, self.next_check = 0, None


_CHUNK_BYTES = 65536
_MOST_CLIENTS = 1024
_CLIENTS_SHARE = 4
_MOST_ACCEPTS = 64
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


class _Client:
    __slots__ = ("pid", "reader", "sock")

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock = sock
        self.pid = pid
        self.reader = FrameReader()


class Mailbox:
    """Takes messages from any number of senders and acknowledges each one.

    Watch `fileno()` for readability and call `receive()` whenever it is readable. One thread only.

    Example:
        >>> with Mailbox("/tmp/example.sock") as mailbox:
        ...     mailbox.receive()
        []

    Args:
        socket_path: where to listen; a stale socket there is removed.
        messages: what may arrive.
        deliver: called with each message before it is acknowledged.

    Raises:
        ValueError: the path is too long for a socket.
        FileExistsError: somebody else listens there, or it is no socket.
    """

    def __init__(
        self,
        socket_path: str,
        messages: MessageSet = MESSAGES,
        *,
        deliver: Callable[[object], None] | None = None,
    ) -> None:
        self.socket_path = socket_path
        self._messages = messages
        self._deliver = deliver
        self._acknowledgement = messages.encode(OkMsg())
        self._clients: dict[int, _Client] = {}
        self._most_clients = _most_clients()
        self._refusals = RefusalLog(socket_path)
        self._server = listen(socket_path)
        self._inode = os.stat(socket_path).st_ino
        # An epoll descriptor is itself pollable: the owner watches one descriptor for all clients.
        self._epoll = select.epoll()
        self._epoll.register(self._server.fileno(), select.EPOLLIN)
        # Given up for a moment when the process has no descriptors left; see `_refuse_one`.
        self._spare: int | None = _open_spare()

    def fileno(self) -> int:
        """Return a descriptor that is readable whenever `receive` has something to do."""
        return self._epoll.fileno()

    def receive(self) -> list[object]:
        """Serve every client that has something to say, without waiting; return the messages."""
        received: list[object] = []
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._server.fileno():
                self._accept_all()
                continue
            client = self._clients.get(descriptor)
            if client is not None:
                received += self._serve(client)
        return received

    def close(self) -> None:
        """Drop all clients and remove the socket; harmless when repeated."""
        if self._server.fileno() < 0:
            return
        for client in list(self._clients.values()):
            self._drop(client)
        self._refusals.finish()
        self._epoll.close()
        self._server.close()
        if self._spare is not None:
            os.close(self._spare)
        with contextlib.suppress(FileNotFoundError):
            # Somebody may have put a new socket in its place.
            if os.stat(self.socket_path).st_ino == self._inode:
                os.unlink(self.socket_path)

    def __enter__(self) -> Mailbox:  # noqa: PYI034 - Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept_all(self) -> None:
        for _ in range(_MOST_ACCEPTS):
            try:
                sock, _address = self._server.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                self._refuse_one()
                return
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            peer = require_same_user(sock)
        except PeerRefusedError as error:
            self._record(f"refused a connection: {error}")
            sock.close()
            return
        if len(self._clients) >= self._most_clients:
            oldest = next(iter(self._clients.values()))
            self._record(f"too many clients, dropped pid {oldest.pid}")
            self._drop(oldest)
        self._clients[sock.fileno()] = _Client(sock, peer.pid)
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _refuse_one(self) -> None:
        """Take one waiting connection off the queue, or `fileno` would stay readable for ever."""
        self._record("no file descriptors left, refused a connection")
        if self._spare is not None:
            os.close(self._spare)
        with contextlib.suppress(OSError):
            self._server.accept()[0].close()
        self._spare = _open_spare()

    def _serve(self, client: _Client) -> list[object]:
        received: list[object] = []
        try:
            try:
                data = client.sock.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return received
            if not data:
                self._drop(client)
                return received
            for payload in client.reader.feed(data):
                message = self._messages.decode(payload)
                if self._deliver is not None:
                    self._deliver(message)
                received.append(message)
                self._answer(client, self._acknowledgement)
        except WireError as error:
            self._record(f"pid {client.pid} sent no message: {error}")
            with contextlib.suppress(OSError):
                self._answer(client, self._messages.encode(ErrorMsg(cause=str(error)[:1000])))
            self._drop(client)
        except OSError as error:
            logger.debug("%s: lost pid %d: %s", self.socket_path, client.pid, error)
            self._drop(client)
        return received

    def _answer(self, client: _Client, data: bytes) -> None:
        # Answers are tiny: a client whose buffer has no room for one does not read them. That
        # BlockingIOError drops it like one that is gone.
        if client.sock.send(data, socket.MSG_NOSIGNAL) != len(data):
            raise BrokenPipeError(errno.EPIPE, "the client does not read its answers")

    def _record(self, what: str) -> None:
        self._refusals.record(time.monotonic(), f"{self.socket_path}: {what}")

    def _drop(self, client: _Client) -> None:
        descriptor = client.sock.fileno()
        self._clients.pop(descriptor, None)
        if descriptor >= 0:
            self._epoll.unregister(descriptor)
            client.sock.close()


def _most_clients() -> int:
    """Return how many clients may stay connected: the owner needs descriptors for other things."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST_CLIENTS
    return max(1, min(_MOST_CLIENTS, limit // _CLIENTS_SHARE))


def _open_spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_DESCRIPTORS:
            return None
        raise
