# SPDX-License-Identifier: Apache-2.0
"""Requests that steer a job, through the TCPStore in which its ranks have met.

A store asks nobody who they are, so requests and answers are signed with a token that rank 0 and
the operator read from a file. A request also repeats the challenge that rank 0 has put in the store
and changes after each request, so that none can be sent twice.

Each detector of a job has keys of its own, under the first rank of its process group.
"""

from __future__ import annotations

import datetime as dt
import hmac
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from nvidia_resiliency_ext.attribution.straggler._errors import ControlError
from nvidia_resiliency_ext.shared_utils.abandonable import DeadlineCaller, ParkedAtExit, StuckError
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.credentials import TokenFile
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.store_sockets import open_client, reach

from .control import MESSAGES, Change, Handler, Refused, Status, StatusRequest, status_of

TOKEN_FILE_VARIABLE = "NVRX_STRAGGLER_TOKEN_FILE"  # noqa: S105 - a name
"""Names the file with the token, for rank 0 and for `nvrx-straggler --store`."""

_CHALLENGE = "challenge"
_REQUEST = "request"
_ANSWER = "answer/"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_HEAD_BYTES = _PROOF_BYTES + 2 * _NONCE_BYTES
_MAX_BYTES = 1 << 20
_CONNECT_TIMEOUT_S = 60.0
_STORE_TIMEOUT = dt.timedelta(seconds=10)
_POLL_S = 0.02
_LONG_WAIT = dt.timedelta(hours=1)
_CLOSE_TIMEOUT_S = 5.0

logger = logging.getLogger("nvrx")


class StoreControlServer:
    """Waits for requests in the job's store; answers in a thread of its own, one at a time.

    The store wakes the thread when a request is there. A store that is gone ends it.

    Args:
        host: Where the store listens.
        port: Its port.
        token: The token that requests are signed with.
        answer: Answers each request, in the server's thread.
        first_rank: The job's number of the rank that this is: the first of the detector's group.
    """

    def __init__(
        self, host: str, port: int, token: TokenFile, answer: Handler, first_rank: int
    ) -> None:
        self._address = (host, port, first_rank)
        self._token = token
        self._answer = answer
        self._pid = os.getpid()
        self._is_closed = threading.Event()
        self._thread = ParkedAtExit("nvrx-straggler-store", self._serve)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        if os.getpid() != self._pid or not self._thread.is_alive():
            return
        try:
            # The client of the thread is busy with its wait, so this is another one.
            _connect(*self._address, _CLOSE_TIMEOUT_S).set(_REQUEST, b"")
        except (RuntimeError, OSError) as error:
            logger.debug("straggler control: the store is gone: %s", error)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        try:
            store = _connect(*self._address, _CONNECT_TIMEOUT_S)
            store.delete_key(_REQUEST)
            while not self._is_closed.is_set():
                challenge = os.urandom(_NONCE_BYTES)
                store.set(_CHALLENGE, challenge)
                if self._waited(store):
                    data = store.get(_REQUEST)
                    store.delete_key(_REQUEST)
                    self._take(store, data, challenge)
            store.delete_key(_CHALLENGE)  # a command then knows that nobody answers
        except (RuntimeError, OSError) as error:
            if not self._is_closed.is_set():
                logger.warning("straggler: no more control through the job's store: %s", error)

    def _waited(self, store: Any) -> bool:
        """Wait for a request; False after an hour without one, and when the server is closed."""
        import torch.distributed as dist

        try:
            store.wait([_REQUEST], _LONG_WAIT)
        except dist.DistStoreError:
            return False
        return not self._is_closed.is_set()

    def _take(self, store: Any, data: bytes, challenge: bytes) -> None:
        nonce = data[_PROOF_BYTES + _NONCE_BYTES : _HEAD_BYTES]
        if len(nonce) != _NONCE_BYTES or len(data) > _MAX_BYTES:
            logger.warning("straggler control: %d bytes in the store are no request", len(data))
            return
        try:
            payload = _open(self._token.token(), b"request", data)
            if data[_PROOF_BYTES : _PROOF_BYTES + _NONCE_BYTES] != challenge:
                # It was sent twice, or another one came first: a command asks again by itself.
                logger.debug("straggler control: a request has an old challenge")
                return
            reply = self._answer(MESSAGES.decode(payload))
        except NvrxError as error:
            logger.warning("straggler control: a request in the store was refused: %s", error)
            reply = Refused(str(error))
        sealed = _seal(self._token.token(), b"answer", challenge, nonce, reply)
        store.set(f"{_ANSWER}{nonce.hex()}", sealed)


def ask_through_store(
    host: str,
    port: int,
    token_file: str,
    request: StatusRequest | Change,
    timeout_s: float,
    first_rank: int,
) -> Status:
    """Send a request to a detector of a job through the job's store and return its answer.

    Args:
        host: The job's `MASTER_ADDR`.
        port: Its `MASTER_PORT`.
        token_file: The file that the job's `NVRX_STRAGGLER_TOKEN_FILE` names, or a copy.
        request: What to ask.
        timeout_s: How long the store, and then the detector, may take.
        first_rank: The first rank of the detector's process group.

    Raises:
        ConfigError: The token file cannot be used.
        ControlError: The job cannot be reached, refuses, or has another token.
    """
    token = TokenFile(token_file, "--token-file").token()
    store = _reach_store(host, port, timeout_s, first_rank)
    place = f"the job's store at {host}:{port}"
    try:
        # A store whose process stands still would be waited for without an end.
        answer = DeadlineCaller().run(
            "store-request",
            lambda: _exchange(store, token, request, timeout_s, first_rank),
            timeout_s + 1,
        )
    except StuckError as error:
        raise ControlError(f"{place} does not answer within {timeout_s:g} s") from error
    except NvrxError as error:
        raise ControlError(f"{place}: {error}") from error
    except RuntimeError as error:  # which errors of a store are
        raise ControlError(f"{place} has ended the connection: is the job over?") from error
    return status_of(answer, place)


def _reach_store(host: str, port: int, timeout_s: float, first_rank: int) -> Any:
    """Connect to a store, in bounded time, and return the keys of one detector in it.

    Raises:
        ControlError: Nothing listens there, or it is no store.
    """
    place = f"{host}:{port}"
    deadline = Deadline.after(timeout_s)
    try:
        # Names are looked up without a limit of their own.
        DeadlineCaller().run("reach", lambda: reach((host, port), timeout_s).close(), timeout_s + 1)
    except (OSError, StuckError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ControlError(
            f"no store can be reached at {place} ({reason}): give MASTER_ADDR and MASTER_PORT of"
            " the job's ranks"
        ) from error
    left_s = deadline.remaining()
    import torch.distributed  # noqa: F401 - takes seconds, which do not count

    try:
        return _connect(host, port, first_rank, left_s)
    except (RuntimeError, OSError) as error:
        raise ControlError(
            f"what listens at {place} does not answer as a job's store within {timeout_s:g} s: give"
            " MASTER_ADDR and MASTER_PORT of the job's ranks, or a longer --timeout"
        ) from error


def _exchange(
    store: Any, token: str, request: StatusRequest | Change, timeout_s: float, first_rank: int
) -> object:
    """Send a request until it is answered, and return the answer, verified.

    The store keeps one request. One that another command's has replaced or preceded has no answer
    when the challenge changes, and is sent again.
    """
    deadline = Deadline.after(timeout_s)
    hint = (
        f"no straggler detector takes requests; is {TOKEN_FILE_VARIABLE} set for rank {first_rank}?"
        " One with a process group of its own is named by --first-rank, the group's first rank"
    )
    _poll(lambda: store.check([_CHALLENGE]), deadline, hint)
    busy = (
        f"rank {first_rank} has not answered within {timeout_s:g} s; a busy one may need a longer"
        " --timeout"
    )
    while True:
        challenge, nonce = store.get(_CHALLENGE), os.urandom(_NONCE_BYTES)
        key = f"{_ANSWER}{nonce.hex()}"
        store.set(_REQUEST, _seal(token, b"request", challenge, nonce, request))

        def is_taken(key: str = key, challenge: bytes = challenge) -> bool:
            return bool(store.check([key]) or store.get(_CHALLENGE) != challenge)

        _poll(is_taken, deadline, busy)
        if not store.check([key]):  # an answer comes before the next challenge
            continue
        data = store.get(key)
        store.delete_key(key)
        payload = _open(token, b"answer", data)
        if data[_PROOF_BYTES + _NONCE_BYTES : _HEAD_BYTES] != nonce:
            raise ControlError("an answer to another request came")
        return MESSAGES.decode(payload)


def _poll(is_so: Callable[[], bool], deadline: Deadline, failure: str) -> None:
    """Wait for a condition; waits of torch's own print C++ messages when they end in vain.

    Raises:
        ControlError: It does not come true in time.
    """
    while not is_so():
        if deadline.expired():
            raise ControlError(failure)
        time.sleep(_POLL_S)


def _connect(host: str, port: int, first_rank: int, timeout_s: float) -> Any:
    """Return the keys of one detector in a store."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    def make() -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT
        )

    client = open_client(make, port, timeout_s)
    return PrefixStore(f"nvrx-straggler/control/{first_rank}", client)


def _seal(token: str, kind: bytes, challenge: bytes, nonce: bytes, message: object) -> bytes:
    """Return a signed message: proof, challenge, nonce, payload."""
    body = challenge + nonce + MESSAGES.encode_payload(message)
    return _proof(token, kind, body) + body


def _open(token: str, kind: bytes, data: bytes) -> bytes:
    """Return the payload of a signed message.

    Raises:
        ControlError: It is not signed with this token.
    """
    if not hmac.compare_digest(data[:_PROOF_BYTES], _proof(token, kind, data[_PROOF_BYTES:])):
        raise ControlError("a message is not signed with this token; use the job's token file")
    return data[_HEAD_BYTES:]


def _proof(token: str, kind: bytes, body: bytes) -> bytes:
    return hmac.digest(token.encode(), kind + b"\0" + body, "sha256")
