# SPDX-License-Identifier: Apache-2.0
"""Start, claim and run the process that serves a job's store; `boot.py` runs it.

It stays while its starter lives, then while any client is connected; it ends on SIGTERM too. It
reports each store in a line of JSON: the first, and those that its starter orders at other ports.

Importing all of torch takes 1.5 s of processor time while the job waits. The only class needed is
in torch's extension module, which imports two packages of torch's that may be empty here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from nvidia_resiliency_ext.shared_utils.children import PidHandle
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError
from nvidia_resiliency_ext.shared_utils.store_sockets import serving_options

from ._store.access import StoreAccess
from ._store.endpoint import (
    Endpoint,
    ForeignValueError,
    NobodyListensError,
    count_served,
    first_line,
    is_reachable_from_elsewhere,
    listen,
    port_is_held,
    require_json,
)

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
PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_monitor", "boot.py")
"""What the process runs."""

# torch resolves the address of each client that connects, and serves no other client meanwhile.
_RESOLVER = "RES_OPTIONS"
_QUICK = "timeout:1 attempts:1"
_PROBE_S = 5.0
_START_S = 60.0  # most of it is the import of torch
_IDLE_S = 1.0  # its stay when its starter has ended and nobody is connected any more
_END_S = 10.0
_KILLED_S = 5.0
_LONGEST_LINE = 1 << 14
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
    report, problem = None, f"it has not reported within {start_s:g} s"
    try:
        report = _read_report(ours, start_s)
    except OSError as error:
        problem = f"its report cannot be read: {error}"
    if report is None:
        process.kill()
        return store_server, {"error": problem}
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
            line = lines.readline(_LONGEST_LINE)
    except TimeoutError:
        return None
    report: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
    return report


_PACKAGE = "torch"
_DISTRIBUTED = "torch.distributed"
_EXTENSION = "torch._C"
_C10D = "torch._C._distributed_c10d"
_DEPENDENCIES = os.path.join("lib", "libtorch_global_deps.so")


class PartialImportError(ImportError):
    """This torch cannot be imported in part; what was imported stays until the process ends."""


def tcp_store_class(*, whole: bool = False) -> Any:
    """Return torch's TCPStore; a PartialImportError if it needs the rest of torch."""
    if _C10D in sys.modules:
        return sys.modules[_C10D].TCPStore
    if whole:
        return importlib.import_module(_DISTRIBUTED).TCPStore
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("torch is not installed")
    folder = spec.submodule_search_locations[0]
    try:
        return _store_class(folder)
    except Exception as error:
        raise PartialImportError(f"torch in {folder}: {error}") from error


def _store_class(folder: str) -> Any:
    for name, path in ((_PACKAGE, folder), (_DISTRIBUTED, os.path.join(folder, "distributed"))):
        package = types.ModuleType(name)
        package.__path__ = [path]
        sys.modules[name] = package
    dependencies = os.path.join(folder, _DEPENDENCIES)
    if os.path.exists(dependencies):
        # As torch does it: what CUDA and others need is found by all later.
        ctypes.CDLL(dependencies, mode=ctypes.RTLD_GLOBAL)
    extension = importlib.import_module(_EXTENSION)
    extension._c10d_init()  # noqa: SLF001 - torch.distributed begins with it
    return sys.modules[_C10D].TCPStore


_WHOLE_TORCH = "--whole-torch"
_OWN_CONNECTIONS = 1
_PERIOD_S = 0.25
_LONGEST_WAIT_S = 3600.0
_ORDER_S = 5.0


def main(text: str, *whole: str) -> int:
    """Serve a store until SIGTERM or until no client is left.

    `text` is JSON: a first order, the process `starter`, `channel_fd` of the socket for reports and
    more orders, and `idle_s`, the stay without starter and clients. `whole`: import all of torch.
    """
    duty = json.loads(text)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    _allow_open_files()
    channel = socket.socket(fileno=duty["channel_fd"])
    with channel:
        try:
            with _threads_without(signal.SIGTERM):
                order = duty["address"], duty["port"], duty["job"]
                stores, report = _host(*order, whole=bool(whole))
        except PartialImportError:
            # Begin again in the same process, with all of torch.
            os.set_inheritable(channel.fileno(), True)
            os.execv(sys.executable, [*sys.orig_argv, _WHOLE_TORCH])  # noqa: S606 - ourselves
        # Its starter may have ended.
        with contextlib.suppress(OSError):
            _send_report(channel, report)
        if not stores:
            return 1
        _attend(channel, duty["starter"], stores)
    _stay_while_used(list(stores), duty["idle_s"])
    # Ends its servers.
    stores.clear()
    return 0


@contextlib.contextmanager
def _threads_without(number: signal.Signals) -> Iterator[None]:
    """Start threads with a signal blocked, so that it always comes to the main thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def _host(
    address: str, port: int, job: str, *, whole: bool
) -> tuple[dict[int, Any], dict[str, Any]]:
    """Serve a store; return it by its port, or none, and the report."""
    try:
        listener = listen(address or "0.0.0.0", port)  # noqa: S104 - asked for by name
        port = listener.getsockname()[1]
        options = serving_options(listener, importlib.metadata.version("torch"), without_libuv=True)
        host = address or "127.0.0.1"
        store = tcp_store_class(whole=whole)(host, port, wait_for_workers=False, **options)
        claim(store, job)
    except PartialImportError:
        raise
    except Exception as error:  # noqa: BLE001 - its starter says it
        number = error.errno if isinstance(error, OSError) else None
        text = getattr(error, "strerror", None) or first_line(error)
        return {}, {"error": text, "errno": number}
    return {port: store}, {"port": port, "pid": os.getpid()}


def _attend(channel: socket.socket, starter_pid: int, stores: dict[int, Any]) -> None:
    """Carry out the starter's orders until the starter ends."""
    orders = threading.Thread(target=_take_orders, args=(channel, stores), daemon=True)
    with _threads_without(signal.SIGTERM):
        orders.start()
    with contextlib.suppress(ProcessLookupError), PidHandle(starter_pid) as starter:
        while not starter.wait(_LONGEST_WAIT_S):
            pass
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
    orders.join(_ORDER_S)


def _take_orders(channel: socket.socket, stores: dict[int, Any]) -> None:
    # What is no order ends it: the starter then does without.
    with contextlib.suppress(OSError, TypeError, ValueError), channel.makefile("rb") as lines:
        while line := lines.readline(_LONGEST_LINE):
            more, report = _host(**json.loads(line), whole=False)
            stores.update(more)
            _send_report(channel, report)
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)


def _stay_while_used(ports: list[int], idle_s: float) -> None:
    # torch tells nobody who comes and goes: it is looked at now and then.
    pause = threading.Event()
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < idle_s:
        pause.wait(min(_PERIOD_S, idle_s))
        if any(count_served(port, _OWN_CONNECTIONS + 1) > _OWN_CONNECTIONS for port in ports):
            idle_since = time.monotonic()


def _allow_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _send_report(channel: socket.socket, report: dict[str, Any]) -> None:
    channel.sendall(json.dumps(report).encode() + b"\n")
