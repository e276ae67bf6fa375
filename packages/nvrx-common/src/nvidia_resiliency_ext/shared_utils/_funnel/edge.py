# SPDX-License-Identifier: Apache-2.0
"""Owns the gRPC server of the root: its methods, its address, and who may call them."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils._funnel import messages
from nvidia_resiliency_ext.shared_utils._funnel.mailbox import Mailbox
from nvidia_resiliency_ext.shared_utils._funnel.refusal import Refusal
from nvidia_resiliency_ext.shared_utils._funnel.rpc import StreamRpc, UnwrittenError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvidia_resiliency_ext.shared_utils._funnel.access import Access
    from nvidia_resiliency_ext.shared_utils._funnel.servicer import LogAggregationServicer

__all__ = ["MAX_MESSAGE_BYTES", "AddressError", "RootEdge", "address_of", "grpc_options", "start"]

_logger = logging.getLogger("LogAggregationServer")

MAX_MESSAGE_BYTES = 10 << 20
_MIN_PING_MS = 5_000
_PING_MS, _PING_TIMEOUT_MS = 60_000, 20_000
_WINDOW_BYTES = 256 << 10
_MAX_PENDING = 100_000


class AddressError(OSError):
    """The server cannot listen at its address."""


def grpc_options() -> list[tuple[str, int]]:
    """Return the settings of gRPC that both servers use."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Otherwise a second server shares the port in silence, and each gets half of the job.
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # A node that has vanished must not count as connected for ever.
        ("grpc.keepalive_time_ms", _PING_MS),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        # A fixed window per stream: the probed one grows to megabytes for each of many clients.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        # After a restart all nodes come at once; by default gRPC cancels some above a thousand.
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING),
    ]


def address_of(host: str, port: int) -> str:
    """Return what gRPC calls an address; a host `unix:PATH` is a Unix socket without a port."""
    if host.startswith("unix:"):
        return host
    if ":" in host and not host.startswith("["):
        return f"[{host}]:{port}"
    return f"{host}:{port}"


async def start(handlers: Mapping[str, Any], address: str, access: Access) -> tuple[Any, int]:
    """Start a gRPC server with the funnel's service.

    Returns:
        The server, and the port that it got.

    Raises:
        AddressError: It cannot listen there.
        ConfigError: A certificate cannot be read.
    """
    import grpc
    import grpc.aio

    if _is_served(address):
        raise AddressError(f"cannot listen on {address}: another server does")
    credentials = access.server_credentials()
    server = grpc.aio.server(options=grpc_options())
    service = grpc.method_handlers_generic_handler(messages.SERVICE, handlers)
    server.add_generic_rpc_handlers((service,))
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise AddressError(f"cannot listen on {address}: {error}") from error
    if port == 0 and not address.startswith("unix:"):
        raise AddressError(f"cannot listen on {address}")
    await server.start()
    return server, int(port)


def _is_served(address: str) -> bool:
    """Tell whether somebody listens on a Unix socket; gRPC would take its place in silence."""
    if not address.startswith("unix:"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.removeprefix("unix:").removeprefix("//"))
        except BlockingIOError:
            return True  # so many want to talk to it that there is no room for one more
        except (OSError, ValueError):
            return False
    return True


class RootEdge:
    """The methods of the root's service.

    Args:
        servicer: Counts clients and has the funnel.
        access: Who may call.

    It must be made in the event loop.
    """

    def __init__(self, servicer: LogAggregationServicer, access: Access) -> None:
        self._servicer = servicer
        self._funnel = servicer.funnel
        self._access = access
        self._rpcs: set[StreamRpc] = set()
        self._left = asyncio.Event()
        self._mailbox = Mailbox()

    def handlers(self) -> dict[str, Any]:
        """Return gRPC's handlers; messages stay bytes."""
        import grpc

        return {
            "StreamLogs": grpc.stream_unary_rpc_method_handler(self._stream_logs),
            "StreamLogsAcked": grpc.stream_stream_rpc_method_handler(self._stream_logs_acked),
            "HealthCheck": grpc.unary_unary_rpc_method_handler(self._health_check),
            "Stats": grpc.unary_unary_rpc_method_handler(self._stats),
        }

    async def wait_empty(self) -> None:
        """Return when no stream is open."""
        while self._rpcs:
            self._left.clear()
            await self._left.wait()

    async def _stream_logs(self, _requests: Any, context: Any) -> bytes:
        rpc = await self._enter(context, acknowledges=False)
        try:
            await rpc.run()
        except UnwrittenError as error:
            return messages.response(error.status, rpc.bytes_written)
        except Refusal as refusal:
            await self._refuse(context, rpc, refusal)
        finally:
            self._leave(rpc)
        seq = max((s.committed_seq for s in rpc.sources.values()), default=0)
        return messages.response("OK", rpc.bytes_received, seq)

    async def _stream_logs_acked(self, _requests: Any, context: Any) -> None:
        rpc = await self._enter(context, acknowledges=True)
        try:
            # The sender learns at once that the method exists.
            await context.send_initial_metadata(())
            await rpc.run()
        except Refusal as refusal:
            await self._refuse(context, rpc, refusal)
        finally:
            self._leave(rpc)

    async def _health_check(self, _request: bytes, context: Any) -> bytes:
        await check_access(self._access, context)
        return messages.health(self._servicer.connected_clients)

    async def _stats(self, _request: bytes, context: Any) -> bytes:
        await check_access(self._access, context)
        sources = [source for rpc in self._rpcs for source in rpc.sources.values()]
        now = self._funnel.now()
        clients = self._servicer.connected_clients
        return messages.stats(self._funnel.stats(), clients, sources, now)

    async def _enter(self, context: Any, *, acknowledges: bool) -> StreamRpc:
        # Plain code: when all nodes come at once, what one stream costs holds up all others.
        await check_access(self._access, context)
        rpc = StreamRpc(self._funnel, context, self._mailbox, acknowledges=acknowledges)
        self._rpcs.add(rpc)
        self._servicer.count_client(1)
        return rpc

    def _leave(self, rpc: StreamRpc) -> None:
        self._servicer.count_client(-1)
        self._rpcs.discard(rpc)
        self._left.set()

    async def _refuse(self, context: Any, rpc: StreamRpc, refusal: Refusal) -> None:
        nodes = [source.node_id for source in rpc.sources.values()]
        self._servicer.note_refusal(nodes[0] if nodes else "", refusal)
        refused = [source.refused_seq for source in rpc.sources.values() if source.refusal]
        trailers = (("nvrx-refused-seq", str(refused[0])),) if refused else ()
        await abort(context, refusal, trailers)


async def check_access(access: Access, context: Any) -> None:
    """End the call unless it carries the job's token."""
    if access.token is not None and not access.admits(context.invocation_metadata() or ()):
        reason = "the job's token is missing or wrong (metadata 'authorization: Bearer ...')"
        _logger.warning("a call from %s is refused: %s", context.peer(), reason)
        await abort(context, Refusal("UNAUTHENTICATED", reason))


async def abort(context: Any, refusal: Refusal, trailers: tuple[tuple[str, str], ...] = ()) -> None:
    """End the call with the refusal's code."""
    import grpc

    await context.abort(grpc.StatusCode[refusal.code], refusal.reason, trailers)
