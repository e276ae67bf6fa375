# SPDX-License-Identifier: Apache-2.0
"""The monitor's program: let ranks in, serve their calls, end when no rank is left."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Mapping
from typing import TextIO

from nvidia_resiliency_ext.inprocess._monitor import messages
from nvidia_resiliency_ext.inprocess._monitor.connections import Connection, Processes
from nvidia_resiliency_ext.inprocess._monitor.page import PageError, PageView
from nvidia_resiliency_ext.inprocess._monitor.serving import Serving
from nvidia_resiliency_ext.inprocess._monitor.start import NodeDirectory
from nvidia_resiliency_ext.inprocess._monitor.store_threads import warm_up
from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError, NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop
from nvidia_resiliency_ext.shared_utils.log_manager import LogConfig, setup_logger
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file
from nvidia_resiliency_ext.shared_utils.wire import require_same_user

_FORMAT = "%(asctime)s [%(levelname)s] %(message)s"
_PID_BYTES = 32
_OPEN = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Journal:
    """The monitor's log files and pid files; ours alone, they follow no symbolic link.

    Without a log file, and without a directory for node-local logs, it is silent.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._logger = logging.getLogger(LogConfig.name)
        self._handlers: dict[str, logging.StreamHandler[TextIO]] = {}
        self._pid_files: set[str] = set()
        if environ.get("NVRX_NODE_LOCAL_TMPDIR"):
            with contextlib.suppress(OSError):
                setup_logger(node_local_tmp_prefix="monproc")
        if not self._logger.handlers:
            self._logger.addHandler(logging.NullHandler())
        self._logger.setLevel(LogConfig.get_log_level(environ))
        self._logger.propagate = False

    def open_log(self, path: str) -> None:
        """Write lines to a file, too; it is emptied when this monitor first opens it."""
        if not path or path in self._handlers:
            return
        try:
            stream: TextIO = os.fdopen(_open_regular(path), "w", errors="backslashreplace")
        except OSError as error:
            self._logger.warning("monitor_process: the log file %s cannot be used: %s", path, error)
            return
        self._handlers[path] = handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter(_FORMAT))
        self._logger.addHandler(handler)

    def write_pid(self, path: str) -> None:
        if not path:
            return
        try:
            atomic_write(path, str(os.getpid()).encode(), fsync=False)
        except OSError as error:
            self._logger.warning("monitor_process: no pid file %s: %s", path, error)
            return
        self._pid_files.add(path)

    def close(self) -> None:
        """Remove the pid files that still name us, and close the log files."""
        for path in self._pid_files:
            with contextlib.suppress(OSError):
                if read_regular_file(path, _PID_BYTES) == str(os.getpid()).encode():
                    os.unlink(path)
        self._pid_files.clear()
        for handler in self._handlers.values():
            self._logger.removeHandler(handler)
            handler.close()
            handler.stream.close()
        self._handlers.clear()


def _open_regular(path: str) -> int:
    fd = os.open(path, _OPEN, 0o600)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_uid != os.geteuid():
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file of ours", path)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


logger = logging.getLogger("nvrx")
_HELLO_WITHIN_S = 10.0
_WARM_UP_AFTER_S = 0.5
_MOST_PENDING = 32
_ASK_AGAIN_S = 0.1
_LET_IN_AT_ONCE = 64
_ACCEPT_PAUSE_S = 0.5  # Out of descriptors, the listener stays readable: the loop would spin.
_ENDS_WITH_ITS_RANKS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def run(listener_fd: int, directory: str, starter: int, needs_torch: bool) -> int:
    for number in _ENDS_WITH_ITS_RANKS:
        signal.signal(number, signal.SIG_IGN)
    # Not at once: the import keeps the interpreter busy, and somebody may be about to come.
    warming = threading.Timer(_WARM_UP_AFTER_S, warm_up)
    warming.daemon = True
    if needs_torch:
        warming.start()
    monitor = Monitor(socket.socket(fileno=listener_fd), NodeDirectory(directory), starter)
    try:
        monitor.run()
    except Exception:
        logger.critical("monitor_process pid=%d fails", os.getpid(), exc_info=True)
        return 1
    finally:
        monitor.close()
    return 0


class Monitor:
    def __init__(self, listener: socket.socket, directory: NodeDirectory, starter: int) -> None:
        self._listener = listener
        listener.setblocking(False)
        listener.set_inheritable(False)
        self._directory = directory
        self._socket_inode = directory.socket_inode()
        self._loop = EventLoop()
        self._journal = Journal()
        self._processes = Processes(self._loop, self._process_ended)
        self._pending: dict[Connection, float] = {}
        self._servings: dict[str, Serving] = {}
        with contextlib.suppress(ProcessLookupError, OSError):
            self._processes.hold(starter)
        self._loop.watch(listener, self._let_in)
        directory.remove_stale_siblings()

    def run(self) -> None:
        due_s = time.monotonic()
        while True:
            self._loop.run_once(until=due_s)
            due_s = self._tick(time.monotonic())
            if self._is_idle():
                if self._end():
                    return
                due_s = min(due_s, time.monotonic() + _ASK_AGAIN_S)

    def close(self) -> None:
        for serving in self._servings.values():
            serving.close()
        for pending in list(self._pending):
            pending.close()
        self._processes.close()
        self._journal.close()
        self._listener.close()
        self._loop.close()

    def _let_in(self) -> None:
        for _ in range(_LET_IN_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("monitor_process: no connection can be accepted: %s", error)
                self._loop.unwatch(self._listener)
                again = time.monotonic() + _ACCEPT_PAUSE_S
                self._loop.call_at(again, lambda: self._loop.watch(self._listener, self._let_in))
                return
            try:
                pid = require_same_user(sock).pid
            except (NvrxError, OSError) as error:
                logger.warning("monitor_process: a connection is refused: %s", error)
                sock.close()
                continue
            self._add_pending(Connection(self._loop, sock, pid))

    def _add_pending(self, connection: Connection) -> None:
        self._pending[connection] = time.monotonic() + _HELLO_WITHIN_S
        connection.on_message = lambda message: self._on_first_message(connection, message)
        connection.on_over = lambda: self._remove_pending(connection)
        while len(self._pending) > _MOST_PENDING:
            oldest = next(iter(self._pending))
            self._remove_pending(oldest)
            oldest.close()

    def _remove_pending(self, connection: Connection) -> None:
        self._pending.pop(connection, None)

    def _on_first_message(self, connection: Connection, message: object) -> None:
        self._remove_pending(connection)
        connection.on_over = lambda: None
        problem = self._take_in(connection, message)
        if problem is not None:
            logger.warning("monitor_process: process %d is refused: %s", connection.pid, problem)
            connection.send(messages.Refused(problem))
            connection.close()

    def _take_in(self, connection: Connection, message: object) -> str | None:
        if not isinstance(message, messages.Hello):
            return "its first message is not Hello"
        if message.version != messages.VERSION:
            return f"its version is {message.version}, not {messages.VERSION}"
        fd = connection.take_fd()
        if fd is None:
            return "its Hello has no page attached"
        dump_fd = connection.take_fd() if message.dump_signal else None
        try:
            page = PageView(fd, -1 if dump_fd is None else dump_fd)
        except PageError as error:
            return str(error)
        prefix = message.settings.prefix
        serving = self._servings.get(prefix)
        if serving is None:
            parts = (self._loop, self._processes, self._journal)
            serving = self._servings[prefix] = Serving(*parts, message.settings, message.world_size)
        return serving.hello(connection, message, page)

    def _process_ended(self, pid: int) -> None:
        for serving in self._servings.values():
            serving.process_ended(pid)

    def _tick(self, now: float) -> float:
        for pending, until_s in list(self._pending.items()):
            if now >= until_s:
                self._remove_pending(pending)
                pending.close()
        due_s = min(self._pending.values(), default=math.inf)
        for prefix, serving in list(self._servings.items()):
            due_s = min(due_s, serving.tick(now))
            if serving.is_over(now):
                logger.info("monitor_process: the call %s is over", prefix)
                serving.close()
                del self._servings[prefix]
        if self._processes.look():
            due_s = min(due_s, now + 1.0)
        return due_s

    def _is_idle(self) -> bool:
        return not (self._servings or len(self._processes) or self._pending)

    def _end(self) -> bool:
        """Remove the directory, unless a rank is connecting; return whether to end."""
        if not self._is_at_home():
            return True  # our directory was removed: no rank can connect, and no lock must be made
        try:
            with self._directory.locked(0.0):
                self._let_in()
                if self._pending:
                    return False
                if self._is_at_home():
                    self._directory.remove()
        except DeadlineExceededError:
            # The process that has the lock is about to connect to us.
            return False
        except (OSError, NvrxError) as error:
            # The directory cannot be used any more: no rank can connect, and it stays.
            logger.warning("monitor_process: %s cannot be removed: %s", self._directory.path, error)
        return True

    def _is_at_home(self) -> bool:
        inode = self._directory.socket_inode()
        return inode is not None and inode == self._socket_inode
