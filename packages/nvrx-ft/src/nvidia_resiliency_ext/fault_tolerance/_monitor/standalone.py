# SPDX-License-Identifier: Apache-2.0
"""Owns a monitor that serves one rank without a launcher; the monitoring itself is in `server`."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Protocol

from .handle import MonitorHandle
from .messages import Start
from .server import MonitorServer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig

__all__ = ["MonitorProcess", "RankMonitorLogger", "RankMonitorServer"]


class _Settable(Protocol):
    def set(self) -> None:
        """Say that it happened."""


class RankMonitorLogger(logging.Logger):
    """The logger of a monitor: names the connected rank, and writes layered-restart lines.

    Messages go on to the logger "nvrx".
    """

    def __init__(
        self,
        name: str = "nvrx.monitor",
        level: int = logging.INFO,
        is_restarter_logger: bool = False,
    ) -> None:
        """Make a logger under "nvrx".

        Args:
            name: Its name.
            level: What it passes on.
            is_restarter_logger: Whether layered-restart lines are written.
        """
        super().__init__(name, level)
        self.parent = logging.getLogger("nvrx")
        self.is_restarter_logger = is_restarter_logger
        self.rank: int | None = None

    def set_connected_rank(self, rank: int | None) -> None:
        """Set the rank that is named in later messages.

        Args:
            rank: The rank; None: no rank.
        """
        self.rank = rank

    def makeRecord(self, *args: Any, **kwargs: Any) -> logging.LogRecord:  # noqa: N802 - logging's
        """Add the rank as an attribute of the record.

        Args:
            args: As for `logging.Logger.makeRecord`.
            kwargs: As for `logging.Logger.makeRecord`.
        """
        record = super().makeRecord(*args, **kwargs)
        record.connected_rank = self.rank
        return record

    def log_for_restarter(self, message: str) -> None:
        """Write a line that only tools for layered restarts want.

        Args:
            message: The line.
        """
        if self.is_restarter_logger:
            self.info("%s", message)

    def log_restarter_event(self, message: str) -> None:
        """Write a line of the layered-restart protocol.

        Args:
            message: The line.
        """
        self.log_for_restarter(message)


class RankMonitorServer:
    """A monitor for one rank, without a launcher.

    It judges and kills like the launcher's monitor, but it sweeps nothing: what it knows of the
    job is one rank. SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 end it in order.
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
        """Listen for the rank.

        Args:
            cfg: The configuration.
            ipc_socket_path: Where to listen.
            rank_monitor_ready_event: Set by `serve` when signals are obeyed, too.
            logger: Writes the layered-restart lines.
            is_restarter_logger: Whether there are any.
        """
        start = Start(
            config=cfg.to_dict(),
            socket_paths=[ipc_socket_path],
            run_dir=os.path.dirname(os.path.abspath(ipc_socket_path)),
            is_restarter_logger=is_restarter_logger,
        )
        self._server = MonitorServer(start, None, restarter=logger)
        self._ready = rank_monitor_ready_event

    def serve(self) -> None:
        """Watch the rank until a signal ends this."""
        from .boot import LEAVE_SIGNALS, leave_at_signals

        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(leave_at_signals(self._server, LEAVE_SIGNALS))
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
        """Be a monitor: the body of a process.

        Args:
            cfg: The configuration.
            ipc_socket_path: Where to listen.
            rank_monitor_ready_event: Set when it listens.
            is_restarter_logger: Whether to write layered-restart lines.
            env: Added to the environment.
        """
        from .boot import configure_logging

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
        """Start a monitor in a process of its own and wait until it listens.

        It ends when this process does, however that happens.

        Args:
            cfg: The configuration.
            ipc_socket_path: Where to listen.
            is_restarter_logger: Whether to write layered-restart lines.
            mp_ctx: Accepted for callers that choose a start method: it is always an exec of an
                interpreter without torch.
            env: Added to the environment.

        Raises:
            RuntimeError: It was not ready in time.
        """
        del mp_ctx
        handle = MonitorHandle.start(
            cfg.to_dict(),
            [ipc_socket_path],
            timeout_s=RankMonitorServer.RANK_MONITOR_INIT_TIMEOUT,
            env={**os.environ, **(env or {})},
            run_dir=os.path.dirname(os.path.abspath(ipc_socket_path)),
            is_restarter_logger=is_restarter_logger,
        )
        return MonitorProcess(handle)


class MonitorProcess:
    """A monitor's process with the face of `multiprocessing.Process`.

    It is daemonic: it ends with this process. It goes on if only this object is dropped.
    """

    def __init__(self, handle: MonitorHandle) -> None:
        """Take over a monitor that is ready."""
        self._handle = handle
        self._owner_pid = os.getpid()
        _PROCESSES.add(self)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._handle.child.pid

    @property
    def exitcode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        status = self._handle.child.poll()
        return None if status is None else status.returncode

    def is_alive(self) -> bool:
        """Return whether it runs."""
        return self.exitcode is None

    def terminate(self) -> None:
        """Ask it to end in order."""
        self._handle.child.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self._handle.child.signal(signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it ended, at most `timeout` seconds."""
        if self._handle.child.wait(timeout) is not None:
            self._handle.close()
            _PROCESSES.discard(self)


_PROCESSES: set[MonitorProcess] = set()


def _end_all() -> None:
    for process in list(_PROCESSES):
        if process._owner_pid != os.getpid():  # noqa: SLF001 - the module's own class
            continue  # a forked child ends: the monitor is its parent's
        process.terminate()
        process.join(1.0)
        process.kill()
        process.join(1.0)


atexit.register(_end_all)
