# SPDX-License-Identifier: Apache-2.0
"""A client of torch's TCPStore without torch, for the monitor, and the handshake with a server.

Importing torch takes seconds on a busy host, which is when a monitor has to be replaced, and 155 MB
of private memory. What is written: a byte for the operation, numbers in 8 bytes of this machine's
order, texts after their length. The handshake asks the server to change a key that nobody has from
a random value: a TCPStore changes nothing and answers that value, in every version (tried with
2.4.0 and 2.13.0).
"""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta

from nvidia_resiliency_ext.shared_utils.store_sockets import reach, watch_over

from .names import StoreLostError

_VALIDATE, _COMPARE_SET = b"\0", b"\2"
_MAGIC = struct.pack("=I", 0x3C85F7CE)
_NUMBER = struct.Struct("=q")
_WORD_BYTES = 16
_KEY = b"/nvrx/handshake/"  # torch puts a slash before all keys


def handshake(connection: socket.socket) -> bool:
    """Begin as torch's clients do; return whether a store of torch's is at the other end."""
    word = os.urandom(_WORD_BYTES).hex().encode()
    key, value = _prefixed(_KEY + word), _prefixed(word)
    connection.sendall(_VALIDATE + _MAGIC + _COMPARE_SET + key + value + value)
    answer = b""
    while answer != value:
        part = connection.recv(len(value) - len(answer))
        answer += part
        if not part or not value.startswith(answer):
            return False
    return True


def _prefixed(value: bytes) -> bytes:
    return _NUMBER.pack(len(value)) + value


ANSWER_TIMEOUT_S = 20.0
MAX_ANSWER_BYTES = (1 << 24) + 1
_STOP_WAITING, _WAIT_CANCELED = 0, 1
_READY = 0
_READ_BYTES = 65536
_REFUSED_LIMIT_S = 10.0
_PAUSE_S = 0.05


class WaitExpiredError(TimeoutError):
    """A key did not come in time."""


class StrangeStoreError(StoreLostError):
    """The server does not answer as torch's TCPStore does."""


class _Query(enum.IntEnum):
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    CANCEL_WAIT = 12


class PlainStore:
    """One connection to a running TCPStore, for one thread, with what `StoreAccess` uses.

    A StoreLostError if nobody answers there, a StrangeStoreError if it is no TCPStore.
    """

    def __init__(self, host: str, port: int, timeout: timedelta) -> None:
        self.host = host
        self.port = port
        self.timeout = timeout
        self._sock = _connect(host, port, timeout.total_seconds())
        try:
            self._handshake()
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        # As torch's do: whoever uses a store lets it go, and no more.
        if hasattr(self, "_sock"):
            self.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """Let waits take so long."""
        self.timeout = timeout

    @staticmethod
    def has_extended_api() -> bool:
        """Say that it can append."""
        return True

    def clone(self) -> PlainStore:
        """Return another connection."""
        return PlainStore(self.host, self.port, self.timeout)

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._send(_Query.SET, _key(key), _prefixed(value.encode()))

    def append(self, key: str, value: str) -> None:
        """Add to the end of a value."""
        self._send(_Query.APPEND, _key(key), _prefixed(value.encode()))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if its value is the expected one; return what stands."""
        values = (_prefixed(expected.encode()), _prefixed(desired.encode()))
        self._send(_Query.COMPARE_SET, _key(key), *values)
        return self._receive_text()

    def add(self, key: str, amount: int) -> int:
        """Add to a number; return the sum."""
        self._send(_Query.ADD, _key(key), _NUMBER.pack(amount))
        return self._receive_number()

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        self._send(_Query.DELETE_KEY, _key(key))
        return self._receive_number() > 0

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        self._send(_Query.CHECK, *_keys(keys))
        return self._receive(1)[0] == _READY

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there; a WaitExpiredError if they are not in time."""
        limit = self.timeout if timeout is None else timeout
        self._send(_Query.WAIT, *_keys(keys))
        if not self._is_readable(limit.total_seconds()):
            self._send(_Query.CANCEL_WAIT)
            # The last key may have come just before; then both are said.
            if self._receive(1)[0] == _STOP_WAITING:
                self._receive(1)
            raise WaitExpiredError(f"no {', '.join(keys)} within {limit.total_seconds():g} s")
        if self._receive(1)[0] != _STOP_WAITING:
            raise ConnectionError("the store has ended a wait by itself")

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        self._send(_Query.GET, _key(key))
        return self._receive_text()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys and return their values."""
        self.wait(keys)
        self._send(_Query.MULTI_GET, *_keys(keys))
        return [self._receive_text() for _ in keys]

    def close(self) -> None:
        """End the connection."""
        self._sock.close()

    def _handshake(self) -> None:
        self._sock.settimeout(ANSWER_TIMEOUT_S)
        try:
            is_known = handshake(self._sock)
        except TimeoutError:
            raise StoreLostError(
                f"no store answers at {self.host}:{self.port}: who listens there has said nothing"
                f" for {ANSWER_TIMEOUT_S:g} s"
            ) from None
        except OSError:
            is_known = False
        if not is_known:
            raise StrangeStoreError(
                f"{self.host}:{self.port} does not answer a handshake as a TCPStore does"
            )

    def _send(self, query: _Query, *parts: bytes) -> None:
        self._sock.settimeout(ANSWER_TIMEOUT_S)
        self._sock.sendall(b"".join((bytes((query,)), *parts)))

    def _is_readable(self, timeout_s: float) -> bool:
        # Nothing but the answer to the wait can come.
        self._sock.settimeout(max(timeout_s, 1e-3))
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        return True

    def _receive(self, size: int) -> bytes:
        self._sock.settimeout(ANSWER_TIMEOUT_S)
        data = bytearray()
        while len(data) < size:
            try:
                part = self._sock.recv(min(size - len(data), _READ_BYTES))
            except TimeoutError:
                raise ConnectionError(f"no answer within {ANSWER_TIMEOUT_S:g} s") from None
            if not part:
                raise ConnectionError("the store has ended the connection")
            data += part
        return bytes(data)

    def _receive_number(self) -> int:
        number: int = _NUMBER.unpack(self._receive(_NUMBER.size))[0]
        return number

    def _receive_text(self) -> bytes:
        size = self._receive_number()
        if not 0 <= size <= MAX_ANSWER_BYTES:
            # Nothing that follows could be told apart.
            self.close()
            raise ConnectionError(f"the store answers with {size} bytes")
        return self._receive(size)


def _connect(host: str, port: int, limit_s: float) -> socket.socket:
    deadline = time.monotonic() + limit_s
    refused_until = time.monotonic() + min(limit_s, _REFUSED_LIMIT_S)
    while True:
        try:
            sock = reach((host, port), max(deadline - time.monotonic(), 0.1))
        except ConnectionRefusedError as error:
            if time.monotonic() >= refused_until:
                raise StoreLostError(f"no store answers at {host}:{port}: {error}") from None
            time.sleep(_PAUSE_S)  # it may be about to listen: nobody would tell us
            continue
        except OSError as error:
            raise StoreLostError(f"no store answers at {host}:{port}: {error}") from None
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_over(sock)
        return sock


def _key(key: str) -> bytes:
    return _prefixed(b"/" + key.encode())  # torch puts the slash there


def _keys(keys: Sequence[str]) -> list[bytes]:
    return [_NUMBER.pack(len(keys)), *map(_key, keys)]
