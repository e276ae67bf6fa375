# SPDX-License-Identifier: Apache-2.0
"""The job's part of a TCPStore: its keys, signed values, typed errors, and a count of operations.

Only to serve a store torch is imported.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from nvidia_resiliency_ext.shared_utils.store_client import (
    StoreClient,
    StoreLostError,
    WaitExpiredError,
)
from nvidia_resiliency_ext.shared_utils.store_sockets import serving_options

from . import keys
from .records import MAX_VALUE_BYTES, ForeignValueError

logger = logging.getLogger("nvrx")

CALL_TIMEOUT_S = 30.0
_TORCH_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"

_DIGEST_HEX = 32
# `compare_set` with this as the expected value changes nothing and returns what is there, or this:
# the one way to read a key without waiting for it. On a missing key it wakes, in vain, those who
# wait for it (torch 2.13), so it is not for such keys.
# Nobody else knows it, so nobody can make a key look missing.
_NOTHING = "-" + os.urandom(16).hex()
_CLOCK_STEP_S = 0.01
_COUNTER = re.compile(rb"[+-]?[0-9]{1,18}")
_RECONNECT_S = 5.0  # For a connection in place of one on which the store has hung up.
_SHORTEST_TORCH_WAIT_S = 60.0
_TORCH_LOOK_S = 0.05
# Two connections of each node, and as many again for replacements. The limit of open files is
# raised to that and no further: workers inherit it.
_FILES_PER_NODE = 4
_FILES_BESIDES = 512
_SECRET = "secret"  # noqa: S105 - the name of a key
_MAX_ANSWER_BYTES = 256 << 20  # All messages of a round stand in one value.


_T = TypeVar("_T")


class NoJobError(StoreLostError):
    """The store answers and holds no such job: its coordinator is elsewhere, or not there yet."""

    def __init__(self, client: Any, prefix: str, waited_s: float) -> None:
        at = f" at {client.host}:{client.port}" if hasattr(client, "port") else ""
        super().__init__(
            f"the store{at} holds no job {keys.run_id(prefix)!r} after {waited_s:.0f} s:"
            " is --rdzv-id the same everywhere, and has the rendezvous host begun?"
        )


class JobStore:
    """Keys of one job in a store, for one thread; others use `another`.

    Every value carries a keyed digest over its key and text, so that neither another job's values
    nor values copied from another key are taken: reading one raises ForeignValueError. A client
    answers one call at a time, so a thread that waits needs a client of its own.
    """

    def __init__(self, client: Any, prefix: str, secret: bytes) -> None:
        self._client = client
        self._was_cut = threading.Event()
        self._prefix = prefix
        self._secret = secret
        self._reported: set[str] = set()
        self.operations = 0

    def another(self) -> JobStore:
        """Return the same keys over a connection of their own, for another thread."""
        return JobStore(another_client(self._client), self._prefix, self._secret)

    @property
    def _can_be_cut(self) -> bool:
        """Whether the connection is ours and not one of torch's."""
        return hasattr(self._client, "cut")

    def cut(self) -> None:
        """End the connection, from any thread: whoever waits for an answer gets StoreLostError."""
        self._was_cut.set()
        if self._can_be_cut:
            self._client.cut()

    def close(self) -> None:
        """End the connection and free its descriptor, from the thread that it belongs to."""
        if self._can_be_cut:
            self._client.close()

    def create(self, key: str, text: str) -> str:
        """Set `key` unless it has a value; return the value that it has then."""
        raw = self._call("compare_set", self._name(key), b"", self._seal(key, text))
        return self._unseal(key, bytes(raw))

    def no_job(self, waited_s: float) -> NoJobError:
        return NoJobError(self._client, self._prefix, waited_s)

    def peek(self, key: str) -> str | None:
        """Return the value of `key`, for which nobody waits, or None; it never waits."""
        raw = self._read(key)
        return None if raw is None else self._unseal(key, raw)

    def has(self, key: str) -> bool:
        return bool(self._call("check", [self._name(key)]))

    def wait_for(self, key: str, timeout_s: float) -> str | None:
        """Wait in the store until `key` has a value and return it; None after `timeout_s`."""
        if not self.wait_until_set(key, timeout_s):
            return None
        return self.peek(key)

    def wait_until_set(self, key: str, timeout_s: float) -> bool:
        """Wait in the store until `key` has a value; False after `timeout_s`."""
        if timeout_s <= 0.0:
            return self.has(key)
        limit_s = max(0.001, timeout_s)
        name = self._name(key)
        self.operations += 1
        began = time.monotonic()
        if limit_s < _SHORTEST_TORCH_WAIT_S and not self._can_be_cut:
            return self._look_until(name, began + limit_s)
        try:
            self._client.wait([name], timedelta(seconds=limit_s))
        except WaitExpiredError:
            return False
        except (OSError, RuntimeError) as error:
            # The network's own timeouts use the same words as torch, but come at other times.
            is_late = time.monotonic() - began >= limit_s - _CLOCK_STEP_S
            # DistStoreError since torch 2.5; before, and in some paths, only the text tells.
            text = str(error).lower()
            is_timeout = "timeout" in text or "timed out" in text
            if is_late and is_timeout and isinstance(error, RuntimeError):
                return False
            raise StoreLostError(_first_line(error)) from None
        return True

    def _look_until(self, name: str, deadline: float) -> bool:
        """Look again and again: torch prints a warning for each wait that times out."""
        while not _guarded(self._client.check, [name]):
            if time.monotonic() >= deadline:
                return False
            if self._was_cut.wait(_TORCH_LOOK_S):
                raise StoreLostError("the connection was cut")
        return True

    def put(self, key: str, text: str) -> None:
        self._call("set", self._name(key), self._seal(key, text))

    def put_all(self, values: Mapping[str, str]) -> None:
        names = [self._name(key) for key in values]
        sealed = [self._seal(key, text) for key, text in values.items()]
        self._call("multi_set", names, sealed)

    def append_line(self, key: str, text: str) -> None:
        """Add one line to `key` in one operation; lines of several nodes never mix."""
        self._call("append", self._name(key), self._seal(key, text) + "\n")

    def lines(self, key: str, offset: int, read: Callable[[str], _T]) -> tuple[list[_T], int]:
        """Return the lines of `key` from `offset` on, parsed by `read`, and the next offset.

        A line that is not this job's, or none for `read`, is named in the log, once, and left out.
        Raises ForeignValueError: there is less than was read before.
        """
        raw = self._read(key)
        if raw is None:
            return [], 0
        end = raw.rfind(b"\n") + 1
        if end < offset:
            raise ForeignValueError(f"{key}: somebody else has written over it")
        found = []
        for line in raw[offset:end].splitlines():
            try:
                found.append(read(self._unseal(key, line)))
            except ForeignValueError as error:
                text = str(error)
                if text not in self._reported and len(self._reported) < 32:  # noqa: PLR2004
                    self._reported.add(text)
                    logger.warning(
                        "refused what somebody else wrote into the job's store: %s", text
                    )
        return found, end

    def count(self, key: str, step: int) -> int:
        """Add `step` to a counter and return its new value; the store has seen it then.

        Where the connection broke before the answer, the step may count twice. Raises
        ForeignValueError: somebody else has written what is no number.
        """
        try:
            return int(self._call("add", self._name(key), step))
        except StoreLostError:
            if self._was_cut.is_set() or not self._can_be_cut:
                raise
        # torch's store hangs up on whoever adds to what is no number (2.13): ask which it was.
        self._client.close()
        self._client = _connect_client(self._client.host, self._client.port, _RECONNECT_S)
        if self._was_cut.is_set():
            self._client.cut()
        raw = self._read(key)
        if raw is not None and not _COUNTER.fullmatch(raw):
            raise ForeignValueError(f"{key}: {raw[:20]!r} is no number")
        return int(self._call("add", self._name(key), step))

    def counters(self, keys: Iterable[str]) -> list[int]:
        """Return counters that exist, in one operation; one that is no number counts as 0."""
        raw = self._call("multi_get", [self._name(key) for key in keys])
        return [int(value) if _COUNTER.fullmatch(value) else 0 for value in raw]

    def delete(self, key: str) -> None:
        self._call("delete_key", self._name(key))

    def _read(self, key: str) -> bytes | None:
        raw = self._call("compare_set", self._name(key), _NOTHING, _NOTHING)
        return None if raw == _NOTHING.encode() else bytes(raw)

    def _name(self, key: str) -> str:
        return self._prefix + key

    def _seal(self, key: str, text: str) -> str:
        return self._digest(key, text.encode()) + text

    def _unseal(self, key: str, raw: bytes) -> str:
        if len(raw) > MAX_VALUE_BYTES:
            raise ForeignValueError(f"{key}: {len(raw)} bytes, at most {MAX_VALUE_BYTES} are read")
        digest, text = raw[:_DIGEST_HEX], raw[_DIGEST_HEX:]
        if not hmac.compare_digest(digest, self._digest(key, text).encode()):
            raise ForeignValueError(
                f"{key}: the signature is wrong: another program has written this key of the job's"
                " store, or a launcher with another token"
            )
        return text.decode("ascii", "replace")

    def _digest(self, key: str, text: bytes) -> str:
        import hashlib

        signed = hashlib.blake2b(key=self._secret, digest_size=_DIGEST_HEX // 2)
        signed.update(key.encode() + b"\0" + text)
        return signed.hexdigest()

    def _call(self, method: str, *args: Any) -> Any:
        self.operations += 1
        return _guarded(getattr(self._client, method), *args)


def connect(
    host: str,
    port: int,
    prefix: str,
    secret: bytes | None,
    timeout_s: float,
    patience_s: float = CALL_TIMEOUT_S,
) -> JobStore:
    """Connect to the keys behind `prefix` in a store that listens.

    `secret` is the key of the digests; None takes the one that the host leaves in the store within
    `timeout_s`. The store may take `patience_s` for its first answer. Raises StoreLostError:
    nothing that is a store answers; NoJobError: it holds no such job.
    """
    client = _connect_client(host, port, patience_s)
    if secret is None:
        try:
            secret = _left_secret(client, prefix, timeout_s)
        except BaseException:
            client.close()
            raise
    return JobStore(client, prefix, secret)


def _left_secret(client: StoreClient, prefix: str, timeout_s: float) -> bytes:
    name = prefix + _SECRET
    try:
        client.wait([name], timedelta(seconds=timeout_s))
        left = client.get(name)
    except WaitExpiredError:
        raise NoJobError(client, prefix, timeout_s) from None
    except OSError as error:
        raise StoreLostError(_first_line(error)) from None
    return _parse_secret(name, left)


def another_client(client: Any) -> Any:
    """Return a connection of its own to the store of `client`. Raises StoreLostError."""
    if hasattr(client, "port"):
        return _connect_client(client.host, client.port)
    # A PrefixStore: only torch knows its prefix, and clones it from 2.7 on.
    if not hasattr(client, "clone"):
        raise StoreLostError("this torch cannot clone a PrefixStore: give the TCPStore itself")
    cloned = _guarded(client.clone)
    cloned.set_timeout(timedelta(seconds=CALL_TIMEOUT_S))
    return cloned


def agree_on_secret(client: Any, prefix: str) -> bytes:
    """Leave a key for digests in a store unless one is there, and return the one that is.

    It keeps other jobs' values apart and guards against nobody who reads the store. Raises
    StoreLostError: the store is gone, or something else stands there.
    """
    import secrets

    name, wanted = prefix + _SECRET, secrets.token_bytes(32).hex()
    return _parse_secret(name, _guarded(client.compare_set, name, "", wanted))


def _parse_secret(name: str, text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        raise StoreLostError(f"{name}: what stands there is no key of a job") from None


def serve(listener: socket.socket, host: str, nodes: int) -> Any:
    """Serve a store on `listener`, which it owns from here on, while the returned object lives.

    Raises StoreLostError: torch cannot serve it.
    """
    store, version = load_torch()
    _allow_open_files(_FILES_PER_NODE * nodes + _FILES_BESIDES)
    port = listener.getsockname()[1]
    timeout, options = timedelta(seconds=CALL_TIMEOUT_S), serving_options(listener, version)
    return _guarded(store, host, port, wait_for_workers=False, timeout=timeout, **options)


def _allow_open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as error:
        logger.warning(
            "the limit of open files stays at %d, for %d wanted: %s", soft, wanted, error
        )


def _connect_client(host: str, port: int, patience_s: float = CALL_TIMEOUT_S) -> StoreClient:
    client = StoreClient(
        host,
        port,
        timedelta(seconds=patience_s),
        refused_limit_s=0.0,
        answer_timeout_s=patience_s,
        max_answer_bytes=_MAX_ANSWER_BYTES,
    )
    client.set_timeout(timedelta(seconds=CALL_TIMEOUT_S))
    # A store that is stopped for less than the lease may answer late; the kernel ends dead links.
    client.answer_timeout_s = None
    return client


def load_torch() -> tuple[Any, str]:
    """Load torch, which takes seconds, with its C++ log silent; return TCPStore and version."""
    level = os.environ.get(_TORCH_LOG_LEVEL)
    if level is None:
        os.environ[_TORCH_LOG_LEVEL] = "FATAL"
    try:
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
    finally:
        if level is None:
            del os.environ[_TORCH_LOG_LEVEL]
    return TCPStore, torch.__version__


def _guarded(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return function(*args, **options)
    except (RuntimeError, ValueError, OSError) as error:
        # torch: DistNetworkError, DistStoreError and others, all of them RuntimeError.
        raise StoreLostError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
