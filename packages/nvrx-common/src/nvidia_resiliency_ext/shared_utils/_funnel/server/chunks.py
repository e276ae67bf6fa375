# SPDX-License-Identifier: Apache-2.0
"""The messages of clients and the answers to them: parts, refusals, acknowledgements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

RETRY_CODE = "UNAVAILABLE"
"""The code of a refusal after which the same chunk may be sent again later."""


class Refusal(NvrxError):  # noqa: N818 - what a sender is told; for the server it is none
    """A chunk or stream is not taken; `code` names a gRPC status code."""

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
    """One message: some lines of one node for one file."""

    node_id: str = ""
    data: memoryview = _NO_DATA  # keeps the whole message alive
    file_path: str = ""
    stream_id: str = ""
    seq: int = 0
    resumed: bool = False  # the sender knows that an earlier chunk of `stream_id` was refused


def decode(raw: bytes) -> Chunk:  # noqa: C901, PLR0912 - one loop without calls: each costs
    """Return the chunk that a message holds, or raise `Refusal` for bytes that are none."""
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


def named(raw: bytes, stream_id: str, seq: int) -> bytes:
    """Return the message with a stream and a number; of fields that come twice the last counts."""
    return raw + bytes(messages().LogChunk(stream_id=stream_id, seq=seq).SerializeToString())


def line_end(node_id: str, file_path: str) -> bytes:
    """Return a message that ends the last line of a file."""
    message = messages().LogChunk(node_id=node_id, data=b"\n", file_path=file_path)
    return bytes(message.SerializeToString())


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


def _malformed(what: str) -> Refusal:
    return Refusal("INVALID_ARGUMENT", f"not a LogChunk: {what}")


RESUMED = b"\xb0\x06\x01"
"""Appended to a message, says that its sender knows of a refusal and goes on: `resumed = true`."""


def messages() -> Any:
    """Return the module with the generated classes; importing it takes 15-50 ms."""
    from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2

    return log_aggregation_pb2


def ack(stream_id: str, committed_seq: int, refusal: Refusal | None = None) -> bytes:
    message = messages().Ack(stream_id=stream_id, committed_seq=committed_seq)
    if refusal is not None:
        message.refusal, message.reason = refusal.code, refusal.reason
    return bytes(message.SerializeToString())


def response(status: str, bytes_received: int, committed_seq: int = 0) -> bytes:
    message = messages().StreamResponse(
        status=status, bytes_received=bytes_received, committed_seq=committed_seq
    )
    return bytes(message.SerializeToString())


def health(connected_clients: int, *, healthy: bool = True) -> bytes:
    message = messages().HealthResponse(healthy=healthy, connected_clients=connected_clients)
    return bytes(message.SerializeToString())


def stats(
    counts: Mapping[str, int], connected_clients: int, clients: Iterable[Mapping[str, Any]]
) -> bytes:
    """Return a StatsResponse; counts and clients have the names of its fields."""
    message = messages().StatsResponse(**counts, connected_clients=connected_clients)
    for client in clients:
        message.clients.add(**client)
    return bytes(message.SerializeToString())
