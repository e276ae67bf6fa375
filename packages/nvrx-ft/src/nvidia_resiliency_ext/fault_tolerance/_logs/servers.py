# SPDX-License-Identifier: Apache-2.0
"""Owns the log servers' processes on the rendezvous host: one, or leaves and a root above them.

One that ends is started again; its clients keep their lines meanwhile.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._config.launch_config import LogServerPlan
from nvidia_resiliency_ext.shared_utils.children import Child, start_child
from nvidia_resiliency_ext.shared_utils.clock import Clock, Deadline
from nvidia_resiliency_ext.shared_utils.errors import ChildStartError, NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

from .sinks import endpoint_of

logger = logging.getLogger("nvrx")

_PACKAGE = "nvidia_resiliency_ext.shared_utils"
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_KILL_MARGIN_S = 5.0
_NODES_COME_BACK_S = 5.0  # within which a node that lost its server tries again


@dataclass(eq=False)
class LogServer:
    """One server and its process while that runs."""

    name: str
    port: int
    grace_s: float  # to end in
    argv: Sequence[str]
    child: Child | None = None
    delay_s: float = _FIRST_DELAY_S  # before the next start


def servers_of(plan: LogServerPlan, host: str) -> list[LogServer]:
    """Return the servers of a plan, the root first."""
    ports = plan.ports
    roots = [word for root in plan.allowed_roots for word in ("--allowed-root", root)]

    def server(name: str, module: str, port: int, grace_s: float, *more: str) -> LogServer:
        argv = [sys.executable, "-m", f"{_PACKAGE}.{module}", "--host", host, "--port", str(port)]
        argv += ["--graceful-shutdown-timeout", f"{grace_s:g}", *roots, *more]
        return LogServer(name, port, grace_s, argv)

    root_grace_s = plan.grace_s * (2 if ports.uses_two_level else 1)
    servers = [server("root", "grpc_log_server", ports.root_listen_port, root_grace_s)]
    if ports.uses_two_level:
        more = ["--upstream", endpoint_of(host, ports.root_listen_port)]
        more += ["--max-queue-chunks", str(plan.leaf_queue_chunks)]
        servers += [
            server(f"leaf{index}", "grpc_log_leaf_server", port, plan.grace_s, *more)
            for index, port in enumerate(ports.listen_ports()[:-1])
        ]
    return servers


@dataclass(eq=False)
class LogServers:
    """The log servers of a job. One thread only: the kernel ends them with it."""

    plan: LogServerPlan
    host: str
    token_file: str
    environ: Mapping[str, str]
    loop: EventLoop
    clock: Clock

    def __post_init__(self) -> None:
        self._env = {**self.environ, _env.LOG_FUNNEL_TOKEN_FILE: self.token_file}
        self._servers = servers_of(self.plan, self.host)
        self._is_stopping = False
        self._nodes_are_back_at = 0.0

    def start(self) -> None:
        """Start all of them; they listen a moment later, and clients try until then."""
        for server in self._servers:
            _check_port(self.host, server.port)
        try:
            for server in self._servers:
                self._start(server)
        except (OSError, ChildStartError) as error:
            self.stop()
            raise NvrxError(f"the log server cannot be started: {error}") from error

    def expect_nodes(self) -> None:
        """Record that nodes have lines for these servers and have still to find them."""
        self._nodes_are_back_at = self.clock.monotonic() + _NODES_COME_BACK_S

    def _start(self, server: LogServer) -> None:
        prefix, output = self.plan.log_prefix, None
        if prefix is not None:
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            output = os.open(f"{prefix}_log_{server.name}.log", flags, 0o644)
        try:
            child = server.child = start_child(
                server.argv, env=self._env, stdout=output, stderr=output, die_with_parent=True
            )
        finally:
            if output is not None:
                os.close(output)
        self.loop.watch(child.fileno(), lambda: self._ended(server, child))

    def _ended(self, server: LogServer, child: Child) -> None:
        status = child.poll()
        if status is None:
            return
        self._forget(server, child)
        logger.warning(
            "log server %s has ended (%s), it starts again in %g s; the nodes keep their lines",
            *(server.name, status.describe(), self._schedule(server)),
        )

    def _schedule(self, server: LogServer) -> float:
        """Start a server again after a pause that grows, and return the pause."""
        delay_s, server.delay_s = server.delay_s, min(2 * server.delay_s, _LONGEST_DELAY_S)
        self.loop.call_at(self.clock.monotonic() + delay_s, lambda: self._start_again(server))
        return delay_s

    def _start_again(self, server: LogServer) -> None:
        if self._is_stopping:
            return
        try:
            self._start(server)
            self.expect_nodes()
        except (OSError, ChildStartError) as error:
            what = "log server %s cannot be started: %s; it is tried again in %g s"
            logger.error(what, server.name, error, self._schedule(server))  # noqa: TRY400

    def _forget(self, server: LogServer, child: Child) -> None:
        server.child = None
        self.loop.unwatch(child.fileno())
        child.close()

    def stop(self, *, at_once: bool = False) -> None:
        """End the log servers, leaves first, each within its time; each writes its lines."""
        self._is_stopping = True
        left_s = self._nodes_are_back_at - self.clock.monotonic()
        running = [(server, server.child) for server in self._servers if server.child is not None]
        root = [one for one in running if one[0].name == "root"]
        if left_s > 0 and root and not at_once:
            root[0][1].wait(left_s)
        for group in ([one for one in running if one not in root], root):
            _end_together(group, grace_s=0.0 if at_once else None)
        for server, child in running:
            self._forget(server, child)


def _end_together(servers: Sequence[tuple[LogServer, Child]], grace_s: float | None = None) -> None:
    """End servers, which have their own time to do so, or no more than `grace_s`."""
    for _, child in servers:
        child.signal(signal.SIGTERM)
    if not servers:
        return
    own_s = servers[0][0].grace_s + _KILL_MARGIN_S
    deadline = Deadline.after(own_s if grace_s is None else grace_s)
    for server, child in servers:
        if child.wait(deadline.remaining()) is None:
            if grace_s is None:
                logger.error("log server %s does not end in time: SIGKILL", server.name)
            child.signal(signal.SIGKILL)


def _check_port(host: str, port: int) -> None:
    """Raise early if the port is taken, or the address is not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)  # SO_REUSEADDR lets two bind, but only one listen.
    except OSError as error:
        raise NvrxError(
            f"the log server cannot listen on {endpoint_of(host, port)}: {error.strerror}; "
            "choose another --ft-log-server-port"
        ) from error
