# SPDX-License-Identifier: Apache-2.0
"""Start and claim the process that serves a job's store, once per job and port."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from nvidia_resiliency_ext.inprocess._store.access import StoreAccess
from nvidia_resiliency_ext.inprocess._store.names import (
    Endpoint,
    ForeignValueError,
    NobodyListensError,
    port_is_held,
    require_json,
)
from nvidia_resiliency_ext.inprocess._store.sockets import is_reachable_from_elsewhere
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError

_KEY = "nvrx/owner"


class StoreInUseError(NvrxError):
    """The port belongs to another job or to another kind of program."""


def claim(store: Any, job: str) -> None:
    """Write the job's name into a store; a StoreInUseError if another job's stands there."""
    text = StoreAccess(store).swap(_KEY, "", json.dumps(job))
    owner = require_json(_KEY, text)
    if not isinstance(owner, str):
        raise ForeignValueError(_KEY, text)
    if owner != job:
        raise StoreInUseError(f"it serves job {owner!r}, this is job {job!r}")


logger = logging.getLogger("nvrx")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = os.path.join(_PACKAGE, "_monitor", "boot.py")
"""What the process runs."""


# torch resolves the address of each client that connects, and serves no other client meanwhile.
_RESOLVER = "RES_OPTIONS"
_QUICK = "timeout:1 attempts:1"
_PROBE_S = 5.0
_START_S = 60.0  # most of it is the import of torch
_IDLE_S = 1.0  # its stay when its starter has ended and nobody is connected any more
_END_S = 10.0
_KILLED_S = 5.0
_LONGEST_REPORT = 1 << 14
Connect = Callable[[Endpoint, timedelta], Any]


class StoreServerStartError(StoreLostError):
    """The process that is to host the store did not start."""


@dataclass(frozen=True, slots=True)
class StoreServer:
    """A store that is hosted here; process and channel are None if it was there already."""

    endpoint: Endpoint
    process: subprocess.Popen[bytes] | None = None
    channel: socket.socket | None = None
    _maker: int = field(default_factory=os.getpid)

    def ask(self, order: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Have the process host one more store; None if it cannot be asked."""
        if self.channel is None or self.process is None or self._maker != os.getpid():
            return None  # a forked child's orders would be mixed with its parent's
        try:
            self.channel.sendall(json.dumps(order).encode() + b"\n")
            return _read_report(self.channel, timeout_s) or None
        except OSError:
            return None

    def stop(self, timeout_s: float = _END_S) -> None:
        """End the process if it was started by this object's maker, and wait for its end."""
        if self.channel is not None:
            self.channel.close()
        if self.process is not None:
            self.process.terminate()
            _wait_for_end(self.process, timeout_s)


def host_store(  # noqa: PLR0913 - one of each part
    endpoint: Endpoint,
    job: str,
    connect: Connect,
    *,
    is_single_node: bool = False,
    start_s: float = _START_S,
    idle_s: float = _IDLE_S,
    beside: StoreServer | None = None,
) -> StoreServer:
    """Make sure that a store of this job listens at an endpoint of this host; it may do so already.

    `beside` is a server that this process has started: if it lives it hosts this store, too. A
    StoreInUseError if the port belongs to another job, or to a program that is no store.
    """
    address = endpoint.host
    if not is_single_node and not is_reachable_from_elsewhere(address):
        text = "%s is a loopback address on this host: the store listens at all its addresses"
        logger.warning(text, address)
        address = ""
    order = {"address": address, "port": endpoint.port, "job": job}
    started = StoreServer(endpoint)
    report = None if beside is None else beside.ask(order, start_s)
    if report is None:
        started, report = _start(order, start_s, idle_s)
    if "port" in report:
        return replace(started, endpoint=Endpoint(endpoint.host, report["port"], is_served=True))
    if started.channel is not None and started.process is not None:
        started.channel.close()
        _wait_for_end(started.process, _END_S)
    if report.get("errno") != errno.EADDRINUSE:
        raise StoreServerStartError(f"no store can be hosted at {endpoint}: {report.get('error')}")
    _join(endpoint, job, connect)
    return StoreServer(Endpoint(endpoint.host, endpoint.port, is_served=True))


def _join(endpoint: Endpoint, job: str, connect: Connect) -> None:
    advice = "give the wrapper another port in store_kwargs"
    try:
        claim(connect(endpoint, timedelta(seconds=_PROBE_S)), job)
    except StoreInUseError as error:
        raise StoreInUseError(f"port {endpoint.port} is in use: {error}; {advice}") from None
    except NobodyListensError:
        raise StoreInUseError(
            f"no store can listen at {endpoint}: {port_is_held(endpoint.port)};"
            " MASTER_PORT, or port in store_kwargs, says which one"
        ) from None
    except (StoreLostError, ForeignValueError) as error:
        raise StoreInUseError(
            f"port {endpoint.port} is in use by what is no store of this job ({error}); {advice}"
        ) from None


def _start(
    order: dict[str, Any], start_s: float, idle_s: float
) -> tuple[StoreServer, dict[str, Any]]:
    ours, theirs = socket.socketpair()
    with theirs:
        duty = {**order, "starter": os.getpid(), "idle_s": idle_s, "channel_fd": theirs.fileno()}
        try:
            process = subprocess.Popen(
                [sys.executable, PROGRAM, "--store", json.dumps(duty)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd="/",
                env={_RESOLVER: _QUICK, **os.environ},
            )
        except OSError as error:
            ours.close()
            raise StoreServerStartError(f"the store's process does not start: {error}") from None
    store_server = StoreServer(Endpoint("", 0, is_served=False), process, ours)
    try:
        report = _read_report(ours, start_s)
    except OSError as error:
        process.kill()
        return store_server, {"error": f"its report cannot be read: {error}"}
    if report is None:
        process.kill()
        return store_server, {"error": f"it has not reported within {start_s:g} s"}
    if not report:
        ours.close()
        return store_server, {"error": f"it ended with exit code {_wait_for_end(process, _END_S)}"}
    return store_server, report


def _wait_for_end(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Wait for an ending process, kill it if it is late, and return its exit code."""
    for limit_s in (timeout_s, _KILLED_S):
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
    logger.warning("process %d of the store has not ended", process.pid)
    return None


def _read_report(channel: socket.socket, timeout_s: float) -> dict[str, Any] | None:
    """Return a store server's report of one line; None if it is late, an empty one if it ends."""
    channel.settimeout(max(timeout_s, 0.001))  # 0 would not wait at all
    try:
        with channel.makefile("rb") as lines:
            line = lines.readline(_LONGEST_REPORT)
    except TimeoutError:
        return None
    report: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
    return report
