# SPDX-License-Identifier: Apache-2.0
"""Owns the first moments and the last ones of the monitor process; the work is in `server`."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.rundir import RunDir
from nvidia_resiliency_ext.shared_utils.wire import receive_message

from .messages import LAUNCHER_MESSAGES, LogLine, Start
from .server import MonitorServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["LEAVE_SIGNALS", "configure_logging", "leave_at_signals", "main"]

_START_LIMIT_S = 10.0
_OTHERS_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGQUIT,
)
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_ATOMIC_WRITE_BYTES = 4096
_MAX_LINE_CHARS = 1 << 16
"""Longest log line that travels: far below a frame's limit, however its characters are written."""


def main(fd: int) -> None:
    """Run a monitor: take the order from the launcher's socket, serve, clean up, exit.

    Args:
        fd: The monitor's end of the socketpair.
    """
    # Whatever is meant for the job reaches us too (a terminal's Ctrl-C, a scheduler's signal for
    # the whole step); the launcher alone decides when the monitor leaves.
    for sig in _OTHERS_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)
    launcher = socket.socket(fileno=fd)
    start = receive_message(launcher, LAUNCHER_MESSAGES, _START_LIMIT_S)
    if not isinstance(start, Start):
        raise SystemExit("the monitor's first message must be Start")
    _name_process(start)
    lines: SimpleQueue[LogLine] | None = SimpleQueue() if start.run_id else None
    configure_logging(int(start.config["log_level"]), lines)
    try:
        run_dir = RunDir(start.run_dir) if start.run_id and start.run_dir else None
        server = MonitorServer(start, launcher, lines)
    except OSError as error:
        raise _cannot_start(error) from None
    with ExitStack() as stack:
        if not start.run_id:
            stack.enter_context(leave_at_signals(server, LEAVE_SIGNALS))
        try:
            server.announce()
        except OSError as error:
            raise _cannot_start(error) from None
        server.run()
    if run_dir is not None and server.is_dismissed:
        run_dir.remove()
    # A job of the slow thread may hang in a dead file system for ever.
    os._exit(0)


def _cannot_start(error: OSError) -> SystemExit:
    return SystemExit(f"the rank monitor cannot start: {error}")


@contextmanager
def leave_at_signals(
    server: MonitorServer, leave_signals: tuple[signal.Signals, ...]
) -> Iterator[None]:
    """Let these signals end the server's loop in order; afterwards all is as it was.

    To be entered before the server runs and left when it ended, both in the main thread.

    Args:
        server: Its loop wakes up through a pipe that the interpreter writes to.
        leave_signals: What to obey.
    """
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        server.leave()

    def drain() -> None:
        # Every signal writes a byte, also one that somebody else handles (SIGCHLD).
        try:
            os.read(read_fd, _ATOMIC_WRITE_BYTES)
        except BlockingIOError:
            return

    previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    previous = {sig: signal.signal(sig, on_signal) for sig in leave_signals}
    server.watch(read_fd, drain)
    try:
        yield
    finally:
        for sig, handler in previous.items():
            # None: set by C code that Python cannot name; the default is the best there is.
            signal.signal(sig, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(previous_fd)
        os.close(read_fd)
        os.close(write_fd)


class LineHandler(logging.Handler):
    """Hands log lines to the loop, or to standard error as long as that does not block."""

    def __init__(self, lines: SimpleQueue[LogLine] | None) -> None:
        """Hand them to `lines`, or to standard error if None."""
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Take one line, from any thread; never waits."""
        text = self.format(record)
        if len(text) > _MAX_LINE_CHARS:
            text = f"{text[:_MAX_LINE_CHARS]}... ({len(text)} characters)"
        if self._lines is not None:
            self._lines.put(LogLine(record.levelno, text))
            return
        poller = select.poll()
        try:
            poller.register(2, select.POLLOUT)
            if poller.poll(0):
                line = f"{record.levelname} nvrx monitor: {text}\n"
                os.write(2, line.encode(errors="backslashreplace")[:_ATOMIC_WRITE_BYTES])
        except OSError:
            return  # nobody reads it any more


def configure_logging(level: int, lines: SimpleQueue[LogLine] | None) -> None:
    """Send this process's log to the launcher (`lines`), or to standard error if None."""
    logger = logging.getLogger("nvrx")
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(LineHandler(lines))


def _name_process(start: Start) -> None:
    name = f"nvrx-monitor{'' if start.run_id else '-alone'}"
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as comm:
            comm.write(name)
    except OSError:
        return  # a nicety
