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

from nvidia_resiliency_ext.shared_utils._message_codec import (
    LENGTH,
    MAX_FRAME_BYTES,
    FrameReader,
    MessageSet,
    frame,
    size_of,
)
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import (
    DeadlineExceededError,
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

_CREDENTIALS = struct.Struct("iII")
_FD = struct.Struct("i")


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
        size = size_of(_receive_exactly(sock, LENGTH.size, arm))
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
        # Not socket.send_fds and recv_fds: they drop the flags.
        sent = sock.sendmsg([data], rights(fds), socket.MSG_NOSIGNAL)
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
        data, ancillary, flags, _ = sock.recvmsg(
            max_bytes, socket.CMSG_LEN(max_fds * _FD.size), socket.MSG_CMSG_CLOEXEC
        )
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
    except (BrokenPipeError, ConnectionResetError) as error:
        raise PeerClosedError("the peer is gone") from error
    finally:
        if sock.fileno() >= 0:
            sock.settimeout(own_timeout_s)


def _send_all(sock: socket.socket, data: bytes, arm: Callable[[], None]) -> None:
    remaining = memoryview(data)
    while remaining:
        arm()
        remaining = remaining[sock.send(remaining, socket.MSG_NOSIGNAL) :]


def _receive_exactly(sock: socket.socket, size: int, arm: Callable[[], None]) -> bytes:
    received = bytearray()
    while len(received) < size:
        arm()
        data = sock.recv(min(size - len(received), 1 << 16))
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
