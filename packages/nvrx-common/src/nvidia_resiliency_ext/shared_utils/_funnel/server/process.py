# SPDX-License-Identifier: Apache-2.0
"""A server as a process: its address, signals, limits, memory, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from nvidia_resiliency_ext.shared_utils._funnel.shared import MAX_MESSAGE_BYTES, Access

from . import chunks
from .service import AddressError, Service

_Result = TypeVar("_Result")

CLOSE_S = 10.0  # how long a funnel that closes may take to write what waits

_STATS_S = 60.0
_CUT_OFF_S = 5.0
_COLLECT_AFTER = 10_000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_KEPT_BYTES = 16 << 20
_LARGEST_KEPT_BYTES = 1 << 20
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MAX_PENDING = 100_000
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Otherwise a second server shares the port in silence, and each gets half of the job.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A node that has vanished must not count as connected for ever.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A fixed window per stream: the probed one grows to megabytes for each of many clients.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 256 << 10),
    # After a restart all nodes come at once; by default gRPC cancels some above a thousand.
    ("grpc.server.max_pending_requests", _MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of both servers; `host` may be `unix:PATH`, `grace_s` is from the request to end."""

    host: str
    port: int
    grace_s: float
    access: Access


def run_until_complete(main: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    """Run the program's coroutine function in a fresh event loop; return its result."""
    # Now, so that the collector leaves it alone and the first call does not wait for it: the
    # generated classes and a first message take 15-50 ms.
    import grpc.aio  # noqa: F401

    chunks.health(0)
    _keep_freed_memory()
    with _calm_collector():
        return asyncio.run(main())


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set in the main thread; a second signal kills.

    The kernel's default is back after the first one, so the second works when nothing here does.
    """
    stopping = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        return stopping
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stopping.set()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    return stopping


async def happened(what: Awaitable[Any], timeout_s: float) -> bool:
    """Wait for an awaitable; return whether it ended in time."""
    try:
        await asyncio.wait_for(what, timeout_s)
    except (asyncio.TimeoutError, TimeoutError):
        return False
    return True


def raise_file_limit() -> None:
    """Allow as many open files as the system lets us: a thousand nodes are a thousand sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _keep_freed_memory() -> None:
    """Make glibc reuse freed memory: its page faults took a seventh of the server's time."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@contextlib.contextmanager
def _calm_collector() -> Iterator[None]:
    """Keep the garbage collector from the program itself: it held up all streams for 0.1 s."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def serve(
    service: Service, config: ServerConfig, stopping: asyncio.Event, remark: str = ""
) -> None:
    """Serve until the event is set, then until every stream has ended or the grace is over."""
    logger = service.logger
    server, where = await _listen(service, config)
    logger.info("listening on %s%s", where, remark)
    while not await happened(stopping.wait(), _STATS_S):
        service.log_stats()
    service.prepare_end()
    logger.info(
        "asked to end: serving %d streams for up to %.0f s", service.stream_count, config.grace_s
    )
    if not await happened(service.wait_empty(), config.grace_s):
        logger.warning("%d streams are cut off", service.stream_count)
    await server.stop(0)
    await happened(service.wait_empty(), _CUT_OFF_S)


async def _listen(service: Service, config: ServerConfig) -> tuple[Any, str]:
    import grpc.aio

    address = _address(config.host, config.port)
    is_unix = config.host.startswith("unix:")
    if is_unix and _is_served(address):
        raise AddressError(f"cannot listen on {address}: another server does")
    credentials = config.access.server_credentials()
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((service.handler(),))
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise AddressError(f"cannot listen on {address}: {error}") from error
    if port == 0 and not is_unix:
        raise AddressError(f"cannot listen on {address}")
    await server.start()
    return server, address if is_unix else _address(config.host, port)


def _address(host: str, port: int) -> str:
    """Return the address for gRPC; a host `unix:PATH` is a Unix socket without a port."""
    if host.startswith("unix:"):
        return host
    if ":" in host and not host.startswith("["):
        return f"[{host}]:{port}"
    return f"{host}:{port}"


def _is_served(address: str) -> bool:
    """Return whether somebody listens on a Unix socket; gRPC would take its place in silence."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.removeprefix("unix:").removeprefix("//"))
        except BlockingIOError:
            return True  # so many want to talk to it that there is no space for one more
        except (OSError, ValueError):
            return False
    return True
