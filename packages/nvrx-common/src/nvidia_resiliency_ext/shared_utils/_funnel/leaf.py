# SPDX-License-Identifier: Apache-2.0
"""Assembly of a leaf server's process: calls of nodes on one side, the root on the other."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import chunks, process, service
from .chunks import AckWriter, Refusal, decode, forget_settled
from .files import Roots
from .queue import FunnelStats
from .relay import Relay, RelayStream, Upstream

if TYPE_CHECKING:
    from .settings import Access


_logger = logging.getLogger("LogAggregationLeaf")

_ROOT_TIMEOUT_S = 120.0
_LAST_S = 10.0
_STATS_S = 60.0
_MAX_ID_CHARS = 256
_MAX_STREAMS = 4096


class NoRootError(service.AddressError):
    """The root is not there or not healthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafConfig:
    """Everything that a leaf is told.

    Attributes:
        grace_s: How long it goes on serving after it was asked to end.
        max_chunks: Chunks that it holds at most until the root confirms them.
    """

    host: str
    port: int
    upstream: str
    grace_s: float
    access: Access
    allowed_roots: tuple[str, ...]
    max_chunks: int = 8192
    max_bytes: int = 32 << 20
    root_timeout_s: float = _ROOT_TIMEOUT_S


def run(config: LeafConfig) -> int:
    """Serve until asked to end; return the exit code.

    Raises:
        AddressError: It cannot listen, or the root is not there.
        ConfigError: A root directory or a certificate is unusable.
    """
    leaf = _Leaf(config)
    process.run_until_complete(leaf.serve)
    return 1 if leaf.lost_chunks else 0


class _Leaf:
    def __init__(self, config: LeafConfig) -> None:
        self._config = config
        self._roots = Roots(config.allowed_roots, must_exist=False)
        self._calls: set[_Call] = set()
        self._is_ending = False
        self.lost_chunks = 0

    async def serve(self) -> None:
        stopping = process.stop_event()
        self._left = asyncio.Event()
        self._relay = Relay(self._config.max_chunks, self._config.max_bytes)
        self._upstream = Upstream(self._config.upstream, self._config.access, self._relay)
        try:
            if not await self._root_is_healthy(stopping):
                return
            carrying = asyncio.create_task(self._upstream.run())
            try:
                await self._serve(stopping)
            finally:
                carrying.cancel()
                await asyncio.gather(carrying, return_exceptions=True)
        finally:
            await self._upstream.close()

    async def _root_is_healthy(self, stopping: asyncio.Event) -> bool:
        looking = asyncio.create_task(self._upstream.wait_healthy(self._config.root_timeout_s))
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait([looking, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not looking.done():
            looking.cancel()
            return False
        why = looking.result()
        if why is not None:
            raise NoRootError(f"no healthy root at {self._config.upstream}: {why}")
        return True

    async def _serve(self, stopping: asyncio.Event) -> None:
        config = self._config
        address = service.address_of(config.host, config.port)
        server, port = await service.start(self._handlers(), address, config.access)
        where = (
            address if config.host.startswith("unix:") else service.address_of(config.host, port)
        )
        _logger.info("listening on %s, root at %s", where, config.upstream)
        while not await process.happened(stopping.wait(), _STATS_S):
            self._log_stats()
        self._is_ending = True
        _logger.info(
            "asked to end: serving %d streams for up to %.0f s", len(self._calls), config.grace_s
        )
        if not await process.happened(self._until_empty(), config.grace_s):
            _logger.warning("%d streams are cut off", len(self._calls))
        await server.stop(0)
        await process.happened(self._until_empty(), process.CUT_OFF_S)
        if not await process.happened(self._until_settled(), _LAST_S):
            self.lost_chunks = self._relay.held_chunks
            _logger.error("%d chunks did not reach the root before the end", self.lost_chunks)
        self._log_stats()

    def _handlers(self) -> dict[str, Any]:
        import grpc

        return {
            "StreamLogs": grpc.stream_unary_rpc_method_handler(self._stream_logs),
            "StreamLogsAcked": grpc.stream_stream_rpc_method_handler(self._stream_logs_acked),
            "HealthCheck": grpc.unary_unary_rpc_method_handler(self._health_check),
            "Stats": grpc.unary_unary_rpc_method_handler(self._stats),
        }

    async def _stream_logs(self, _requests: Any, context: Any) -> bytes:
        call = _Call(self._relay, self._roots, context, acks=None)
        await self._carry(call, context)
        return chunks.response("OK", call.received_bytes, call.committed_seq)

    async def _stream_logs_acked(self, _requests: Any, context: Any) -> None:
        call = _Call(self._relay, self._roots, context, acks=AckWriter(context.write))
        await self._carry(call, context)

    async def _carry(self, call: _Call, context: Any) -> None:
        await service.check_access(self._config.access, context)
        if self._is_ending:
            await service.abort(context, Refusal("UNAVAILABLE", "this leaf is ending"))
        await context.send_initial_metadata(())
        self._calls.add(call)
        try:
            await call.run()
        except Refusal as refusal:
            _logger.warning("a stream of node %r is refused: %s", call.node_id, str(refusal))
            await service.abort(context, refusal, call.trailers())
        finally:
            self._calls.discard(call)
            self._left.set()

    async def _health_check(self, _request: bytes, context: Any) -> bytes:
        await service.check_access(self._config.access, context)
        return chunks.health(len(self._calls), healthy=self._upstream.is_up)

    async def _stats(self, _request: bytes, context: Any) -> bytes:
        await service.check_access(self._config.access, context)
        return chunks.stats(self._found(), len(self._calls), (), 0.0)

    def _found(self) -> FunnelStats:
        relay = self._relay
        return FunnelStats(
            received_bytes=relay.received_bytes, received_chunks=relay.received_chunks,
            written_bytes=0, repeated_chunks=0, lost_bytes=0,
            buffered_bytes=relay.held_bytes, buffered_bytes_peak=relay.peak_bytes,
            files=0, open_files=0, failing_files=0,
        )  # fmt: skip

    def _log_stats(self) -> None:
        relay = self._relay
        _logger.info(
            "received %d bytes in %d chunks, %d chunks with %d bytes wait for the root (at most"
            " %d), %d streams open",
            relay.received_bytes, relay.received_chunks, relay.held_chunks, relay.held_bytes,
            relay.peak_bytes, len(self._calls),
        )  # fmt: skip

    async def _until_empty(self) -> None:
        while self._calls:
            self._left.clear()
            await self._left.wait()

    async def _until_settled(self) -> None:
        while self._relay.held_chunks:
            self._relay.settled.clear()
            await self._relay.settled.wait()


class _Call:
    """One open stream of a node or of another leaf."""

    def __init__(self, relay: Relay, roots: Roots, context: Any, *, acks: AckWriter | None) -> None:
        self._relay = relay
        self._roots = roots
        self._context = context
        self._acks = acks
        self._task = asyncio.current_task()
        self._streams: dict[str, RelayStream] = {}
        self._refused: RelayStream | None = None
        self._changed = asyncio.Event()
        self._is_reading = False
        # Of streams that are forgotten.
        self._received_bytes = 0
        self._committed_seq = 0
        self.node_id = ""

    @property
    def received_bytes(self) -> int:
        return self._received_bytes + sum(s.received_bytes for s in self._streams.values())

    @property
    def committed_seq(self) -> int:
        named = (s.committed_seq for s in self._streams.values() if s.is_named)
        return max([self._committed_seq, *named])

    def progress(self, stream: RelayStream) -> None:
        """Pass the root's word on."""
        self._changed.set()
        if stream.refusal is not None:
            self._refused = self._refused or stream
            if self._is_reading and self._task is not None:
                self._task.cancel()
        elif self._acks is not None and stream.is_named:
            self._acks.send(stream.stream_id, stream.committed_seq)

    def trailers(self) -> tuple[tuple[str, str], ...]:
        """Return which chunk was refused, as far as is known."""
        stream = self._refused
        if stream is not None and stream.is_named:
            return (("nvrx-refused-seq", str(stream.committed_seq + 1)),)
        return ()

    async def run(self) -> None:
        """Take all chunks; return when the root has them in their files."""
        try:
            try:
                await self._read_all()
            finally:
                for stream in self._streams.values():
                    self._relay.end_lines(stream, self.node_id)
            while any(stream.outstanding for stream in self._streams.values()):
                self._changed.clear()
                await self._changed.wait()
            self._raise_refusal()
            if self._acks is not None:
                await self._acks.finish()
        finally:
            if self._acks is not None:
                self._acks.close()

    async def _read_all(self) -> None:
        import grpc.aio

        end, read, put = grpc.aio.EOF, self._context.read, self._relay.put
        while True:
            raw = await self._next(read)
            if raw is end:
                return
            chunk = decode(raw)
            key = chunk.stream_id if chunk.seq else ""
            stream = self._streams.get(key)
            if stream is None:
                if len(chunk.stream_id) > _MAX_ID_CHARS:
                    reason = f"stream_id has more than {_MAX_ID_CHARS} characters"
                    raise Refusal("INVALID_ARGUMENT", reason)
                self.node_id = self.node_id or chunk.node_id
                if len(self._streams) >= _MAX_STREAMS:
                    # One that goes on after all is a new one.
                    forget_settled(self._streams, self._acks, _MAX_STREAMS, self._forget)
                stream = self._streams[key] = RelayStream(self, key)
            if chunk.file_path != stream.path:
                self._roots.locate(chunk.file_path)
                stream.path = chunk.file_path
            await put(stream, chunk, raw)

    async def _next(self, read: Any) -> Any:
        self._raise_refusal()
        self._is_reading = True
        try:
            return await read()
        except asyncio.CancelledError:
            # Cancelled by us, because of a refusal, or by gRPC, because the client is gone.
            self._raise_refusal()
            raise
        finally:
            self._is_reading = False

    def _raise_refusal(self) -> None:
        if self._refused is not None and self._refused.refusal is not None:
            raise self._refused.refusal

    def _forget(self, stream: RelayStream) -> None:
        self._received_bytes += stream.received_bytes
        self._committed_seq = max(self._committed_seq, stream.committed_seq)
