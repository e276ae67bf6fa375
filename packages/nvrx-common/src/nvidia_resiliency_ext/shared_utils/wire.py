# SPDX-License-Identifier: Apache-2.0
"""Messages on Unix sockets: frames, a closed set of types, descriptors, and who the peer is.

It opens no socket and starts no thread. A frame is a 4-byte big-endian length and that many bytes
of JSON, 1 MiB at most; whatever a peer sends, reading it raises `WireError` and nothing else.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils._message_codec import Codec
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import (
    DeadlineExceededError,
    FrameTooLargeError,
    MalformedFrameError,
    PeerClosedError,
    PeerRefusedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "MAX_FRAME_BYTES",
    "FrameReader",
    "MessageSet",
    "PeerCredentials",
    "frame",
    "peer_credentials",
    "receive_message",
    "receive_with_fds",
    "require_same_user",
    "send_message",
    "send_with_fds",
]

MAX_FRAME_BYTES = 1 << 20
"""Largest payload of a frame, in both directions."""

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("iII")
_FD = struct.Struct("i")


class MessageSet:
    """The closed set of types that one connection may carry; immutable, safe to share.

    Plain values (None, bool, int, float, str, bytes, list, tuple, set, dict) always pass; of
    classes only the registered dataclasses and enums, by class name, and each field must fit its
    annotation. Names of extensions and code never travel.

    Example:
        >>> @dataclass(frozen=True)
        ... class CycleChanged:
        ...     cycle: int
        >>> messages = MessageSet(CycleChanged)
        >>> [payload] = FrameReader().feed(messages.encode(CycleChanged(cycle=3)))
        >>> messages.decode(payload)
        CycleChanged(cycle=3)

    Args:
        types: Dataclasses and enums.

    Raises:
        TypeError: A type is neither a dataclass nor an enum.
        ValueError: Two of the types have the same name.
    """

    def __init__(self, *types: type) -> None:
        self._codec = Codec(types)

    def encode(self, message: object) -> bytes:
        """Return the frame of `message` for a stream: length and payload.

        Raises:
            UnknownMessageError: The message holds an object of a type that is not in the set.
            MalformedFrameError: The message nests too deeply, or an integer has more than 64 bits.
            FrameTooLargeError: The message needs more than 1 MiB.
        """
        return frame(self._codec.dumps(message))

    def encode_payload(self, message: object) -> bytes:
        """Return the payload of `message`, for sockets that keep messages apart.

        Raises:
            WireError: As for `encode`.
        """
        return self.encode(message)[_LENGTH.size :]

    def decode(self, payload: bytes) -> object:
        """Return the message of `payload`, the bytes after the length.

        Raises:
            UnknownMessageError: The payload names a type that is not in the set.
            FrameTooLargeError: The payload is larger than 1 MiB.
            MalformedFrameError: The payload is wrong in any other way.
        """
        if len(payload) > MAX_FRAME_BYTES:
            raise FrameTooLargeError(len(payload), MAX_FRAME_BYTES)
        return self._codec.loads(payload)


class FrameReader:
    """Cuts a stream into frames, for one connection; it holds at most one unfinished frame."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received `data`; return the payloads of the frames that are complete.

        Raises:
            FrameTooLargeError: A frame's length is over the limit; the connection cannot be used
                after that.
        """
        buffer = self._buffer
        buffer += data
        payloads = []
        position = 0
        while len(buffer) - position >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, position)
            if size > MAX_FRAME_BYTES:
                del buffer[:position]
                raise FrameTooLargeError(size, MAX_FRAME_BYTES)
            end = position + _LENGTH.size + size
            if end > len(buffer):
                break
            payloads.append(bytes(buffer[position + _LENGTH.size : end]))
            position = end
        del buffer[:position]
        return payloads


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who was at the other end of a Unix socket when it was connected, as the kernel says.

    Attributes:
        pid: Process number in our namespace, 0 when it lives in one that we cannot see.
        uid: User.
        gid: Group.
    """

    pid: int
    uid: int
    gid: int


def frame(payload: bytes) -> bytes:
    """Return `payload` with its length in front.

    Raises:
        FrameTooLargeError: The payload is larger than 1 MiB.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameTooLargeError(len(payload), MAX_FRAME_BYTES)
    return _LENGTH.pack(len(payload)) + payload


def send_message(
    sock: socket.socket, messages: MessageSet, message: object, timeout_s: float | None
) -> None:
    """Send `message`, one of `messages`, as a frame over `sock`, in `timeout_s` s (None: no limit).

    Raises:
        WireError: The message cannot be encoded, or the peer is gone (`PeerClosedError`).
        DeadlineExceededError: The peer does not read in time; the stream cannot be used after that.
    """
    with _deadline_on(sock, timeout_s) as arm:
        _send_all(sock, messages.encode(message), arm)


def receive_message(sock: socket.socket, messages: MessageSet, timeout_s: float | None) -> object:
    """Receive exactly one of `messages` from `sock` within `timeout_s` s (None: no limit).

    Raises:
        PeerClosedError: The peer closed the connection.
        WireError: The received data is no message of the set.
        DeadlineExceededError: No whole message came in time; the stream cannot be used after that.
    """
    with _deadline_on(sock, timeout_s) as arm:
        (size,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size, arm))
        if size > MAX_FRAME_BYTES:
            raise FrameTooLargeError(size, MAX_FRAME_BYTES)
        payload = _receive_exactly(sock, size, arm)
    return messages.decode(payload)


def send_with_fds(
    sock: socket.socket, data: bytes, fds: Sequence[int], timeout_s: float | None = None
) -> None:
    """Send `data` over `sock`, with `fds` on its first byte, in `timeout_s` s (None: no limit).

    The descriptors stay open here.

    Raises:
        ValueError: There are no bytes.
        PeerClosedError: The peer is gone.
        DeadlineExceededError: The peer does not read in time.
    """
    if not data:
        raise ValueError("descriptors travel with at least one byte")
    with _deadline_on(sock, timeout_s) as arm:
        arm()
        try:
            # Not socket.send_fds and recv_fds: they drop the flags.
            sent = sock.sendmsg([data], rights(fds), socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerClosedError("the peer is gone") from error
        _send_all(sock, data[sent:], arm)


def receive_with_fds(
    sock: socket.socket, max_bytes: int, max_fds: int, timeout_s: float | None = None
) -> tuple[bytes, list[int]]:
    """Receive once from `sock`: up to `max_bytes` and `max_fds` descriptors, in `timeout_s` s.

    The caller owns the descriptors; child programs do not inherit them.


    Returns:
        The bytes, empty when the peer has closed the connection, and the descriptors.

    Raises:
        MalformedFrameError: More descriptors or, on a packet socket, more bytes came than fit.
        PeerClosedError: The peer is gone.
        DeadlineExceededError: Nothing came in time.
    """
    with _deadline_on(sock, timeout_s) as arm:
        arm()
        try:
            data, ancillary, flags, _ = sock.recvmsg(
                max_bytes, socket.CMSG_LEN(max_fds * _FD.size), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError as error:
            raise PeerClosedError("the peer is gone") from error
    fds = _unpack_fds(ancillary)
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) > max_fds:
        for descriptor in fds:
            os.close(descriptor)
        raise MalformedFrameError("the peer sent more bytes or descriptors than fit")
    return data, fds


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Return process, user and group at the other end of `sock`, a connected Unix socket."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerCredentials(*_CREDENTIALS.unpack(data))


def require_same_user(sock: socket.socket) -> PeerCredentials:
    """Return the credentials of the peer of `sock` if it runs as our own user.

    Raises:
        PeerRefusedError: The peer is another user; root is no exception.
    """
    peer = peer_credentials(sock)
    own_uid = os.geteuid()
    if peer.uid != own_uid:
        raise PeerRefusedError(peer.pid, peer.uid, own_uid)
    return peer


@contextmanager
def _deadline_on(sock: socket.socket, timeout_s: float | None) -> Iterator[Callable[[], None]]:
    """Lend a socket the time that is left of one deadline, then give it its own timeout back."""
    deadline = Deadline.after(timeout_s)
    own_timeout_s = sock.gettimeout()
    try:
        yield lambda: sock.settimeout(deadline.timeout())
    except (TimeoutError, BlockingIOError) as error:
        raise DeadlineExceededError(f"the peer did nothing for {timeout_s} s") from error
    finally:
        if sock.fileno() >= 0:
            sock.settimeout(own_timeout_s)


def _send_all(sock: socket.socket, data: bytes, arm: Callable[[], None]) -> None:
    remaining = memoryview(data)
    try:
        while remaining:
            arm()
            remaining = remaining[sock.send(remaining, socket.MSG_NOSIGNAL) :]
    except (BrokenPipeError, ConnectionResetError) as error:
        raise PeerClosedError("the peer is gone") from error


def _receive_exactly(sock: socket.socket, size: int, arm: Callable[[], None]) -> bytes:
    received = bytearray()
    while len(received) < size:
        arm()
        try:
            data = sock.recv(min(size - len(received), 1 << 16))
        except ConnectionResetError as error:
            raise PeerClosedError("the peer is gone") from error
        if not data:
            raise PeerClosedError("the peer closed the connection")
        received += data
    return bytes(received)


def rights(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """Return what `sendmsg` takes to send descriptors."""
    packed = b"".join(_FD.pack(descriptor) for descriptor in fds)
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if fds else []


def _unpack_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = data[: len(data) - len(data) % _FD.size]
            fds += [descriptor for (descriptor,) in _FD.iter_unpack(whole)]
    return fds
