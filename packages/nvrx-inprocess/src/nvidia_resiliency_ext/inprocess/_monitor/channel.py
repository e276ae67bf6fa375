# SPDX-License-Identifier: Apache-2.0
"""One connection of the monitor: frames in and out without ever waiting; knows no meaning."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.errors import WireError
from nvidia_resiliency_ext.shared_utils.wire import FrameReader, receive_with_fds

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils.wire import MessageSet

__all__ = ["Channel"]

_READ_BYTES = 65536
_MAX_FDS = 4
_MAX_WAITING_BYTES = 16 << 20


class Channel:
    """A connected stream socket and the descriptors that came through it.

    Attributes:
        sock: The socket.
        is_over: Nothing more comes or goes; the owner closes it.
    """

    def __init__(self, sock: socket.socket, incoming: MessageSet, outgoing: MessageSet) -> None:
        """Take over a connected socket."""
        sock.setblocking(False)
        self.sock = sock
        self.is_over = False
        self._incoming = incoming
        self._outgoing = outgoing
        self._reader = FrameReader()
        self._fds: list[int] = []
        self._waiting = bytearray()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self.sock.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits for the peer to take it."""
        return bool(self._waiting) and not self.is_over

    def receive(self) -> list[object]:
        """Return what one read brings; a bounded amount, so that nobody can keep us reading.

        A peer that closed, or sent anything but messages of the set, ends the channel.
        """
        try:
            data, fds = receive_with_fds(self.sock, _READ_BYTES, _MAX_FDS, 0)
        except TimeoutError:
            return []
        except (OSError, WireError):
            self.is_over = True
            return []
        self._fds += fds
        received: list[object] = []
        if not data or len(self._fds) > _MAX_FDS:
            self.is_over = True
            return received
        try:
            for payload in self._reader.feed(data):
                received.append(self._incoming.decode(payload))  # noqa: PERF401 - may raise midway
        except WireError:
            self.is_over = True
        return received

    def take_fd(self) -> int | None:
        """Return the oldest descriptor that came; the caller owns it."""
        return self._fds.pop(0) if self._fds else None

    def send(self, message: object) -> None:
        """Send a message, or keep it until the peer takes it; a peer that never does is left."""
        if self.is_over:
            return
        self._waiting += self._outgoing.encode(message)
        self.flush()
        if len(self._waiting) > _MAX_WAITING_BYTES:
            self.is_over = True

    def flush(self) -> None:
        """Send what waits, as far as the peer takes it."""
        flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
        while self._waiting and not self.is_over:
            try:
                sent = self.sock.send(self._waiting, flags)
            except BlockingIOError:
                return
            except OSError:
                self.is_over = True
                return
            del self._waiting[:sent]

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took."""
        self.is_over = True
        self.sock.close()
        while self._fds:
            os.close(self._fds.pop())
