# SPDX-License-Identifier: Apache-2.0
"""Single objects on a connected socket or asyncio stream, in the same frames as all messages."""

import logging
import socket
import struct
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._ipc.messages import MESSAGES
from nvidia_resiliency_ext.shared_utils.errors import (
    FrameTooLargeError,
    PeerClosedError,
    WireError,
)
from nvidia_resiliency_ext.shared_utils.wire import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

__all__ = [
    "read_obj_from_ipc_socket",
    "read_obj_from_ipc_stream",
    "recv_all",
    "write_obj_to_ipc_stream",
    "write_object_to_ipc_socket",
]

logger = logging.getLogger("nvrx")

_LENGTH = struct.Struct(">I")


def recv_all(sock: socket.socket, n: int) -> bytes:
    """Return exactly `n` bytes from a blocking socket.

    Raises:
        PeerClosedError: the peer closed the connection before (a `ConnectionError`).
    """
    data = bytearray()
    while len(data) < n:
        chunk = sock.recv(min(n - len(data), MAX_FRAME_BYTES))
        if not chunk:
            raise PeerClosedError(f"the peer closed after {len(data)} of {n} bytes")
        data += chunk
    return bytes(data)


def read_obj_from_ipc_socket(sock: socket.socket, raise_exc: bool = False) -> object:
    """Return the next object from a blocking socket.

    When the connection is lost or what comes is no message, that is logged and None returned, or
    raised if `raise_exc`; the stream is then useless.
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
    """Send one object over a blocking socket.

    Raises:
        WireError: it holds something that may not be sent, or is over 1 MiB.
        OSError: the peer is gone, or the socket's time limit has passed.
    """
    sock.sendall(MESSAGES.encode(obj), socket.MSG_NOSIGNAL)


async def read_obj_from_ipc_stream(reader: "StreamReader") -> object:
    """Return the next object from a stream.

    Raises:
        EOFError: the stream ended (asyncio's `IncompleteReadError`).
        WireError: what came is no message.
    """
    size = _checked_size(await reader.readexactly(_LENGTH.size))
    return MESSAGES.decode(await reader.readexactly(size))


async def write_obj_to_ipc_stream(obj: object, writer: "StreamWriter") -> None:
    """Send one object over a stream and wait until the stream has room again.

    Raises:
        WireError: it holds something that may not be sent, or is over 1 MiB.
        ConnectionError: the peer is gone.
    """
    writer.write(MESSAGES.encode(obj))
    await writer.drain()


def _checked_size(head: bytes) -> int:
    (size,) = _LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise FrameTooLargeError(size, MAX_FRAME_BYTES)
    return int(size)
