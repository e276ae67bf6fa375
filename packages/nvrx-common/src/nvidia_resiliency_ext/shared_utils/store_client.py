# SPDX-License-Identifier: Apache-2.0
"""A client of torch's TCPStore that needs no torch, and whose waits another thread can end.

Importing torch takes seconds on a busy host and 155 MB of private memory; the operations of a store
take a socket. A request is a byte for the operation, numbers in 8 bytes of this machine's order,
and texts after their length. The server must first answer a handshake, or it is not taken for one
of torch's: it is asked to change a missing key from a random value, which changes nothing and
returns that value in every version (tried with 2.4.0 and 2.13.0). A server of 2.4 does not know
torch's own ping.
"""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from .clock import Deadline
from .errors import NvrxError
from .store_sockets import reach, watch_over

__all__ = ["StoreClient", "StoreLostError", "StrangeStoreError", "WaitExpiredError", "handshake"]

_MAGIC = struct.pack("=I", 0x3C85F7CE)
_NUMBER = struct.Struct("=q")
_WORD_BYTES = 16
_KEY = b"/nvrx/handshake/"  # torch puts a slash before all keys

ANSWER_TIMEOUT_S = 20.0
MAX_ANSWER_BYTES = (1 << 24) + 1
_STOP_WAITING = 0
_READY = 0
_READ_BYTES = 65536
REFUSED_LIMIT_S = 10.0
_PAUSE_S = 0.05
_LEAST_S = 0.1

_Answer = TypeVar("_Answer")


class _Query(enum.IntEnum):
    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12


def handshake(connection: socket.socket) -> bool:
    """Begin as torch's clients do; return whether `connection` leads to a store of torch's.

    Raises:
        TimeoutError: It took longer than the timeout of the connection.
        OSError: The connection was ended.
    """
    word = os.urandom(_WORD_BYTES).hex().encode()
    key, value = _prefixed(_KEY + word), _prefixed(word)
    deadline = Deadline.after(connection.gettimeout())
    validate, compare_set = bytes((_Query.VALIDATE,)), bytes((_Query.COMPARE_SET,))
    connection.sendall(validate + _MAGIC + compare_set + key + value + value)
    answer = b""
    while answer != value:
        left_s = deadline.timeout()
        if left_s == 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        part = connection.recv(len(value) - len(answer))
        answer += part
        if not part or not value.startswith(answer):
            return False
    return True


def _prefixed(value: bytes) -> bytes:
    return _NUMBER.pack(len(value)) + value


class StoreLostError(NvrxError):
    """The store does not answer: its host is gone, or the way to it."""


class WaitExpiredError(TimeoutError):
    """A key did not come in time."""


class StrangeStoreError(StoreLostError):
    """The server does not answer as torch's TCPStore does."""


class StoreClient:
    """One connection to a running TCPStore; it belongs to one thread, which alone may wait.

    Its methods are those of torch's stores.

    Example:
        >>> from datetime import timedelta
        >>> with contextlib.suppress(StoreLostError):
        ...     StoreClient("127.0.0.1", 9, timedelta(seconds=1), refused_limit_s=0.0)

    Args:
        host: Name or address of the store.
        port: Its port.
        timeout: How long connecting with the handshake, and a wait without a limit, may take.
        refused_limit_s: How long (s) to try again where nobody listens. Default 10.
        answer_timeout_s: How long (s) an answer may take, the handshake's included; None: no limit
            but for the handshake's. Default 20.
        max_answer_bytes: Largest value; a larger one ends the connection. Default 16 MiB + 1.

    Attributes:
        answer_timeout_s: The same for later answers.

    Raises:
        StoreLostError: Nobody answers there.
        StrangeStoreError: It is no TCPStore.
    """

    def __init__(
        self,
        host: str,
        port: int,
        timeout: timedelta,
        *,
        refused_limit_s: float = REFUSED_LIMIT_S,
        answer_timeout_s: float | None = ANSWER_TIMEOUT_S,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self.host = host
        self.port = port
        self.timeout = timeout
        self.answer_timeout_s = answer_timeout_s
        self._refused_limit_s = refused_limit_s
        self._max_answer_bytes = max_answer_bytes
        deadline = Deadline.after(timeout.total_seconds())
        self._sock = _connect(host, port, deadline, refused_limit_s)
        try:
            self._handshake(deadline)
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        # As torch's do: whoever uses a store lets it go, and no more.
        if hasattr(self, "_sock"):
            self.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """Let waits without a limit of their own take `timeout`."""
        self.timeout = timeout

    @staticmethod
    def has_extended_api() -> bool:
        """Return True: this client can append."""
        return True

    def clone(self) -> StoreClient:
        """Return another connection to the same store."""
        return StoreClient(
            self.host,
            self.port,
            self.timeout,
            refused_limit_s=self._refused_limit_s,
            answer_timeout_s=self.answer_timeout_s,
            max_answer_bytes=self._max_answer_bytes,
        )

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key` to `value`."""
        self._ask(_nothing, _Query.SET, _key(key), _prefixed(_bytes(value)))

    def append(self, key: str, value: str | bytes) -> None:
        """Add `value` to the end of the value of `key`, which may be missing."""
        self._ask(_nothing, _Query.APPEND, _key(key), _prefixed(_bytes(value)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` to `desired` if its value is `expected`; return the value that it has then.

        A missing key is set only where nothing is expected; else `expected` is returned.
        """
        values = map(_prefixed, map(_bytes, (expected, desired)))
        return self._ask(self._receive_text, _Query.COMPARE_SET, _key(key), *values)

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number at `key` (missing: 0) and return the sum."""
        return self._ask(self._receive_number, _Query.ADD, _key(key), _NUMBER.pack(amount))

    def delete_key(self, key: str) -> bool:
        """Remove `key`; return whether it was there."""
        return self._ask(self._receive_number, _Query.DELETE_KEY, _key(key)) > 0

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` are there."""
        return self._ask(lambda: self._receive(1), _Query.CHECK, *_keys(keys))[0] == _READY

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` are there, for `timeout` at most (None: as the client was told).

        Raises:
            WaitExpiredError: They are not in time.
        """
        limit_s = (self.timeout if timeout is None else timeout).total_seconds()
        if not self._ask(lambda: self._is_set_within(limit_s), _Query.WAIT, *_keys(keys)):
            raise WaitExpiredError(f"no {', '.join(keys)} within {limit_s:g} s")

    def get(self, key: str) -> bytes:
        """Wait for `key` and return its value."""
        self.wait([key])
        return self._ask(self._receive_text, _Query.GET, _key(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for `keys` and return their values."""
        self.wait(keys)
        return self._ask(
            lambda: [self._receive_text() for _ in keys], _Query.MULTI_GET, *_keys(keys)
        )

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Set `keys` to `values`, which are in the same order, at once."""
        pairs = zip(map(_key, keys), (_prefixed(value.encode()) for value in values), strict=True)
        parts = [part for pair in pairs for part in pair]
        self._ask(_nothing, _Query.MULTI_SET, _NUMBER.pack(len(keys)), *parts)

    def cut(self) -> None:
        """End the connection from any thread; a wait or a question on it fails at once."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._sock.close()

    def _handshake(self, deadline: Deadline) -> None:
        limit_s = min(self.answer_timeout_s or ANSWER_TIMEOUT_S, deadline.remaining())
        self._sock.settimeout(max(limit_s, _LEAST_S))
        try:
            is_known = handshake(self._sock)
        except TimeoutError:
            raise StoreLostError(
                f"no store answers at {self.host}:{self.port}: who listens there has said nothing"
                f" for {limit_s:.1f} s"
            ) from None
        except OSError:
            is_known = False
        if not is_known:
            raise StrangeStoreError(
                f"{self.host}:{self.port} does not answer a handshake as a TCPStore does"
            )

    def _ask(self, answer: Callable[[], _Answer], query: _Query, *parts: bytes) -> _Answer:
        """Send a request and return the value that `answer` reads; end a failed connection."""
        try:
            self._send(query, *parts)
            return answer()
        except TimeoutError as error:
            self.cut()
            # The kernel ends dead connections with the same type of error.
            if error.errno or self.answer_timeout_s is None:
                message = "the connection is dead: nothing was acknowledged"
            else:
                message = f"no answer within {self.answer_timeout_s:g} s"
            raise ConnectionError(message) from None
        except BaseException:
            self.cut()
            raise

    def _send(self, query: _Query, *parts: bytes) -> None:
        self._sock.settimeout(self.answer_timeout_s)
        self._sock.sendall(b"".join((bytes((query,)), *parts)))

    def _is_set_within(self, limit_s: float) -> bool:
        # Nothing but the answer to the wait can come.
        self._sock.settimeout(max(limit_s, 1e-3))
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except TimeoutError as error:
            if error.errno:
                raise
        else:
            if self._receive(1)[0] != _STOP_WAITING:
                raise ConnectionError("the store has ended a wait by itself")
            return True
        self._send(_Query.CANCEL_WAIT)
        # The last key may have come just before; then both are said.
        if self._receive(1)[0] == _STOP_WAITING:
            self._receive(1)
        return False

    def _receive(self, size: int) -> bytes:
        self._sock.settimeout(self.answer_timeout_s)
        data = bytearray()
        while len(data) < size:
            part = self._sock.recv(min(size - len(data), _READ_BYTES))
            if not part:
                raise ConnectionError("the store has ended the connection")
            data += part
        return bytes(data)

    def _receive_number(self) -> int:
        number: int = _NUMBER.unpack(self._receive(_NUMBER.size))[0]
        return number

    def _receive_text(self) -> bytes:
        size = self._receive_number()
        if not 0 <= size <= self._max_answer_bytes:
            raise ConnectionError(f"the store answers with {size} bytes")
        return self._receive(size)


def _connect(host: str, port: int, deadline: Deadline, refused_limit_s: float) -> socket.socket:
    refused_until = Deadline.after(min(deadline.remaining(), refused_limit_s))
    while True:
        try:
            sock = reach((host, port), max(deadline.remaining(), _LEAST_S))
        except ConnectionRefusedError as error:
            if refused_until.expired():
                raise StoreLostError(f"no store answers at {host}:{port}: {error}") from None
            time.sleep(_PAUSE_S)  # it may be about to listen: nobody would tell us
            continue
        except (OSError, ValueError) as error:  # ValueError: no such name can be
            raise StoreLostError(f"no store answers at {host}:{port}: {error}") from None
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_over(sock)
        return sock


def _nothing() -> None:
    """Read nothing: this request has no answer."""


def _key(key: str) -> bytes:
    return _prefixed(b"/" + key.encode())  # torch puts the slash there


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _keys(keys: Sequence[str]) -> list[bytes]:
    return [_NUMBER.pack(len(keys)), *map(_key, keys)]
