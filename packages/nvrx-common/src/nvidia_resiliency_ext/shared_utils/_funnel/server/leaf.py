# SPDX-License-Identifier: Apache-2.0
"""A leaf: calls of nodes, what is held until the root has it, the way to the root, the process.

A chunk stays as it came; only one of a sender that numbers nothing gets a stream and a number of
the leaf's own, so that the root can tell when it comes again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.shared_utils._funnel.shared import MAX_MESSAGE_BYTES, SERVICE, Access

from . import chunks, process
from .chunks import Refusal
from .files import Roots
from .service import ERRORS_IN_ACKS, AddressError, Rpc, Service

_logger = logging.getLogger("LogAggregationLeaf")

_STREAM_SHARE = 8
_NAMELESS = "leaf-"  # begins the ids of streams whose senders number nothing


@dataclass(slots=True, eq=False)
class Held:
    """A chunk that the root has not confirmed."""

    stream: RelayRpc
    seq: int
    raw: bytes
    is_settled: bool = False


class RelayRpc(Rpc):
    """One call of a node, which carries one stream; kept until the root has all of it."""

    def __init__(self, relay: Relay, roots: Roots, context: Any, *, acknowledges: bool) -> None:
        super().__init__(context, acknowledges=acknowledges)
        self._relay = relay
        self._roots = roots
        self._path = ""
        self.stream_id = ""
        self.is_named = False
        self.outstanding: deque[Held] = deque()
        self.committed_seq = 0
        self.next_seq = 1
        self.held_bytes = 0
        self.received_bytes = 0
        self.refusal: Refusal | None = None
        self.unfinished: set[str] = set()  # files whose last line has no end, if it has no name

    def response(self) -> bytes:
        seq = self.committed_seq if self.is_named else 0
        return chunks.response("OK", self.received_bytes, seq)

    def note_progress(self) -> None:
        """Pass on that the root has more of the stream, or refuses it."""
        self._changed.set()
        if self.refusal is not None:
            self._end_reading()
        elif self.is_named:
            self._acknowledge(self.stream_id, self.committed_seq)

    def begin(self, chunk: chunks.Chunk) -> None:
        """Take the stream's name from its first chunk; one without numbers gets a name."""
        self._check_ids(chunk)
        self.node_id = chunk.node_id
        self.is_named = bool(chunk.seq and chunk.stream_id)
        self.stream_id = chunk.stream_id if self.is_named else f"{_NAMELESS}{uuid.uuid4().hex}"

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
            chunk = chunks.decode(raw)
            if not self.stream_id:
                self.begin(chunk)
            key = self.stream_id if self.is_named else ""
            if chunk.stream_id != key and (key or chunk.seq):
                raise Refusal("INVALID_ARGUMENT", "a call to a leaf carries one stream_id")
            if chunk.file_path != self._path:
                self._roots.locate(chunk.file_path)
                self._path = chunk.file_path
            await put(self, chunk, raw)

    def _finish(self, *, is_clean: bool) -> None:
        del is_clean  # the root does not see the end of a stream, however it comes
        self._relay.end_lines(self)

    async def _until_settled(self) -> None:
        while self.outstanding:
            self._changed.clear()
            await self._changed.wait()
        self._raise_refusal()

    def _raise_refusal(self) -> None:
        if self.refusal is not None:
            raise self.refusal


class Relay:
    """All streams of a leaf, and the order in which their chunks go to the root; in the loop."""

    def __init__(self, max_chunks: int, max_bytes: int) -> None:
        self._max_chunks = max_chunks
        self._max_bytes = max_bytes
        self.held_chunks = 0
        self.held_bytes = 0
        self.peak_bytes = 0
        self.received_bytes = 0
        self.received_chunks = 0
        self._streams: dict[str, list[RelayRpc]] = {}
        self._unsent: deque[Held] = deque()
        self._refused: set[str] = set()
        self.has_unsent = asyncio.Event()
        self._space_freed = asyncio.Event()

    async def put(self, stream: RelayRpc, chunk: chunks.Chunk, raw: bytes) -> None:
        """Hold a chunk and queue it for the root; wait while there is no space."""
        while not self._has_space(stream, len(raw)):
            self._space_freed.clear()
            await self._space_freed.wait()
        if stream.refusal is not None:
            raise stream.refusal
        if not stream.is_named:
            chunks.record_end(stream.unfinished, chunk.file_path, chunk.data)
        self._hold(stream, chunk.seq, raw)
        self.received_chunks += 1
        self.received_bytes += len(chunk.data)
        stream.received_bytes += len(chunk.data)

    def end_lines(self, stream: RelayRpc) -> None:
        """End the lines that a stream leaves unfinished, which the root cannot see.

        A named stream may come back in the middle of a line, and its numbers are its sender's.
        """
        if stream.refusal is None:
            for path in sorted(stream.unfinished):
                self._hold(stream, 0, chunks.line_end(stream.node_id, path))
        stream.unfinished.clear()

    def _hold(self, stream: RelayRpc, seq: int, raw: bytes) -> None:
        if not stream.is_named:
            seq, stream.next_seq = stream.next_seq, stream.next_seq + 1
            raw = chunks.named(raw, stream.stream_id, seq)
        held = Held(stream, seq, raw)
        if not stream.outstanding:
            self._streams.setdefault(stream.stream_id, []).append(stream)
        stream.outstanding.append(held)
        self._count(stream, len(raw), 1)
        self._unsent.append(held)
        self.has_unsent.set()

    def next_unsent(self) -> tuple[Held, bytes] | None:
        """Return the next chunk for the root and its bytes; `None` when there is none now."""
        while self._unsent:
            held = self._unsent.popleft()
            stream = held.stream
            if held.is_settled:
                continue
            if stream.stream_id in self._refused:
                # Until a chunk says that the refusal was heard, the root passes over all of them.
                self._refused.discard(stream.stream_id)
                return held, held.raw + chunks.RESUMED
            return held, held.raw
        self.has_unsent.clear()
        return None

    def confirm(self, stream_id: str, seq: int, refusal: Refusal | None = None) -> None:
        """Take the root's word on a stream; a refusal ends its call, and its sender may retry."""
        for stream in tuple(self._streams.get(stream_id, ())):
            self._settle(stream, seq)
            if refusal is not None:
                stream.refusal = refusal
                self._drop(stream, len(stream.outstanding))
                stream.note_progress()
        if refusal is not None and not stream_id.startswith(_NAMELESS):
            self._refused.add(stream_id)  # one without a name never sends again

    def confirm_sent(self, held: Held) -> None:
        """Take a chunk as delivered: the root is one that never says more."""
        if not held.is_settled:
            self._settle(held.stream, held.seq)

    def start_session(self) -> None:
        """Queue everything again: the root at the end of a new connection knows of nothing."""
        self._refused.clear()
        self._unsent.clear()
        for stream in itertools.chain.from_iterable(self._streams.values()):
            self._unsent.extend(stream.outstanding)
        if self._unsent:
            self.has_unsent.set()

    async def wait_settled(self) -> None:
        while self.held_chunks:
            self._space_freed.clear()
            await self._space_freed.wait()

    def _has_space(self, stream: RelayRpc, size: int) -> bool:
        if stream.refusal is not None or not self.held_chunks:
            return True
        own = len(stream.outstanding)
        if own and (
            own * _STREAM_SHARE >= self._max_chunks
            or (stream.held_bytes + size) * _STREAM_SHARE > self._max_bytes
        ):
            return False
        return self.held_chunks < self._max_chunks and self.held_bytes + size <= self._max_bytes

    def _count(self, stream: RelayRpc, size: int, chunk: int) -> None:
        stream.held_bytes += size
        self.held_bytes += size
        self.held_chunks += chunk
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _settle(self, stream: RelayRpc, seq: int) -> None:
        count = sum(1 for _ in itertools.takewhile(lambda h: h.seq <= seq, stream.outstanding))
        stream.committed_seq = max(stream.committed_seq, seq)
        if count:
            self._drop(stream, count)
            stream.note_progress()

    def _drop(self, stream: RelayRpc, count: int) -> None:
        for _ in range(count):
            held = stream.outstanding.popleft()
            held.is_settled = True
            self._count(stream, -len(held.raw), -1)
        if count and not stream.outstanding:
            streams = self._streams[stream.stream_id]
            streams.remove(stream)
            if not streams:
                del self._streams[stream.stream_id]
        self._space_freed.set()


_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0
_PING_MS, _PING_TIMEOUT_MS = 20_000, 10_000
_HEALTH_TRY_S = 5.0
# What a name or a reason of a status adds to a chunk on its way.
_NAME_BYTES = 64 << 10


class Upstream:
    """The way to the root at `HOST:PORT` or `unix:PATH`; it lives in the event loop."""

    def __init__(self, target: str, access: Access, relay: Relay) -> None:
        self._target = target
        self._access = access
        self._files = access.channel_files()
        self._channel = self._connect()
        self._relay = relay
        self._is_old_root = False
        self.is_up = False

    def _connect(self) -> Any:
        import grpc.aio

        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + _NAME_BYTES),
            ("grpc.keepalive_time_ms", _PING_MS),
            ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        if self._files is None:
            return grpc.aio.insecure_channel(self._target, options)
        credentials = grpc.ssl_channel_credentials(*self._files)
        return grpc.aio.secure_channel(self._target, credentials, options)

    async def wait_healthy(self, timeout_s: float) -> str | None:
        """Wait until the root says that it is healthy; return why not, if it does not in time."""
        import grpc

        decode = chunks.messages().HealthResponse.FromString
        check = self._channel.unary_unary(f"/{SERVICE}/HealthCheck", response_deserializer=decode)
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        why = "no answer"
        while (left := end - loop.time()) > 0:
            try:
                answer = await check(
                    b"", metadata=self._access.metadata(), wait_for_ready=True,
                    timeout=min(left, _HEALTH_TRY_S),
                )  # fmt: skip
                if answer.healthy:
                    return None
                why = "it says that it is not healthy"
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    return why
            await _pause(_FIRST_RETRY_S)
        return why

    async def run(self) -> None:
        """Carry chunks to the root for ever, over as many connections as it takes."""
        import grpc

        retry_s = _FIRST_RETRY_S
        while True:
            try:
                await self._session()
                why = "the root has ended the stream"
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.UNIMPLEMENTED and not self._is_old_root:
                    _logger.info("the root does not acknowledge: using StreamLogs")
                    self._is_old_root = True
                    continue
            except asyncio.InvalidStateError as error:  # a call that ended while it was written to
                why = str(error)
            finally:
                was_up, self.is_up = self.is_up, False
            retry_s = _FIRST_RETRY_S if was_up else min(_LONGEST_RETRY_S, retry_s * 2)
            if was_up or retry_s == _LONGEST_RETRY_S:
                _logger.warning(
                    "no stream to the root (%s); %d chunks wait", why, self._relay.held_chunks
                )
            await _pause(retry_s)

    async def close(self) -> None:
        await self._channel.close()

    async def _session(self) -> None:
        self._relay.start_session()
        files = self._access.channel_files()
        if files != self._files:
            # A channel keeps the certificates that it began with.
            self._files = files
            await self._channel.close()
            self._channel = self._connect()
        metadata = self._access.metadata()
        if self._is_old_root:
            method = self._channel.stream_unary(f"/{SERVICE}/StreamLogs")
        else:
            decode = chunks.messages().Ack.FromString
            method = self._channel.stream_stream(
                f"/{SERVICE}/StreamLogsAcked", response_deserializer=decode
            )
            metadata = (*metadata, ERRORS_IN_ACKS)
        call = method(metadata=metadata, wait_for_ready=True)
        writing = None
        try:
            if self._is_old_root:
                await call.wait_for_connection()
            else:
                # The root answers with its metadata before any chunk.
                await call.initial_metadata()
                if call.done():
                    await call.read()
            self.is_up = True
            _logger.info("connected to the root at %s", self._target)
            writing = asyncio.create_task(self._write_all(call))
            await (call.code() if self._is_old_root else self._read_all(call))
        finally:
            call.cancel()
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def _write_all(self, call: Any) -> None:
        relay = self._relay
        while True:
            found = relay.next_unsent()
            if found is None:
                await relay.has_unsent.wait()
                continue
            held, raw = found
            await call.write(raw)
            if self._is_old_root:
                relay.confirm_sent(held)

    async def _read_all(self, call: Any) -> None:
        import grpc.aio

        while (ack := await call.read()) is not grpc.aio.EOF:
            refusal = Refusal(ack.refusal, ack.reason) if ack.refusal else None
            self._relay.confirm(ack.stream_id, ack.committed_seq, refusal)


async def _pause(seconds: float) -> None:
    # Jitter, so that leaves that lost their root together do not come back together.
    await asyncio.sleep(seconds * random.uniform(0.5, 1.5))  # noqa: S311


class _LeafService(Service):
    def __init__(self, access: Access, relay: Relay, upstream: Upstream, roots: Roots) -> None:
        super().__init__(access, _logger)
        self._relay = relay
        self._upstream = upstream
        self._roots = roots

    @property
    def is_healthy(self) -> bool:
        return self._upstream.is_up

    def log_stats(self) -> None:
        relay = self._relay
        _logger.info(
            "received %d bytes in %d chunks, %d chunks with %d bytes wait for the root (at most"
            " %d), %d streams open",
            relay.received_bytes, relay.received_chunks, relay.held_chunks, relay.held_bytes,
            relay.peak_bytes, self.stream_count,
        )  # fmt: skip

    def _open(self, context: Any, *, acknowledges: bool) -> RelayRpc:
        return RelayRpc(self._relay, self._roots, context, acknowledges=acknowledges)

    def _counts(self) -> dict[str, int]:
        relay = self._relay
        return {
            "bytes_received": relay.received_bytes,
            "chunks_received": relay.received_chunks,
            "buffered_bytes": relay.held_bytes,
            "buffered_bytes_peak": relay.peak_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafConfig(process.ServerConfig):
    """Settings of a leaf; it holds `max_chunks` at most until the root confirms them."""

    upstream: str
    allowed_roots: tuple[str, ...]
    max_chunks: int = 8192
    max_bytes: int = 32 << 20
    root_timeout_s: float = 120.0


def run(config: LeafConfig) -> int:
    """Serve until asked to end; return the exit code."""
    roots = Roots(config.allowed_roots, must_exist=False)
    lost_chunks = process.run_until_complete(lambda: _serve(config, roots))
    return 1 if lost_chunks else 0


async def _serve(config: LeafConfig, roots: Roots) -> int:
    """Serve; return how many chunks did not reach the root."""
    stopping = process.stop_event()
    relay = Relay(config.max_chunks, config.max_bytes)
    upstream = Upstream(config.upstream, config.access, relay)
    try:
        if not await _root_is_healthy(config, upstream, stopping):
            return 0
        carrying = asyncio.create_task(upstream.run())
        try:
            service = _LeafService(config.access, relay, upstream, roots)
            await process.serve(service, config, stopping, f", root at {config.upstream}")
            if not await process.happened(relay.wait_settled(), process.CLOSE_S):
                _logger.error("%d chunks did not reach the root in time", relay.held_chunks)
            service.log_stats()
        finally:
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)
    finally:
        await upstream.close()
    return relay.held_chunks


async def _root_is_healthy(config: LeafConfig, upstream: Upstream, stopping: asyncio.Event) -> bool:
    looking = asyncio.create_task(upstream.wait_healthy(config.root_timeout_s))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait([looking, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not looking.done():
        looking.cancel()
        return False
    why = looking.result()
    if why is not None:
        raise AddressError(f"no healthy root at {config.upstream}: {why}")
    return True
