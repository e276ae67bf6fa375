# SPDX-License-Identifier: Apache-2.0
"""The monitor's event loop and the connections in it; knows no message's meaning."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections import deque
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.inprocess._monitor.channel import Channel
from nvidia_resiliency_ext.inprocess._monitor.messages import FROM_RANK, TO_RANK

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["Connection", "Loop"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_LONGEST_TURN_S = 3600.0


class Loop:
    """One thread's loop over descriptors, and calls that other threads hand in."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._posted: deque[Callable[[], None]] = deque()
        self._bell_reader, self._bell_writer = os.pipe()
        for end in (self._bell_reader, self._bell_writer):
            os.set_blocking(end, False)
        self._selector.register(self._bell_reader, _READ, self._silence)

    def post(self, call: Callable[[], None]) -> None:
        """Have something called in the loop's thread; from any thread."""
        self._posted.append(call)
        # A full pipe rings as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._bell_writer, b"!")

    def watch(self, fd: int, call: Callable[[], None], *, also_writable: bool = False) -> None:
        """Call something whenever a descriptor is ready."""
        events = _READ | _WRITE if also_writable else _READ
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, call)
        else:
            self._selector.register(fd, events, call)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, before it is closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def turn(self, timeout_s: float) -> None:
        """Wait for something to do, and do it once."""
        for key, _ in self._selector.select(min(max(timeout_s, 0.0), _LONGEST_TURN_S)):
            # What was unwatched by a call before this one must not be called any more.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        for _ in range(len(self._posted)):
            self._posted.popleft()()

    def close(self) -> None:
        """Give the descriptors back."""
        self._selector.close()
        os.close(self._bell_reader)
        os.close(self._bell_writer)

    def _silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell_reader, 65536)


class Connection:
    """A rank's connection in the loop.

    Attributes:
        pid: Process at the other end, as the kernel says.
        on_message: Called with each message.
        on_over: Called once when the connection has ended; it is closed by then.
    """

    def __init__(self, loop: Loop, sock: socket.socket, pid: int) -> None:
        """Take over an accepted socket."""
        self.pid = pid
        self.on_message: Callable[[object], None] = lambda _: None
        self.on_over: Callable[[], None] = lambda: None
        self._loop = loop
        self._channel = Channel(sock, FROM_RANK, TO_RANK)
        self._is_writing = False
        loop.watch(self._channel.fileno(), self._ready)

    def take_fd(self) -> int | None:
        """Return the oldest descriptor that came; the caller owns it."""
        return self._channel.take_fd()

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
            self._loop.watch(self._channel.fileno(), self._ready, also_writable=self._is_writing)

    def _end(self) -> None:
        if self._channel.fileno() < 0:
            return
        self._loop.unwatch(self._channel.fileno())
        self._channel.close()
        self.on_over()
