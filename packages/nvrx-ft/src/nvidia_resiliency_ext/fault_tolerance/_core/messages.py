# SPDX-License-Identifier: Apache-2.0
"""Messages and single objects that ranks, their monitor and the launcher send each other."""

from __future__ import annotations

import logging
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance import data
from nvidia_resiliency_ext.fault_tolerance.data import OkMsg
from nvidia_resiliency_ext.shared_utils.errors import FrameTooLargeError, PeerClosedError, WireError
from nvidia_resiliency_ext.shared_utils.wire import MAX_FRAME_BYTES, MessageSet

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter


@dataclass(frozen=True, slots=True)
class OkAttributes:
    """`OkMsg` as it travels: its attributes have no fixed names."""

    attributes: dict[str, Any]


class FtMessageSet(MessageSet):
    """All messages of `data`, and the types in `extra`; an `OkMsg` passes as a message alone."""

    def __init__(self, *extra: type) -> None:
        super().__init__(
            data.AuthkeyMsg, data.ErrorMsg, data.HeartbeatMsg, data.HeartbeatTimeouts,
            data.InitMsg, OkAttributes, data.RankInfo, data.SectionAction, data.SectionMsg,
            data.SectionTimeouts, data.UpdateConfigMsg, data.WorkloadAction,
            data.WorkloadControlRequest, *extra,
        )  # fmt: skip

    def encode(self, message: object) -> bytes:
        """Return the whole frame of a message, length included. Raises WireError."""
        if isinstance(message, OkMsg):
            message = OkAttributes(vars(message))
        return super().encode(message)

    def decode(self, payload: bytes) -> object:
        """Return the message of a payload, as `FrameReader` yields it. Raises WireError."""
        message = super().decode(payload)
        return OkMsg(**message.attributes) if isinstance(message, OkAttributes) else message


MESSAGES = FtMessageSet()


logger = logging.getLogger("nvrx")

_LENGTH = struct.Struct(">I")


def recv_all(sock: socket.socket, n: int) -> bytes:
    """Return exactly `n` bytes from the blocking socket `sock`.

    Raises:
        PeerClosedError: The peer closed the connection before (a `ConnectionError`).
    """
    data = bytearray()
    while len(data) < n:
        chunk = sock.recv(min(n - len(data), MAX_FRAME_BYTES))
        if not chunk:
            raise PeerClosedError(f"the peer closed after {len(data)} of {n} bytes")
        data += chunk
    return bytes(data)


def read_obj_from_ipc_socket(sock: socket.socket, raise_exc: bool = False) -> object:
    """Return the next object from the blocking socket `sock`.

    A lost connection and malformed data give None and a log line at DEBUG, or are raised with
    `raise_exc`; the stream cannot be used after that.
    """
    try:
        size = _checked_size(recv_all(sock, _LENGTH.size))
        return MESSAGES.decode(recv_all(sock, size))
    except (WireError, OSError) as error:
        if raise_exc:
            raise
        logger.debug("no object could be read: %s", error)
        return None


def write_object_to_ipc_socket(obj: object, sock: socket.socket) -> None:
    """Send `obj`, of the closed set in `data`, over the blocking socket `sock`.

    Raises:
        WireError: The message holds an object that may not be sent, or is over 1 MiB.
        OSError: The peer is gone, or the socket's time limit has passed.
    """
    sock.sendall(MESSAGES.encode(obj), socket.MSG_NOSIGNAL)


async def read_obj_from_ipc_stream(reader: StreamReader) -> object:
    """Return the next object from the stream `reader`.

    Raises:
        EOFError: The stream ended (asyncio's `IncompleteReadError`).
        WireError: The received data is no message.
    """
    size = _checked_size(await reader.readexactly(_LENGTH.size))
    return MESSAGES.decode(await reader.readexactly(size))


async def write_obj_to_ipc_stream(obj: object, writer: StreamWriter) -> None:
    """Send `obj`, of the closed set in `data`, over `writer`, and wait until its buffer is empty.

    Raises:
        WireError: The message holds an object that may not be sent, or is over 1 MiB.
        ConnectionError: The peer is gone.
    """
    writer.write(MESSAGES.encode(obj))
    await writer.drain()


def _checked_size(head: bytes) -> int:
    (size,) = _LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise FrameTooLargeError(size, MAX_FRAME_BYTES)
    return int(size)
