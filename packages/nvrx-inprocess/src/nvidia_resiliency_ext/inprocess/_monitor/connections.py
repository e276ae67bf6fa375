# SPDX-License-Identifier: Apache-2.0
"""Watch the ranks of a node in the monitor's event loop: their connections and their processes."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from nvidia_resiliency_ext.inprocess._monitor.messages import FROM_RANK, TO_RANK
from nvidia_resiliency_ext.shared_utils.children import PidHandle
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop
from nvidia_resiliency_ext.shared_utils.unix_sockets import Channel

logger = logging.getLogger("nvrx")


class Processes:
    """Holds each process once, until it ends."""

    def __init__(self, loop: EventLoop, ended: Callable[[int], None]) -> None:
        self._loop = loop
        self._ended = ended
        self._held: dict[int, PidHandle] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, pid: object) -> bool:
        return pid in self._held

    def hold(self, pid: int, start_ticks: int | None = None) -> int:
        """Hold a process from now on, return its start; a ProcessLookupError if it does not run."""
        held = self._held.get(pid)
        if held is not None:
            return held.start_ticks
        handle = PidHandle(pid, start_ticks)
        self._held[pid] = handle
        fd = handle.fileno()
        if fd is not None:
            self._loop.watch(fd, lambda: self._drop(pid))
        return handle.start_ticks

    def look(self) -> bool:
        """Find processes without a pidfd that have ended; return whether there are any such."""
        without = [(pid, held) for pid, held in self._held.items() if held.fileno() is None]
        for pid, handle in without:
            if not handle.alive():
                self._drop(pid)
        return bool(without)

    def signal(self, pid: int, signals: tuple[int, ...]) -> None:
        """Send signals to a process, if it is there."""
        handle = self._held.get(pid)
        if handle is None:
            return
        for number in signals:
            try:
                handle.signal(number)
            except OSError as error:
                logger.warning("monitor_process: process %d: %s", pid, error)

    def close(self) -> None:
        for handle in self._held.values():
            handle.close()
        self._held.clear()

    def _drop(self, pid: int) -> None:
        handle = self._held.pop(pid)
        fd = handle.fileno()
        if fd is not None:
            self._loop.unwatch(fd)
        handle.close()
        self._ended(pid)


_MAX_FDS = 4  # that wait to be taken


class Connection:
    """A rank's connection in the loop; `on_over` is called once when it has ended and is closed."""

    def __init__(self, loop: EventLoop, sock: socket.socket, pid: int) -> None:
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
        self._update_writing()

    def close(self) -> None:
        """End the connection without calling `on_over`."""
        self.on_over = lambda: None
        self._end()

    def _ready(self) -> None:
        self._channel.flush()
        for message in self._channel.receive():
            self.on_message(message)
        if self._channel.is_over:
            self._end()
        else:
            self._update_writing()

    def _update_writing(self) -> None:
        if self._channel.wants_to_write != self._is_writing and not self._channel.is_over:
            self._is_writing = self._channel.wants_to_write
            self._loop.watch(self._channel, self._ready, write=self._is_writing)

    def _end(self) -> None:
        if self._channel.fileno() < 0:
            return
        self._loop.unwatch(self._channel)
        self._channel.close()
        self.on_over()
