# SPDX-License-Identifier: Apache-2.0
"""A rank's connection in the monitor's event loop; knows no message's meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvidia_resiliency_ext.inprocess._monitor.messages import FROM_RANK, TO_RANK
from nvidia_resiliency_ext.shared_utils.channel import Channel

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

__all__ = ["Connection"]

_MAX_FDS = 4  # that wait to be taken


class Connection:
    """A rank's connection in the loop.

    Attributes:
        pid: Process at the other end, as the kernel says.
        on_message: Called with each message.
        on_over: Called once when the connection has ended; it is closed by then.
    """

    def __init__(self, loop: EventLoop, sock: socket.socket, pid: int) -> None:
        """Take over an accepted socket."""
        self.pid = pid
        self.on_message: Callable[[object], None] = lambda _: None
        self.on_over: Callable[[], None] = lambda: None
        self._loop = loop
        self._channel = Channel(sock, FROM_RANK, TO_RANK, max_fds=_MAX_FDS, ends_when_full=True)
        self._is_writing = False
        loop.watch(self._channel, self._ready)

    def take_fd(self) -> int | None:
        """Return the oldest descriptor that came; the caller owns it."""
        return next(iter(self._channel.take_fds(1)), None)

    def send(self, message: object) -> None:
        """Send a message without waiting."""
        self._channel.send(message)
        if self._channel.is_over:
            self._loop.post(self._end)
        self._mind_writing()

    def close(self) -> None:
        """End it without a call."""
        self.on_over = lambda: None
        self._end()

    def _ready(self) -> None:
        self._channel.flush()
        for message in self._channel.receive():
            self.on_message(message)
        if self._channel.is_over:
            self._end()
        else:
            self._mind_writing()

    def _mind_writing(self) -> None:
        if self._channel.wants_to_write != self._is_writing and not self._channel.is_over:
            self._is_writing = self._channel.wants_to_write
            self._loop.watch(self._channel, self._ready, write=self._is_writing)

    def _end(self) -> None:
        if self._channel.fileno() < 0:
            return
        self._loop.unwatch(self._channel)
        self._channel.close()
        self.on_over()
