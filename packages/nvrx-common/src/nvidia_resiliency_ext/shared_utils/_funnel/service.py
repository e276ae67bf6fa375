# SPDX-License-Identifier: Apache-2.0
"""Owns the gRPC service of the root and its log streams: reading, acknowledging, refusing, ending.

It lives in the event loop, so an idle stream costs a suspended coroutine and no thread. Messages
are read one by one, and none while a chunk waits for room: gRPC's flow control then holds the
sender.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import TYPE_CHECKING, Any

from . import chunks
from .chunks import AckWriter, Chunk, Refusal, decode, forget_settled
from .servicer import LoopQueue
from .target import Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .funnel import Funnel
    from .servicer import LogAggregationServicer
    from .settings import Access


ERRORS_IN_ACKS = ("nvrx-errors", "ack")
_PATIENCE_S = 5.0
_MAX_ID_CHARS = 256
_MAX_SOURCES = 4096

_logger = logging.getLogger("LogAggregationServer")


class StreamRpc:
    """One open StreamLogs or StreamLogsAcked; a connection to the funnel."""

    def __init__(
        self, funnel: Funnel, context: Any, loop_queue: LoopQueue, *, acknowledges: bool
    ) -> None:
        self._funnel = funnel
        self._loop_queue = loop_queue
        self._context = context
        self._is_relay = acknowledges and _has_errors_in_acks(context)
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self.sources: dict[str, Source] = {}
        self._is_waiting = False
        self._changed = asyncio.Event()
        self._is_reading = False
        self._acks = AckWriter(context.write) if acknowledges else None

    def progress(self, source: Source) -> None:
        """Have a source's progress noted in the event loop; from any thread."""
        # Without acknowledgements nothing follows from it while chunks are read.
        if self._acks is not None or self._is_waiting or source.refusal is not None:
            self._loop_queue.post(self._queue_ack, source)

    async def run(self) -> None:
        """Take all chunks of the stream; return when every byte is in its file.

        Raises:
            Refusal: Something is not taken; the call must end with its code.
        """
        is_clean = False
        try:
            await self._read_all()
            is_clean = True
            for source in self.sources.values():
                self._funnel.finish(source, is_clean=True)
            await self._until_settled()
            if self._acks is not None:
                for source in self.sources.values():
                    state = (source.committed_seq, source.refusal)
                    self._acks.send_if_new(source.stream_id, *state)
                await self._acks.finish()
        finally:
            if not is_clean:
                for source in self.sources.values():
                    self._funnel.finish(source, is_clean=False)
            if self._acks is not None:
                self._acks.close()

    @property
    def bytes_written(self) -> int:
        """Bytes of the stream that are in their files."""
        return sum(source.written_bytes for source in self.sources.values())

    @property
    def bytes_received(self) -> int:
        """Bytes of the stream that were taken."""
        return sum(source.received_bytes for source in self.sources.values())

    async def _read_all(self) -> None:
        try:
            await self._read_each()
        except asyncio.CancelledError:
            # Cancelled by us, because of a refusal, or by gRPC, because the client is gone.
            self._raise_refusal()
            raise
        finally:
            self._is_reading = False

    async def _read_each(self) -> None:
        import grpc.aio

        # One turn for each message: what can be done before the loop is.
        end, read, offer = grpc.aio.EOF, self._context.read, self._funnel.offer
        source: Source | None = None
        node_id = ""
        self._is_reading = True
        while (raw := await read()) is not end:
            chunk = decode(raw)
            if source is None or chunk.stream_id != source.stream_id:
                node_id = node_id or chunk.node_id
                source = self._source(chunk, node_id)
            if source.refusal is not None and self._is_relay:
                if not chunk.resumed:
                    continue
                source = self._start_again(source)
            try:
                if not offer(source, chunk, len(raw)):
                    await self._until_admitted(source)
            except Refusal as refusal:
                if not self._is_relay:
                    raise
                _logger.debug("refused in an acknowledgement: %s", str(refusal))
                self.progress(source)

    def _source(self, chunk: Chunk, node_id: str) -> Source:
        if len(chunk.stream_id) > _MAX_ID_CHARS or len(chunk.node_id) > _MAX_ID_CHARS:
            raise Refusal("INVALID_ARGUMENT", f"an id has more than {_MAX_ID_CHARS} characters")
        source = self.sources.get(chunk.stream_id)
        if source is None:
            if len(self.sources) >= _MAX_SOURCES:
                # Of streams that have ended, the connection of a leaf tells nothing. One that goes
                # on after all is a new source; the ledger knows what it has sent.
                forget_settled(self.sources, self._acks, _MAX_SOURCES, self._forget)
            source = self._new_source(chunk.stream_id, chunk.node_id or node_id)
            self.sources[chunk.stream_id] = source
        return source

    def _new_source(self, stream_id: str, node_id: str) -> Source:
        return Source(self, stream_id, node_id, is_patient=not self._is_relay)

    def _forget(self, source: Source) -> None:
        self._funnel.finish(source, is_clean=False)

    def _start_again(self, source: Source) -> Source:
        self._funnel.finish(source, is_clean=False)
        if self._acks is not None:
            self._acks.forget(source.stream_id)
        fresh = self._new_source(source.stream_id, source.node_id)
        self.sources[source.stream_id] = fresh
        return fresh

    def _raise_refusal(self) -> None:
        if self._is_relay:
            return
        for source in self.sources.values():
            if source.refusal is not None:
                raise source.refusal

    def _queue_ack(self, source: Source) -> None:
        self._changed.set()
        if source.refusal is not None and not self._is_relay:
            if self._is_reading and self._task is not None:
                self._task.cancel()
        elif self._acks is not None and self.sources.get(source.stream_id) is source:
            self._acks.send(source.stream_id, source.committed_seq, source.refusal)

    async def _until_admitted(self, source: Source) -> None:
        # Nothing to cancel here: a refusal ends this wait.
        self._is_reading = False
        # Before the first look: progress is passed over until then.
        self._is_waiting = True
        while source.waiting is not None:
            self._changed.clear()
            await self._changed.wait()
        self._is_waiting = False
        self._is_reading = True
        self._raise_refusal()
        if source.refusal is not None:
            raise source.refusal

    async def _until_settled(self) -> None:
        since = self._loop.time()
        self._is_waiting = True
        while True:
            self._changed.clear()
            self._raise_refusal()
            behind = [s for s in self.sources.values() if not s.is_settled and s.refusal is None]
            if not behind:
                return
            try:
                await asyncio.wait_for(self._changed.wait(), _PATIENCE_S)
            except (asyncio.TimeoutError, TimeoutError):
                self._check_trouble(behind, self._loop.time() - since)

    def _check_trouble(self, behind: list[Source], waited_s: float) -> None:
        # A sender without acknowledgements cannot tell waiting from writing, so it is told.
        if self._acks is not None:
            return
        for source in behind:
            error = self._funnel.trouble_of(source)
            if error is not None:
                _logger.warning(
                    "node %r leaves with %d bytes unwritten after %.0f s: %s",
                    source.node_id, source.behind_bytes, waited_s, error.strerror,
                )  # fmt: skip
                raise UnwrittenError(error)


def _has_errors_in_acks(context: Any) -> bool:
    return ERRORS_IN_ACKS in [tuple(pair) for pair in context.invocation_metadata() or ()]


class UnwrittenError(Exception):
    """A stream ended, and its last bytes cannot be written at present."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.status = errno.errorcode.get(error.errno or errno.EIO, "EIO")


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
    service = grpc.method_handlers_generic_handler(chunks.SERVICE, handlers)
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


class RootService:
    """The methods of the root's service.

    It must be made in the event loop.
    """

    def __init__(self, servicer: LogAggregationServicer, access: Access) -> None:
        self._servicer = servicer
        self._funnel = servicer.funnel
        self._access = access
        self._rpcs: set[StreamRpc] = set()
        self._left = asyncio.Event()
        self._loop_queue = LoopQueue()

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
            return chunks.response(error.status, rpc.bytes_written)
        except Refusal as refusal:
            await self._refuse(context, rpc, refusal)
        finally:
            self._leave(rpc)
        seq = max((s.committed_seq for s in rpc.sources.values()), default=0)
        return chunks.response("OK", rpc.bytes_received, seq)

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
        return chunks.health(self._servicer.connected_clients)

    async def _stats(self, _request: bytes, context: Any) -> bytes:
        await check_access(self._access, context)
        sources = [source for rpc in self._rpcs for source in rpc.sources.values()]
        now = self._funnel.now()
        clients = self._servicer.connected_clients
        return chunks.stats(self._funnel.stats(), clients, sources, now)

    async def _enter(self, context: Any, *, acknowledges: bool) -> StreamRpc:
        # Plain code: when all nodes come at once, what one stream costs holds up all others.
        await check_access(self._access, context)
        rpc = StreamRpc(self._funnel, context, self._loop_queue, acknowledges=acknowledges)
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
