# SPDX-License-Identifier: Apache-2.0
"""Owns the log servers' processes on the rendezvous host: one, or leaves and a root above them.

One that ends is started again; its clients keep their lines meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.shared_utils.children import Child, start_child
from nvidia_resiliency_ext.shared_utils.clock import Clock, Deadline
from nvidia_resiliency_ext.shared_utils.errors import ChildStartError, NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

from .sinks import endpoint_of

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._config.launch_config import LogServerPlan


logger = logging.getLogger("nvrx")

_PACKAGE = "nvidia_resiliency_ext.shared_utils"
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_KILL_MARGIN_S = 5.0
# A node that has lost its server tries again within this time.
_NODES_COME_BACK_S = 5.0


class LogServerError(NvrxError):
    """A log server cannot run here."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """One server: its name, its port, how long it may take to end, and how it is started."""

    name: str
    port: int
    grace_s: float
    argv: tuple[str, ...]


def server_commands(plan: LogServerPlan, host: str) -> list[ServerCommand]:
    """Return the servers of a plan, the root first."""
    ports = plan.ports
    roots = [word for root in plan.allowed_roots for word in ("--allowed-root", root)]

    def command(name: str, module: str, port: int, grace_s: float, *more: str) -> ServerCommand:
        argv = [sys.executable, "-m", f"{_PACKAGE}.{module}", "--host", host, "--port", str(port)]
        argv += ["--graceful-shutdown-timeout", f"{grace_s:g}", *roots, *more]
        return ServerCommand(name, port, grace_s, tuple(argv))

    root_grace_s = plan.grace_s * (2 if ports.uses_two_level else 1)
    root = command("root", "grpc_log_server", ports.root_listen_port, root_grace_s)
    if not ports.uses_two_level:
        return [root]
    upstream = ("--upstream", endpoint_of(host, ports.root_listen_port))
    queue = ("--max-queue-chunks", str(plan.leaf_queue_chunks))
    more, module = (*upstream, *queue), "grpc_log_leaf_server"
    ports_of_leaves = ports.listen_ports()[:-1]
    return [root] + [
        command(f"leaf{index}", module, port, plan.grace_s, *more)
        for index, port in enumerate(ports_of_leaves)
    ]


@dataclass(eq=False)
class LogServers:
    """The log servers of a job. One thread only: the kernel ends them with it."""

    plan: LogServerPlan
    host: str
    token_file: str | None
    environ: Mapping[str, str]
    loop: EventLoop
    clock: Clock

    def __post_init__(self) -> None:
        self._env = {k: v for k, v in self.environ.items() if k != _env.LOG_FUNNEL_TOKEN_FILE}
        if self.token_file is not None:
            self._env[_env.LOG_FUNNEL_TOKEN_FILE] = self.token_file
        self._commands = server_commands(self.plan, self.host)
        self._running: dict[str, Child] = {}
        self._delays: dict[str, float] = {}
        self._is_stopping = False
        self._nodes_are_back_at = 0.0

    def start(self) -> None:
        """Start all of them; they listen a moment later, and clients try until then."""
        check_ports(self.host, [command.port for command in self._commands])
        try:
            for command in self._commands:
                self._start(command)
        except (OSError, ChildStartError) as error:
            self.stop()
            raise LogServerError(f"the log server cannot be started: {error}") from error

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._running.items()}

    def expect_nodes(self) -> None:
        """Record that nodes have lines for these servers and have still to find them."""
        self._nodes_are_back_at = self.clock.monotonic() + _NODES_COME_BACK_S

    def _start(self, command: ServerCommand) -> None:
        with contextlib.ExitStack() as opened:
            output = self._open_log(command.name)
            if output is not None:
                opened.callback(os.close, output)
            child = start_child(
                command.argv, env=self._env, stdout=output, stderr=output, die_with_parent=True
            )
        self._running[command.name] = child
        self.loop.watch(child.fileno(), lambda: self._ended(command))

    def _open_log(self, name: str) -> int | None:
        prefix = self.plan.log_prefix
        if prefix is None:
            return None
        os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(f"{prefix}_log_{name}.log", flags, 0o644)

    def _ended(self, command: ServerCommand) -> None:
        status = self._running[command.name].poll()
        if status is None:
            return
        self._forget(command.name)
        logger.warning(
            "log server %s has ended (%s), it starts again in %g s; the nodes keep their lines",
            *(command.name, status.describe(), self._schedule(command)),
        )

    def _schedule(self, command: ServerCommand) -> float:
        """Start a server again after a pause that grows, and return the pause."""
        delay_s = self._delays.get(command.name, _FIRST_DELAY_S)
        self._delays[command.name] = min(2 * delay_s, _LONGEST_DELAY_S)
        self.loop.call_at(self.clock.monotonic() + delay_s, lambda: self._start_again(command))
        return delay_s

    def _start_again(self, command: ServerCommand) -> None:
        if self._is_stopping:
            return
        try:
            self._start(command)
            self.expect_nodes()
        except (OSError, ChildStartError) as error:
            what = "log server %s cannot be started: %s; it is tried again in %g s"
            logger.error(what, command.name, error, self._schedule(command))  # noqa: TRY400

    def _forget(self, name: str) -> None:
        child = self._running.pop(name)
        self.loop.unwatch(child.fileno())
        child.close()

    def stop(self, *, at_once: bool = False) -> None:
        """End them, leaves first, each within its time; what they have is written."""
        self._is_stopping = True
        left_s = self._nodes_are_back_at - self.clock.monotonic()
        root_child = self._running.get("root")
        if left_s > 0 and root_child is not None and not at_once:
            root_child.wait(left_s)
        for is_root in (False, True):
            group = [
                (one, self._running[one.name])
                for one in self._commands
                if one.name in self._running and (one.name == "root") is is_root
            ]
            _end_together(group, grace_s=0.0 if at_once else None)
        for name in list(self._running):
            self._forget(name)


def _end_together(
    servers: Sequence[tuple[ServerCommand, Child]], grace_s: float | None = None
) -> None:
    """End servers, which have their own time to do so, or no more than `grace_s`."""
    import signal

    for _, child in servers:
        child.signal(signal.SIGTERM)
    if not servers:
        return
    own_s = servers[0][0].grace_s + _KILL_MARGIN_S
    deadline = Deadline.after(own_s if grace_s is None else grace_s)
    for command, child in servers:
        if child.wait(deadline.remaining()) is None:
            if grace_s is None:
                logger.error("log server %s does not end in time: SIGKILL", command.name)
            child.signal(signal.SIGKILL)


def check_ports(host: str, ports: Sequence[int]) -> None:
    """Say early, and by name, which port is taken.

    Raises:
        LogServerError: One is, or the address is not this machine's.
    """
    for port in ports:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)  # SO_REUSEADDR lets two bind, but only one listen.
        except OSError as error:
            raise LogServerError(
                f"the log server cannot listen on {endpoint_of(host, port)}: {error.strerror}; "
                "choose another --ft-log-server-port"
            ) from error
