# SPDX-License-Identifier: Apache-2.0
"""The messages of clients and the answers to them: parts, refusals, acknowledgements."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from .queue import FunnelStats
    from .target import Source


RETRY_CODE = "UNAVAILABLE"
"""The code of a refusal after which the same chunk may be sent again later."""


class Refusal(NvrxError):  # noqa: N818 - what a sender is told; for the server it is none
    """A chunk, or a whole stream, is not taken.

    Args:
        code: Name of a gRPC status code.
        reason: What is wrong, in words for the sender's log.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"


NEWLINE_BYTE = 10
_File = TypeVar("_File")

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_MORE, _LOW = 0x80, 0x7F
_MAX_FIELD = (1 << 29) - 1
_U64 = (1 << 64) - 1
_NO_DATA = memoryview(b"")

# Field number << 3 | wire type.
_NODE_ID = 1 << 3 | _BYTES
_DATA = 2 << 3 | _BYTES
_FILE_PATH = 3 << 3 | _BYTES
_STREAM_ID = 100 << 3 | _BYTES
_SEQ = 101 << 3 | _VARINT
_RESUMED = 102 << 3 | _VARINT


@dataclass(slots=True)
class Chunk:
    """One message: some lines of one node for one file.

    Attributes:
        data: A view of the message; it keeps the whole message alive.
        resumed: The sender knows that an earlier chunk of this `stream_id` was refused.
    """

    node_id: str = ""
    data: memoryview = _NO_DATA
    file_path: str = ""
    stream_id: str = ""
    seq: int = 0
    resumed: bool = False


def decode(raw: bytes) -> Chunk:  # noqa: C901, PLR0912 - one loop without calls: each costs
    """Return the chunk that a message holds.

    Raises:
        Refusal: The bytes are no LogChunk, or a text in it is not UTF-8.
    """
    chunk = Chunk()
    view = memoryview(raw)
    position, end = 0, len(raw)
    try:
        while position < end:
            tag = raw[position]
            position += 1
            if tag & _MORE:
                tag, position = _varint(raw, position - 1)
            kind = tag & 7
            if kind == _BYTES:
                length, position = _varint(raw, position)
                stop = position + length
                if stop > end:
                    raise _malformed("a field is longer than the message")
                if tag == _DATA:
                    chunk.data = view[position:stop]
                elif tag == _NODE_ID:
                    chunk.node_id = raw[position:stop].decode()
                elif tag == _FILE_PATH:
                    chunk.file_path = raw[position:stop].decode()
                elif tag == _STREAM_ID:
                    chunk.stream_id = raw[position:stop].decode()
                position = stop
            elif kind == _VARINT:
                value, position = _varint(raw, position)
                if tag == _SEQ:
                    chunk.seq = value
                elif tag == _RESUMED:
                    chunk.resumed = value != 0
            elif kind in (_FIXED64, _FIXED32):
                position += 8 if kind == _FIXED64 else 4
            else:
                raise _malformed(f"a field of the unknown wire type {kind}")
            if not 0 < tag >> 3 <= _MAX_FIELD:
                raise _malformed("a field without a valid number")
    except IndexError:
        raise _malformed("the message ends inside a field") from None
    except UnicodeDecodeError:
        raise _malformed("a name in it is not UTF-8") from None
    if position != end:
        raise _malformed("the message ends inside a field")
    return chunk


def named(raw: bytes, stream_id: str, seq: int, *, resumed: bool = False) -> bytes:
    """Return the message with a stream and a number; of fields that come twice the last counts."""
    identity = stream_id.encode()
    parts = [raw, _encode(_STREAM_ID), _encode(len(identity)), identity, _encode(_SEQ)]
    parts.append(_encode(seq))
    return b"".join([*parts, RESUMED]) if resumed else b"".join(parts)


def line_end(node_id: str, file_path: str) -> bytes:
    """Return a message that ends the last line of a file."""
    fields = ((_NODE_ID, node_id.encode()), (_DATA, b"\n"), (_FILE_PATH, file_path.encode()))
    return b"".join(_encode(tag) + _encode(len(value)) + value for tag, value in fields)


def record_end(unfinished: set[_File], file: _File, data: memoryview | bytearray) -> None:
    """Note in a stream's unfinished files whether its last line for one of them is whole."""
    if data:
        if data[-1] == NEWLINE_BYTE:
            unfinished.discard(file)
        else:
            unfinished.add(file)


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    value = raw[position]
    position += 1
    if value < _MORE:
        return value, position
    value &= 0x7F
    for shift in range(7, 7 * _MAX_VARINT_BYTES, 7):
        byte = raw[position]
        position += 1
        value |= (byte & _LOW) << shift
        if byte < _MORE:
            return value & _U64, position
    raise _malformed("a number of more than 64 bits")


def _encode(value: int) -> bytes:
    made = bytearray()
    while value > _LOW:
        made.append(value & _LOW | _MORE)
        value >>= 7
    made.append(value)
    return bytes(made)


def _malformed(what: str) -> Refusal:
    return Refusal("INVALID_ARGUMENT", f"not a LogChunk: {what}")


RESUMED = _encode(_RESUMED) + b"\x01"
"""Appended to a message, says that its sender knows of a refusal and goes on."""


SERVICE = "nvidia_resiliency_ext.fault_tolerance.LogAggregationService"


def _pb() -> Any:
    from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2

    return log_aggregation_pb2


def prepare() -> None:
    """Import the generated modules and make a first message: 15-50 ms, too long for a stream."""
    health(0)


def ack(stream_id: str, committed_seq: int, refusal: Refusal | None = None) -> bytes:
    message = _pb().Ack(stream_id=stream_id, committed_seq=committed_seq)
    if refusal is not None:
        message.refusal, message.reason = refusal.code, refusal.reason
    return bytes(message.SerializeToString())


def read_ack(data: bytes) -> tuple[str, int, str, str]:
    """Return stream, number, refusal and its reason of an Ack."""
    message = _pb().Ack.FromString(data)
    return message.stream_id, message.committed_seq, message.refusal, message.reason


def response(status: str, bytes_received: int, committed_seq: int = 0) -> bytes:
    message = _pb().StreamResponse(
        status=status, bytes_received=bytes_received, committed_seq=committed_seq
    )
    return bytes(message.SerializeToString())


def health(connected_clients: int, *, healthy: bool = True) -> bytes:
    """Return a HealthResponse."""
    message = _pb().HealthResponse(healthy=healthy, connected_clients=connected_clients)
    return bytes(message.SerializeToString())


def read_health(data: bytes) -> bool:
    return bool(_pb().HealthResponse.FromString(data).healthy)


def stats(
    found: FunnelStats, connected_clients: int, sources: Iterable[Source], now: float
) -> bytes:
    """Return a StatsResponse."""
    message = _pb().StatsResponse(
        bytes_received=found.received_bytes,
        chunks_received=found.received_chunks,
        bytes_written=found.written_bytes,
        chunks_repeated=found.repeated_chunks,
        bytes_lost=found.lost_bytes,
        buffered_bytes=found.buffered_bytes,
        buffered_bytes_peak=found.buffered_bytes_peak,
        files=found.files,
        open_files=found.open_files,
        failing_files=found.failing_files,
        connected_clients=connected_clients,
    )
    for source in sources:
        oldest = next(iter(source.outstanding.copy()), None)
        message.clients.add(
            node_id=source.node_id,
            stream_id=source.stream_id,
            bytes_received=source.received_bytes,
            last_seq=source.received_seq,
            committed_seq=source.committed_seq,
            bytes_behind=source.behind_bytes,
            seconds_behind=0.0 if oldest is None else max(0.0, now - oldest.arrived_at),
        )
    return bytes(message.SerializeToString())


_SPACING_S = 0.05


class AckWriter:
    """Acknowledgements of one call; it lives in the event loop.

    However slow the sender reads, one number per stream is all that waits for it.
    """

    def __init__(self, write: Callable[[bytes], Awaitable[Any]]) -> None:
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._sent: dict[str, tuple[int, bool]] = {}
        self._unsent: dict[str, tuple[int, Refusal | None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Future[None] = self._loop.create_future()

    def send(self, stream_id: str, seq: int, refusal: Refusal | None = None) -> None:
        """Tell the sender about a stream, also what it was told before.

        Behind a leaf several senders may ask for the same numbers one after the other.
        """
        self._unsent[stream_id] = (seq, refusal)
        if self._task is None:
            self._task = self._loop.create_task(self._run())

    def has_sent(self, stream_id: str, seq: int) -> bool:
        """Tell whether the sender knows that all up to this number is committed."""
        return stream_id not in self._unsent and self._sent.get(stream_id, (0, False)) == (
            seq,
            False,
        )

    def forget(self, stream_id: str) -> None:
        """A stream starts again: what was told of it before counts no more."""
        self._unsent.pop(stream_id, None)
        self._sent.pop(stream_id, None)

    def send_if_new(self, stream_id: str, seq: int, refusal: Refusal | None = None) -> None:
        """Tell the sender about a stream, unless it knows already."""
        if self._sent.get(stream_id, (0, False)) != (seq, refusal is not None):
            self.send(stream_id, seq, refusal)

    async def finish(self) -> None:
        """Send what is left."""
        self._ending.set_result(None)
        if self._task is not None:
            await self._task

    def close(self) -> None:
        """Stop sending; the call is over."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._unsent:
                stream_id, (seq, refusal) = next(iter(self._unsent.items()))
                del self._unsent[stream_id]
                self._sent[stream_id] = (seq, refusal is not None)
                await self._write(ack(stream_id, seq, refusal))
                if not self._unsent:
                    # The end of the call ends this wait.
                    await asyncio.wait([self._ending], timeout=_SPACING_S)
        finally:
            self._task = None


class _Stream(Protocol):
    stream_id: str
    committed_seq: int

    @property
    def is_settled(self) -> bool: ...


_AnyStream = TypeVar("_AnyStream", bound=_Stream)


def forget_settled(
    streams: dict[str, _AnyStream],
    acks: AckWriter | None,
    most: int,
    forget: Callable[[_AnyStream], None],
) -> None:
    """Take streams of a call off of which nothing waits, half of `most` at a time.

    One whose sender still has to be told stays: it would wait for that for ever.

    Args:
        streams: Those of the call, by `stream_id`.
        acks: What tells their sender, if anything does.
        most: How many streams a call may have, twice over where nothing can be taken off.
        forget: Called with each that was taken off.

    Raises:
        Refusal: There are too many others.
    """
    settled = [
        stream
        for stream in streams.values()
        if stream.is_settled
        and (acks is None or acks.has_sent(stream.stream_id, stream.committed_seq))
    ]
    for stream in settled[: most // 2]:
        del streams[stream.stream_id]
        if acks is not None:
            acks.forget(stream.stream_id)
        forget(stream)
    if len(streams) >= 2 * most:
        raise Refusal("RESOURCE_EXHAUSTED", "too many streams over one connection")
