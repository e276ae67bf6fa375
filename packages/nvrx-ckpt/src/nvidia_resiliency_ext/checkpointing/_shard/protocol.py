# SPDX-License-Identifier: Apache-2.0
"""Speak the protocol between `PeerServer` and the ranks that connect to it.

A connection begins with a nonce of the server. The client answers with a proof that it has the
token, and a request in JSON; the server proves the same. Then come ranges of the file: position and
length, followed by the bytes when they are sent.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
from typing import Any

NONCE_BYTES = 16
PROOF_BYTES = 32
PATIENCE = 10
"""Times `timeout_s`: for a peer that answers and does not finish."""
LENGTH = struct.Struct("<I")
RANGE = struct.Struct("<QQ")
_LIMIT_BYTES = 64 << 10


def set_options(sock: socket.socket, timeout_s: float) -> None:
    """Notice a lost host: by data that is not acknowledged, and by probes while nothing is sent."""
    sock.settimeout(timeout_s)
    interval_s = max(1, int(timeout_s / 4))
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_USER_TIMEOUT, int(timeout_s * 1000)),
        (socket.TCP_KEEPIDLE, interval_s),
        (socket.TCP_KEEPINTVL, interval_s),
        (socket.TCP_KEEPCNT, 3),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def require_proof(proof: bytes, token: bytes, message: bytes) -> None:
    if not hmac.compare_digest(proof, proof_of(token, message)):
        raise ValueError("the other end does not know the job's token")


def proof_of(token: bytes, message: bytes) -> bytes:
    return hmac.digest(token, message, "sha256")


def send_json(sock: socket.socket, value: dict[str, Any]) -> None:
    text = json.dumps(value).encode()
    sock.sendall(LENGTH.pack(len(text)) + text)


def receive_json(sock: socket.socket) -> dict[str, Any]:
    found = json.loads(receive_text(sock))
    if not isinstance(found, dict) or not isinstance(found.get("error"), str):
        raise ValueError("it did not answer in our protocol")  # noqa: TRY004 - of what a peer says
    return found


def receive_text(sock: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(receive(sock, LENGTH.size))
    if length > _LIMIT_BYTES:
        raise ValueError(f"it announces {length} bytes; {_LIMIT_BYTES} are allowed")
    return receive(sock, length)


def receive(sock: socket.socket, nbytes: int, *, may_end: bool = False) -> bytes:
    data = bytearray(nbytes)
    got = sock.recv_into(data)
    if got == 0 and may_end:
        return b""
    if got == 0 and nbytes:
        raise ConnectionError("the connection ended")
    receive_into(sock, memoryview(data)[got:])
    return bytes(data)


def receive_into(sock: socket.socket, target: memoryview) -> None:
    while target:
        count = sock.recv_into(target)
        if count == 0:
            raise ConnectionError("the connection ended in the middle")
        target = target[count:]
