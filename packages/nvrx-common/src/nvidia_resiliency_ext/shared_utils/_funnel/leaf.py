# SPDX-License-Identifier: Apache-2.0
"""Assembly of a leaf server's process: calls of nodes on one side, the root on the other."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import chunks, process
from .chunks import Refusal, decode, forget_settled
from .files import Roots
from .queue import FunnelStats
from .relay import Relay, RelayStream, Upstream
from .service import MAX_ID_CHARS, AddressError, Rpc, Service

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .settings import Access
    from .target import Source


_logger = logging.getLogger("LogAggregationLeaf")

_LAST_S = 10.0
_MAX_STREAMS = 4096


class _Call(Rpc):
    """One open stream of a node or of another leaf."""

    def __init__(self, relay: Relay, roots: Roots, context: Any, *, acknowledges: bool) -> None:
        super().__init__(context, acknowledges=acknowledges)
        self._relay = relay
        self._roots = roots
        self._streams: dict[str, RelayStream] = {}
        self._refused: RelayStream | None = None
        # Of streams that are forgotten.
        self._received_bytes = 0
        self._committed_seq = 0

    def response(self) -> bytes:
        streams = self._streams.values()
        received = self._received_bytes + sum(stream.received_bytes for stream in streams)
        named = (stream.committed_seq for stream in streams if stream.is_named)
        return chunks.response("OK", received, max([self._committed_seq, *named]))

    def progress(self, stream: RelayStream) -> None:
        """Pass the root's word on."""
        self._changed.set()
        if stream.refusal is not None:
            self._refused = self._refused or stream
            self._end_reading()
        elif self._acks is not None and stream.is_named:
            self._acks.send(stream.stream_id, stream.committed_seq)

    def trailers(self) -> tuple[tuple[str, str], ...]:
        stream = self._refused
        if stream is not None and stream.is_named:
            return (("nvrx-refused-seq", str(stream.committed_seq + 1)),)
        return ()

    async def run(self) -> None:
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

    async def _read_each(self) -> None:
        import grpc.aio

        end, read, put = grpc.aio.EOF, self._context.read, self._relay.put
        while True:
            self._raise_refusal()
            self._is_reading = True
            raw = await read()
            self._is_reading = False
            if raw is end:
                return
            chunk = decode(raw)
            key = chunk.stream_id if chunk.seq else ""
            stream = self._streams.get(key)
            if stream is None:
                if len(chunk.stream_id) > MAX_ID_CHARS:
                    reason = f"stream_id has more than {MAX_ID_CHARS} characters"
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

    def _raise_refusal(self) -> None:
        if self._refused is not None and self._refused.refusal is not None:
            raise self._refused.refusal

    def _forget(self, stream: RelayStream) -> None:
        self._received_bytes += stream.received_bytes
        self._committed_seq = max(self._committed_seq, stream.committed_seq)


class _LeafService(Service[_Call]):
    """The leaf's service."""

    logger = _logger

    def __init__(self, access: Access, relay: Relay, upstream: Upstream, roots: Roots) -> None:
        super().__init__(access)
        self._relay = relay
        self._upstream = upstream
        self._roots = roots

    @property
    def is_healthy(self) -> bool:
        return self._upstream.is_up

    def refuse_new(self) -> None:
        self._refuses_new = True

    def log_stats(self) -> None:
        relay = self._relay
        _logger.info(
            "received %d bytes in %d chunks, %d chunks with %d bytes wait for the root (at most"
            " %d), %d streams open",
            relay.received_bytes, relay.received_chunks, relay.held_chunks, relay.held_bytes,
            relay.peak_bytes, len(self._rpcs),
        )  # fmt: skip

    def _open(self, context: Any, *, acknowledges: bool) -> _Call:
        return _Call(self._relay, self._roots, context, acknowledges=acknowledges)

    def _note_refusal(self, node_id: str, refusal: Refusal) -> None:
        _logger.warning("a stream of node %r is refused: %s", node_id, str(refusal))

    def _found(self) -> tuple[FunnelStats, Iterable[Source], float]:
        relay = self._relay
        found = FunnelStats(
            received_bytes=relay.received_bytes,
            received_chunks=relay.received_chunks,
            buffered_bytes=relay.held_bytes,
            buffered_bytes_peak=relay.peak_bytes,
        )
        return found, (), 0.0


class NoRootError(AddressError):
    """The root is not there or not healthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafConfig(process.ServerConfig):
    """Everything that a leaf is told.

    Attributes:
        max_chunks: Chunks that it holds at most until the root confirms them.
    """

    upstream: str
    allowed_roots: tuple[str, ...]
    max_chunks: int = 8192
    max_bytes: int = 32 << 20
    root_timeout_s: float = 120.0


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
        self.lost_chunks = 0

    async def serve(self) -> None:
        config = self._config
        stopping = process.stop_event()
        relay = Relay(config.max_chunks, config.max_bytes)
        self._upstream = Upstream(config.upstream, config.access, relay)
        try:
            if not await self._root_is_healthy(stopping):
                return
            carrying = asyncio.create_task(self._upstream.run())
            try:
                service = _LeafService(config.access, relay, self._upstream, self._roots)
                await process.serve(service, config, stopping, f", root at {config.upstream}")
                if not await process.happened(relay.wait_settled(), _LAST_S):
                    self.lost_chunks = relay.held_chunks
                    _logger.error("%d chunks did not reach the root in time", relay.held_chunks)
                service.log_stats()
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
