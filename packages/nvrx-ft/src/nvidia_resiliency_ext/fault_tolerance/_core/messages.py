# SPDX-License-Identifier: Apache-2.0
"""Messages and single objects that ranks, their monitor and the launcher send each other.

A `Mailbox` takes them on a Unix socket, served by its owner's event loop; it has no thread.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance import data
from nvidia_resiliency_ext.fault_tolerance.data import ErrorMsg, OkMsg
from nvidia_resiliency_ext.shared_utils.errors import FrameTooLargeError, PeerClosedError, WireError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop
from nvidia_resiliency_ext.shared_utils.wire import MAX_FRAME_BYTES, MessageSet

from .acceptor import Acceptor, Connection, RefusalLog

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


_MOST_CLIENTS = 1024
_CLIENTS_SHARE = 4


class Mailbox:
    """Takes messages from any number of senders; `deliver` gets each before it is acknowledged.

    Raises ValueError for a path that is too long, FileExistsError where somebody else listens.
    """

    def __init__(
        self,
        socket_path: str,
        loop: EventLoop,
        deliver: Callable[[object], None],
        messages: MessageSet = MESSAGES,
    ) -> None:
        self.socket_path = socket_path
        self._messages = messages
        self._deliver = deliver
        self._refusals = RefusalLog(socket_path)
        self._acceptor = Acceptor(
            socket_path,
            loop,
            messages,
            most=_most_clients(),
            on_received=self._receive,
            on_refused=self._record,
        )

    def close(self) -> None:
        """Drop all clients and remove the socket; harmless when repeated."""
        self._acceptor.close()
        self._refusals.finish()

    def _receive(self, client: Connection, messages: list[object]) -> None:
        for message in messages:
            self._deliver(message)
            client.channel.send(OkMsg())
            if client.channel.wants_to_write:
                # An answer is tiny: who has no room for one does not read them.
                client.channel.is_over = True
        if client.channel.is_garbled:
            self._record(f"{self.socket_path}: pid {client.pid} sent no message that is known here")
            answer = self._messages.encode(ErrorMsg("this is no message that is known here"))
            with contextlib.suppress(OSError):  # it is gone, or does not read
                client.channel.sock.send(answer, socket.MSG_NOSIGNAL)

    def _record(self, text: str) -> None:
        self._refusals.record(monotonic(), text)


def _most_clients() -> int:
    """Return how many clients may stay connected: the owner needs descriptors for other things."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST_CLIENTS
    return max(1, min(_MOST_CLIENTS, limit // _CLIENTS_SHARE))
