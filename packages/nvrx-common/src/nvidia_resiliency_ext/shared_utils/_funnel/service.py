# SPDX-License-Identifier: Apache-2.0
"""The gRPC service of a server and its log streams: reading, acknowledging, refusing, ending.

It lives in the event loop, so an idle stream costs a suspended coroutine and no thread. Messages
are read one by one, and none while a chunk waits for space: gRPC's flow control then holds the
sender.
"""

from __future__ import annotations

import abc
import asyncio
import errno
import logging
import socket
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import chunks
from .chunks import AckWriter, Chunk, Refusal, decode, forget_settled
from .servicer import LoopQueue
from .target import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .funnel import Funnel
    from .queue import FunnelStats
    from .servicer import LogAggregationServicer
    from .settings import Access


ERRORS_IN_ACKS = ("nvrx-errors", "ack")
MAX_ID_CHARS = 256
_PATIENCE_S = 5.0
_MAX_SOURCES = 4096

_logger = logging.getLogger("LogAggregationServer")


class Rpc(abc.ABC):
    """One open StreamLogs or StreamLogsAcked of a root or a leaf."""

    def __init__(self, context: Any, *, acknowledges: bool) -> None:
        self._context = context
        self._acks = AckWriter(context.write) if acknowledges else None
        self._task = asyncio.current_task()
        self._changed = asyncio.Event()
        self._is_reading = False
        self.node_id = ""

    @abc.abstractmethod
    async def run(self) -> None:
        """Take all chunks; return when every byte is in its file, raise the call's `Refusal`."""

    @abc.abstractmethod
    def response(self) -> bytes:
        """Return the answer to a call that has ended."""

    @abc.abstractmethod
    def trailers(self) -> tuple[tuple[str, str], ...]:
        """Return which chunk was refused, as far as is known."""

    @abc.abstractmethod
    async def _read_each(self) -> None: ...

    @abc.abstractmethod
    def _raise_refusal(self) -> None: ...

    async def _read_all(self) -> None:
        try:
            await self._read_each()
        except asyncio.CancelledError:
            # Cancelled by us, because of a refusal, or by gRPC, because the client is gone.
            self._raise_refusal()
            raise
        finally:
            self._is_reading = False

    def _end_reading(self) -> None:
        """Wake the task that reads, which then raises the refusal."""
        self._changed.set()
        if self._is_reading and self._task is not None:
            self._task.cancel()


class StreamRpc(Rpc):
    """A stream of the root; a connection to the funnel."""

    def __init__(
        self, funnel: Funnel, context: Any, loop_queue: LoopQueue, *, acknowledges: bool
    ) -> None:
        super().__init__(context, acknowledges=acknowledges)
        self._funnel = funnel
        self._loop_queue = loop_queue
        self._is_relay = acknowledges and _has_errors_in_acks(context)
        self._loop = asyncio.get_running_loop()
        self.sources: dict[str, Source] = {}
        self._is_waiting = False
        # Why the last bytes of a stream that has ended cannot be written at present.
        self._trouble = ""

    def progress(self, source: Source) -> None:
        """Have a source's progress noted in the event loop; from any thread."""
        # Without acknowledgements nothing follows from it while chunks are read.
        if self._acks is not None or self._is_waiting or source.refusal is not None:
            self._loop_queue.post(self._queue_ack, source)

    async def run(self) -> None:
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

    def response(self) -> bytes:
        sources = self.sources.values()
        if self._trouble:
            return chunks.response(self._trouble, sum(s.written_bytes for s in sources))
        seq = max((source.committed_seq for source in sources), default=0)
        return chunks.response("OK", sum(s.received_bytes for s in sources), seq)

    def trailers(self) -> tuple[tuple[str, str], ...]:
        refused = [source.refused_seq for source in self.sources.values() if source.refusal]
        return (("nvrx-refused-seq", str(refused[0])),) if refused else ()

    async def _read_each(self) -> None:
        import grpc.aio

        # One turn for each message: what can be done before the loop is.
        end, read, offer = grpc.aio.EOF, self._context.read, self._funnel.offer
        source: Source | None = None
        self._is_reading = True
        while (raw := await read()) is not end:
            chunk = decode(raw)
            if source is None or chunk.stream_id != source.stream_id:
                self.node_id = self.node_id or chunk.node_id
                source = self._source(chunk)
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

    def _source(self, chunk: Chunk) -> Source:
        if len(chunk.stream_id) > MAX_ID_CHARS or len(chunk.node_id) > MAX_ID_CHARS:
            raise Refusal("INVALID_ARGUMENT", f"an id has more than {MAX_ID_CHARS} characters")
        source = self.sources.get(chunk.stream_id)
        if source is None:
            if len(self.sources) >= _MAX_SOURCES:
                # Of streams that have ended, the connection of a leaf tells nothing. One that goes
                # on after all is a new source; the ledger knows what it has sent.
                forget_settled(self.sources, self._acks, _MAX_SOURCES, self._forget)
            source = self._new_source(chunk.stream_id, chunk.node_id or self.node_id)
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
            self._end_reading()
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
                self._trouble = self._trouble_of(behind, self._loop.time() - since)
                if self._trouble:
                    return

    def _trouble_of(self, behind: list[Source], waited_s: float) -> str:
        """Return the name of the error that keeps a stream's bytes from their file, if one does."""
        # A sender without acknowledgements cannot tell waiting from writing, so it is told.
        for source in behind if self._acks is None else ():
            error = self._funnel.trouble_of(source)
            if error is not None:
                _logger.warning(
                    "node %r leaves with %d bytes unwritten after %.0f s: %s",
                    source.node_id, source.behind_bytes, waited_s, error.strerror,
                )  # fmt: skip
                return errno.errorcode.get(error.errno or errno.EIO, "EIO")
        return ""


def _has_errors_in_acks(context: Any) -> bool:
    return ERRORS_IN_ACKS in [tuple(pair) for pair in context.invocation_metadata() or ()]


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
            return True  # so many want to talk to it that there is no space for one more
        except (OSError, ValueError):
            return False
    return True


AnyRpc = TypeVar("AnyRpc", bound=Rpc)


class Service(abc.ABC, Generic[AnyRpc]):
    """The methods of a server's service and its open streams; made in the event loop."""

    logger: logging.Logger

    def __init__(self, access: Access) -> None:
        self._access = access
        self._rpcs: set[AnyRpc] = set()
        self._left = asyncio.Event()
        self._refuses_new = False

    @property
    def stream_count(self) -> int:
        """How many streams are open."""
        return len(self._rpcs)

    @property
    def is_healthy(self) -> bool:
        """What the server answers to a health check."""
        return True

    @abc.abstractmethod
    def log_stats(self) -> None:
        """Log what was done so far."""

    def refuse_new(self) -> None:
        """Prepare the end; a root goes on taking streams until it stops."""

    @abc.abstractmethod
    def _open(self, context: Any, *, acknowledges: bool) -> AnyRpc: ...

    @abc.abstractmethod
    def _note_refusal(self, node_id: str, refusal: Refusal) -> None: ...

    @abc.abstractmethod
    def _found(self) -> tuple[FunnelStats, Iterable[Source], float]:
        """Return counts, streams that are told one by one, and the monotonic time."""

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
        while self._rpcs:
            self._left.clear()
            await self._left.wait()

    async def _stream_logs(self, _requests: Any, context: Any) -> bytes:
        return (await self._serve(context, acknowledges=False)).response()

    async def _stream_logs_acked(self, _requests: Any, context: Any) -> None:
        await self._serve(context, acknowledges=True)

    async def _serve(self, context: Any, *, acknowledges: bool) -> AnyRpc:
        # Plain code: when all nodes come at once, what one stream costs holds up all others.
        await check_access(self._access, context)
        if self._refuses_new:
            await abort(context, Refusal("UNAVAILABLE", "this server is ending"))
        rpc = self._open(context, acknowledges=acknowledges)
        self._rpcs.add(rpc)
        try:
            if acknowledges:
                # The sender learns at once that the method exists.
                await context.send_initial_metadata(())
            await rpc.run()
        except Refusal as refusal:
            self._note_refusal(rpc.node_id, refusal)
            await abort(context, refusal, rpc.trailers())
        finally:
            self._rpcs.discard(rpc)
            self._left.set()
        return rpc

    async def _health_check(self, _request: bytes, context: Any) -> bytes:
        await check_access(self._access, context)
        return chunks.health(len(self._rpcs), healthy=self.is_healthy)

    async def _stats(self, _request: bytes, context: Any) -> bytes:
        await check_access(self._access, context)
        found, sources, now = self._found()
        return chunks.stats(found, len(self._rpcs), sources, now)


class RootService(Service[StreamRpc]):
    """The root's service."""

    logger = _logger

    def __init__(self, servicer: LogAggregationServicer, access: Access) -> None:
        super().__init__(access)
        self._servicer = servicer
        self._funnel = servicer.funnel
        self._loop_queue = LoopQueue()

    def log_stats(self) -> None:
        found = self._funnel.stats()
        _logger.info(
            "received %d bytes in %d chunks, wrote %d bytes to %d files (%d failing), %d bytes wait"
            " (at most %d), %d chunks came again, %d bytes lost, %d streams open",
            found.received_bytes, found.received_chunks, found.written_bytes, found.files,
            found.failing_files, found.buffered_bytes, found.buffered_bytes_peak,
            found.repeated_chunks, found.lost_bytes, len(self._rpcs),
        )  # fmt: skip

    def _open(self, context: Any, *, acknowledges: bool) -> StreamRpc:
        return StreamRpc(self._funnel, context, self._loop_queue, acknowledges=acknowledges)

    def _note_refusal(self, node_id: str, refusal: Refusal) -> None:
        self._servicer.note_refusal(node_id, refusal)

    def _found(self) -> tuple[FunnelStats, Iterable[Source], float]:
        sources = [source for rpc in self._rpcs for source in rpc.sources.values()]
        return self._funnel.stats(), sources, self._funnel.now()


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
