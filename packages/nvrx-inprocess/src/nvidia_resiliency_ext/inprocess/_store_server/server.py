# SPDX-License-Identifier: Apache-2.0
"""Serve a job's store in a process of its own; `boot.py` runs it.

It stays while its starter lives, then while any client is connected; it ends on SIGTERM too. It
reports its start in one line of JSON. Its starter may order more stores at other ports, one line of
JSON each, answered the same way.

Importing all of torch takes 1.5 s of processor time while the job waits. The only class needed is
in torch's extension module, which imports two packages of torch's that may be empty here.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

from nvidia_resiliency_ext.inprocess._store.names import first_line
from nvidia_resiliency_ext.inprocess._store.sockets import count_served, listen
from nvidia_resiliency_ext.shared_utils.children import PidHandle
from nvidia_resiliency_ext.shared_utils.store_sockets import serving_options

from .hosting import claim

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
_LONGEST_ORDER = 1 << 14
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
    """Do what the starter orders, until it ends."""
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
        while line := lines.readline(_LONGEST_ORDER):
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
