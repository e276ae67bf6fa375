# SPDX-License-Identifier: Apache-2.0
"""The monitor's program: lets ranks in, serves their calls, and ends when nobody needs it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time

from nvidia_resiliency_ext.inprocess._monitor import messages
from nvidia_resiliency_ext.inprocess._monitor.journal import Journal
from nvidia_resiliency_ext.inprocess._monitor.loop import Connection
from nvidia_resiliency_ext.inprocess._monitor.page import PageError, PageView
from nvidia_resiliency_ext.inprocess._monitor.place import NodePlace
from nvidia_resiliency_ext.inprocess._monitor.processes import Processes
from nvidia_resiliency_ext.inprocess._monitor.serving import Host, Serving
from nvidia_resiliency_ext.inprocess._monitor.store_side import warm_up
from nvidia_resiliency_ext.shared_utils.children import PidHandle
from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError, NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop
from nvidia_resiliency_ext.shared_utils.wire import require_same_user

__all__ = ["Monitor", "run"]

logger = logging.getLogger("nvrx")

_HELLO_WITHIN_S = 10.0
_WARM_UP_AFTER_S = 0.5
_MOST_STRANGERS = 32
_ASK_AGAIN_S = 0.1
_LET_IN_AT_ONCE = 64
_ENDS_WITH_ITS_RANKS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def run(listener_fd: int, directory: str, starter: int, needs_torch: bool) -> int:
    """Be the monitor; return the exit code.

    Args:
        listener_fd: The socket that ranks connect to.
        directory: The node's private directory.
        starter: The process that started us: while it lives, somebody may still come.
        needs_torch: Somebody may be about to ask for a store that needs torch.
    """
    for number in _ENDS_WITH_ITS_RANKS:
        signal.signal(number, signal.SIG_IGN)
    # Not at once: the import keeps the interpreter busy, and somebody may be about to come.
    warming = threading.Timer(_WARM_UP_AFTER_S, warm_up)
    warming.daemon = True
    if needs_torch:
        warming.start()
    monitor = Monitor(socket.socket(fileno=listener_fd), NodePlace(directory), starter)
    try:
        monitor.run()
    except Exception:
        logger.critical("monitor_process pid=%d fails", os.getpid(), exc_info=True)
        return 1
    finally:
        monitor.close()
    return 0


class Monitor:
    """All that one monitor process is.

    Args:
        listener: Where ranks come.
        place: The directory to remove in the end.
        starter: A process for which it stays, though it may never say anything.
    """

    def __init__(self, listener: socket.socket, place: NodePlace, starter: int) -> None:
        self._listener = listener
        listener.setblocking(False)
        listener.set_inheritable(False)
        self._place = place
        self._socket_inode = place.socket_inode()
        self._loop = EventLoop()
        self._journal = Journal()
        self._processes = Processes(self._loop, self._process_ended)
        self._host = Host(self._loop, self._processes, self._journal, place.path)
        self._strangers: dict[Connection, float] = {}
        self._servings: dict[str, Serving] = {}
        with contextlib.suppress(ProcessLookupError, OSError):
            self._processes.hold(starter)
        self._loop.watch(listener.fileno(), self._let_in)
        with PidHandle(os.getpid()) as own:
            place.name_monitor(own.pid, own.start_ticks)
        place.remove_stale_siblings()

    def run(self) -> None:
        """Serve until nobody is left."""
        due_s = time.monotonic()
        while True:
            self._loop.run_once(until=due_s)
            due_s = self._tick(time.monotonic())
            if self._is_idle():
                if self._end():
                    return
                due_s = min(due_s, time.monotonic() + _ASK_AGAIN_S)

    def close(self) -> None:
        """Give everything back."""
        for serving in self._servings.values():
            serving.close()
        for stranger in list(self._strangers):
            stranger.close()
        self._processes.close()
        self._journal.close()
        self._listener.close()
        self._loop.close()

    # --- coming and going ---

    def _let_in(self) -> None:
        for _ in range(_LET_IN_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("monitor_process: nobody can be let in: %s", error)
                return
            try:
                pid = require_same_user(sock).pid
            except (NvrxError, OSError) as error:
                logger.warning("monitor_process: a connection is refused: %s", error)
                sock.close()
                continue
            self._make_stranger(Connection(self._loop, sock, pid))

    def _make_stranger(self, connection: Connection) -> None:
        self._strangers[connection] = time.monotonic() + _HELLO_WITHIN_S
        connection.on_message = lambda message: self._meet(connection, message)
        connection.on_over = lambda: self._forget_stranger(connection)
        while len(self._strangers) > _MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            self._forget_stranger(oldest)
            oldest.close()

    def _forget_stranger(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)

    def _meet(self, connection: Connection, message: object) -> None:
        self._forget_stranger(connection)
        connection.on_over = lambda: None
        problem = self._take_in(connection, message)
        if problem is not None:
            logger.warning("monitor_process: process %d is refused: %s", connection.pid, problem)
            connection.send(messages.Refused(problem))
            connection.close()

    def _take_in(self, connection: Connection, message: object) -> str | None:
        if not isinstance(message, messages.Hello):
            return "it does not say who it is"
        if message.version != messages.VERSION:
            return f"it speaks version {message.version}, not {messages.VERSION}"
        fd = connection.take_fd()
        if fd is None:
            return "it brings no page"
        try:
            page = PageView(fd)
        except PageError as error:
            return str(error)
        dump_fd = connection.take_fd() if message.dump_signal else None
        prefix = message.settings.prefix
        serving = self._servings.get(prefix)
        if serving is None:
            serving = Serving(self._host, message.settings, message.world_size)
            self._servings[prefix] = serving
        return serving.hello(connection, message, page, dump_fd)

    def _process_ended(self, pid: int) -> None:
        for serving in self._servings.values():
            serving.process_ended(pid)

    # --- time ---

    def _tick(self, now: float) -> float:
        for stranger, until_s in list(self._strangers.items()):
            if now >= until_s:
                self._forget_stranger(stranger)
                stranger.close()
        due_s = min(self._strangers.values(), default=math.inf)
        for prefix, serving in list(self._servings.items()):
            due_s = min(due_s, serving.tick(now))
            if serving.is_over(now):
                logger.info("monitor_process: the call %s is over", prefix)
                serving.close()
                del self._servings[prefix]
        if self._processes.must_be_looked_at:
            self._processes.look()
            due_s = min(due_s, now + 1.0)
        return due_s

    def _is_idle(self) -> bool:
        return not (self._servings or len(self._processes) or self._strangers)

    def _end(self) -> bool:
        """End, unless somebody is just coming; return whether."""
        if not self._is_at_home():
            return True  # our directory was removed: nobody can come, and no lock must be made
        try:
            with self._place.locked(0.0):
                self._let_in()
                if self._strangers:
                    return False
                if self._is_at_home():
                    self._place.remove()
        except DeadlineExceededError:
            # Whoever holds the lock is about to connect to us.
            return False
        except (OSError, NvrxError) as error:
            # Somebody has made the directory unfit: nobody can come, and it stays.
            logger.warning("monitor_process: %s is left behind: %s", self._place.path, error)
        return True

    def _is_at_home(self) -> bool:
        inode = self._place.socket_inode()
        return inode is not None and inode == self._socket_inode
