# SPDX-License-Identifier: Apache-2.0
"""Owns reading an HTTP answer by one deadline: a socket counts its limit anew at each byte."""

from __future__ import annotations

import http.client
import io
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

__all__ = ["timed_response"]


def timed_response(
    sock: socket.socket, deadline: float, **options: Any
) -> http.client.HTTPResponse:
    """Return the answer that comes over a socket.

    Args:
        sock: Where the request was sent.
        deadline: Moment on the monotonic clock from which on reading is a `TimeoutError`.
        options: Of `http.client.HTTPResponse`.
    """
    return http.client.HTTPResponse(_TimedSocket(sock, deadline), **options)  # type: ignore[arg-type]


class _TimedSocket:
    """What `HTTPResponse` uses of a socket."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock, self._deadline))


class _TimedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        # Keeps the connection open until it is read, also when `http.client` has closed its end.
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer takes too long")
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
