# SPDX-License-Identifier: Apache-2.0
"""A rank monitor: its process from start to end, and one that serves a rank without a launcher."""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from nvidia_resiliency_ext.shared_utils.event_loop import SignalQueue
from nvidia_resiliency_ext.shared_utils.rundir import RunDir
from nvidia_resiliency_ext.shared_utils.wire import receive_message

from ._monitor.handle import MonitorHandle
from ._monitor.messages import LAUNCHER_MESSAGES, LogLine, Start
from ._monitor.server import MonitorServer

if TYPE_CHECKING:
    from .config import FaultToleranceConfig

__all__ = ["RankMonitorLogger", "RankMonitorServer"]

_START_LIMIT_S = 10.0
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_OTHERS_SIGNALS = (*LEAVE_SIGNALS, signal.SIGHUP, signal.SIGQUIT)
_ATOMIC_WRITE_BYTES = 4096
_MAX_LINE_CHARS = 1 << 16  # far below a frame's limit, however characters are written


def main(fd: int) -> None:
    """Run a monitor: take the order from the launcher's socket `fd`, serve, clean up, exit."""
    # A terminal's Ctrl-C or a scheduler's signal reaches us too; the launcher alone ends us.
    for sig in _OTHERS_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)
    launcher = socket.socket(fileno=fd)
    start = receive_message(launcher, LAUNCHER_MESSAGES, _START_LIMIT_S)
    if not isinstance(start, Start):
        raise SystemExit("the monitor's first message must be Start")
    with suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as comm:
        comm.write("nvrx-monitor" if start.run_id else "nvrx-monitor-alone")
    lines: SimpleQueue[LogLine] | None = SimpleQueue() if start.run_id else None
    configure_logging(int(start.config["log_level"]), lines)
    with ExitStack() as stack:
        try:
            run_dir = RunDir(start.run_dir) if start.run_id and start.run_dir else None
            server = MonitorServer(start, launcher, lines)
            if not start.run_id:
                stack.enter_context(leave_at_signals(server))
            server.announce()
        except OSError as error:
            raise SystemExit(f"the rank monitor cannot start: {error}") from None
        server.run()
    if run_dir is not None and server.is_dismissed:
        run_dir.remove()
    # A job of the slow thread may hang in a dead file system for ever.
    os._exit(0)


@contextmanager
def leave_at_signals(server: MonitorServer) -> Iterator[None]:
    """End the server's loop at signals; without effect outside the main thread."""
    signals = SignalQueue(LEAVE_SIGNALS)

    def obey() -> None:
        if signals.receive():
            server.leave()

    server.loop.watch(signals, obey)
    try:
        with signals.installed():
            yield
    finally:
        signals.close()


class LineHandler(logging.Handler):
    """Hands log lines to `lines`, or if None to standard error as long as that does not block."""

    def __init__(self, lines: SimpleQueue[LogLine] | None) -> None:
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


class _Settable(Protocol):
    def set(self) -> None:
        """Set the event."""


class RankMonitorLogger(logging.Logger):
    """The logger of a monitor below "nvrx": names the rank, and writes layered-restart lines."""

    def __init__(
        self,
        name: str = "nvrx.monitor",
        level: int = logging.INFO,
        is_restarter_logger: bool = False,
    ) -> None:
        """Make the logger `name` with a `level`; `is_restarter_logger`: for layered restarts."""
        super().__init__(name, level)
        self.parent = logging.getLogger("nvrx")
        self.is_restarter_logger = is_restarter_logger
        self.rank: int | None = None

    def set_connected_rank(self, rank: int | None) -> None:
        """Set the `rank` that is named in later messages; None: no rank."""
        self.rank = rank

    def makeRecord(self, *args: Any, **kwargs: Any) -> logging.LogRecord:  # noqa: N802 - logging's
        """Add the rank to the record; `args` and `kwargs` are those of `logging.Logger`."""
        record = super().makeRecord(*args, **kwargs)
        record.connected_rank = self.rank
        return record

    def log_for_restarter(self, message: str) -> None:
        """Write the line `message`, which only tools for layered restarts want."""
        if self.is_restarter_logger:
            self.info("%s", message)

    def log_restarter_event(self, message: str) -> None:
        """Write `message`, a line of the layered-restart protocol."""
        self.log_for_restarter(message)


class RankMonitorServer:
    """A monitor for one rank, without a launcher; it evaluates and kills.

    It detects and kills hung ranks like the launcher's monitor, but does not clean up other
    processes of the job. It listens once it is made. SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 end it
    in order.

    Args:
        cfg: The configuration.
        ipc_socket_path: Path of the socket for the rank.
        rank_monitor_ready_event: Set by `serve` when signal handlers are installed.
        logger: Writes the layered-restart lines.
        is_restarter_logger: Whether to write such lines.
    """

    RANK_MONITOR_INIT_TIMEOUT = 180.0
    """Seconds that `run_in_subprocess` waits for the monitor."""

    def __init__(
        self,
        cfg: FaultToleranceConfig,
        ipc_socket_path: str,
        rank_monitor_ready_event: _Settable,
        logger: RankMonitorLogger,
        is_restarter_logger: bool,
    ) -> None:
        start = Start(
            config=cfg.to_dict(),
            socket_paths=[ipc_socket_path],
            run_dir=os.path.dirname(os.path.abspath(ipc_socket_path)),
            is_restarter_logger=is_restarter_logger,
        )
        self._server = MonitorServer(start, None, restarter=logger)
        self._ready = rank_monitor_ready_event

    def serve(self) -> None:
        """Monitor the rank until a signal arrives."""
        with leave_at_signals(self._server):
            self._ready.set()
            self._server.run()

    def stop(self) -> None:
        """End `serve` soon; from any thread."""
        self._server.leave()

    @staticmethod
    def run(
        cfg: FaultToleranceConfig,
        ipc_socket_path: str,
        rank_monitor_ready_event: _Settable,
        is_restarter_logger: bool,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Run a monitor as the main function of a process; parameters as for the class.

        `env` is added to the environment.
        """
        os.environ.update(env or {})
        configure_logging(cfg.log_level, None)
        logger = RankMonitorLogger(level=cfg.log_level, is_restarter_logger=is_restarter_logger)
        RankMonitorServer(
            cfg, ipc_socket_path, rank_monitor_ready_event, logger, is_restarter_logger
        ).serve()

    @staticmethod
    def run_in_subprocess(
        cfg: FaultToleranceConfig,
        ipc_socket_path: str,
        is_restarter_logger: bool = False,
        mp_ctx: object = None,
        env: Mapping[str, str] | None = None,
    ) -> MonitorProcess:
        """Start a monitor in a separate process and wait until it listens.

        The monitor ends when this process ends for any reason. `env` is added to the environment;
        `mp_ctx` is not used: it is always an exec of an interpreter without torch. The other
        parameters are those of the class.

        Raises:
            RuntimeError: It was not ready in time.
        """
        del mp_ctx
        handle = MonitorHandle.launch(
            cfg.to_dict(),
            [ipc_socket_path],
            ready_limit_s=RankMonitorServer.RANK_MONITOR_INIT_TIMEOUT,
            env={**os.environ, **(env or {})},
            run_dir=os.path.dirname(os.path.abspath(ipc_socket_path)),
            is_restarter_logger=is_restarter_logger,
        )
        return MonitorProcess(handle)


class MonitorProcess:
    """A monitor's process with the methods of `multiprocessing.Process`.

    It is daemonic: it ends with this process. It continues if only this object is deleted.
    """

    def __init__(self, handle: MonitorHandle) -> None:
        self._handle = handle
        self._owner_pid = os.getpid()
        _PROCESSES.add(self)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._handle.child.pid

    @property
    def exitcode(self) -> int | None:
        """Return the monitor's exit code, negative for a signal; None while it runs."""
        status = self._handle.child.poll()
        return None if status is None else status.returncode

    def is_alive(self) -> bool:
        """Return whether the monitor runs."""
        return self.exitcode is None

    def terminate(self) -> None:
        """Ask the monitor to end in order."""
        self._handle.child.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the monitor."""
        self._handle.child.signal(signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the monitor has ended, at most `timeout` seconds."""
        if self._handle.child.wait(timeout) is not None:
            self._handle.close()
            _PROCESSES.discard(self)


_PROCESSES: set[MonitorProcess] = set()


def _end_all() -> None:
    for process in list(_PROCESSES):
        # When a forked child ends, the monitor is still its parent's.
        if process._owner_pid == os.getpid():  # noqa: SLF001 - the module's own class
            process.terminate()
            process.join(1.0)
            process.kill()
            process.join(1.0)


atexit.register(_end_all)
