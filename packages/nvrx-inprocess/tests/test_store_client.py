# SPDX-License-Identifier: Apache-2.0
"""The client of TCPStore without torch sends and receives what torch's own does."""

import contextlib
import errno
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from protocol_schedules import RealRun

from nvidia_resiliency_ext.inprocess._monitor.store_threads import connect_store
from nvidia_resiliency_ext.inprocess._protocol.iteration_store import IterationStore
from nvidia_resiliency_ext.inprocess._store.access import StoreAccess
from nvidia_resiliency_ext.inprocess._store.endpoint import ForeignValueError
from nvidia_resiliency_ext.shared_utils.store_client import (
    StoreClient,
    StoreLostError,
    StrangeStoreError,
    WaitExpiredError,
)

LONG = timedelta(seconds=20)
# The handshake ends with two texts of 32 bytes after their lengths; the answer is one of them.
HANDSHAKE_BYTES = 5 + 1 + (8 + 48) + 2 * (8 + 32)
HANDSHAKE_ANSWER_BYTES = 8 + 32


@pytest.fixture(params=[True, False], ids=["libuv", "no libuv"])
def server(request: pytest.FixtureRequest) -> Any:
    """Host a store with each of torch's servers."""
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=request.param
    )


@pytest.fixture
def client(server: Any) -> Iterator[StoreClient]:
    """Connect to it without torch."""
    made = StoreClient("127.0.0.1", server.port, LONG)
    yield made
    made.close()


def test_it_says_what_torch_says(server: Any, client: StoreClient) -> None:
    """What one of both writes the other one reads, for every operation."""
    client.set("a", "1")
    assert client.get("a") == server.get("a") == b"1"
    server.append("a", "2")
    assert server.get("a") == b"12"  # until now it may be on its way
    client.append("a", "3" * 100_000)
    assert client.get("a") == server.get("a") == b"12" + b"3" * 100_000
    assert client.add("n", 5) == 5
    assert server.add("n", 2) == 7
    assert client.add("n", -9) == -2
    assert client.check(["a", "n"]) is True
    assert client.check(["a", "missing"]) is False
    assert client.compare_set("c", "x", "y") == server.compare_set("c", "x", "y") == b"x"
    assert client.compare_set("c", "", "y") == b"y"
    assert client.compare_set("c", "y", "z") == server.get("c") == b"z"
    assert client.multi_get(["a", "n", "c"]) == server.multi_get(["a", "n", "c"])
    assert client.delete_key("c") is True
    assert client.delete_key("c") is False
    assert not server.check(["c"])


def test_a_wait_ends_and_leaves_the_connection_in_step(client: StoreClient) -> None:
    """After waits that end just when the key comes, each answer is still that of its question."""
    other = client.clone()
    for number in range(100):
        key = f"late{number}"
        setter = threading.Timer(0.002, other.set, (key, "1"))
        setter.start()
        with contextlib.suppress(WaitExpiredError):
            client.wait([key], timedelta(seconds=0.0015 + 0.00001 * number))
        setter.join()
        assert client.add("count", 1) == number + 1
        assert client.get(key) == b"1"
    began = time.monotonic()
    with pytest.raises(WaitExpiredError):
        client.wait(["missing"], timedelta(seconds=0.05))
    assert 0.04 < time.monotonic() - began < 60
    other.close()


class BrokenSocket:
    """A connection on which nothing can be received any more, for some reason."""

    def __init__(self, sock: socket.socket, reason: BaseException) -> None:
        self._sock = sock
        self._reason = reason

    def recv(self, *_: int) -> bytes:
        raise self._reason

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


QUESTIONS = {
    "question": lambda client: client.check(["missing"]),
    "wait": lambda client: client.wait(["missing"], timedelta(seconds=0.01)),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_what_the_kernel_ends_is_no_wait_in_vain(client: StoreClient, ask: Any) -> None:
    """Its error has the type of a timeout; also where answers have no limit the connection ends."""
    client.answer_timeout_s = None
    dead = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    client._sock = BrokenSocket(client._sock, dead)  # type: ignore[assignment]
    with pytest.raises(ConnectionError, match="dead"):
        ask(client)


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_an_answer_that_was_not_taken_answers_nothing_else(client: StoreClient, ask: Any) -> None:
    """After an interruption in the middle of a question the connection says nothing more."""
    whole = client._sock
    client._sock = BrokenSocket(whole, KeyboardInterrupt())  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        ask(client)
    client._sock = whole
    with pytest.raises(OSError, match=r"pipe|reset"):
        client.add("count", 1)


def test_access_is_the_same(server: Any, client: StoreClient) -> None:
    """A wait in vain is no value, and a counter that is none is named with what stands there."""
    access = StoreAccess(client)  # type: ignore[arg-type]
    assert access.get("missing", 0.02) is None
    assert access.get_all(["missing"], 0.02) == [None]
    assert access.peek("missing") is None
    server.set("count", "no number")
    assert server.get("count") == b"no number"  # until now it may be on its way
    with pytest.raises(ForeignValueError, match="no number"):
        access.add("count", 1)
    assert access.add("other", 1) == 1


@pytest.mark.parametrize("first", [0, 10])
def test_schedules(first: int) -> None:
    """In threads over it, with faults at any operation, all see one outcome and one decision."""
    wrong = []
    for seed in range(first, first + 10):
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        run = RealRun(seed, lambda port=host.port: connect_store("127.0.0.1", port))
        try:
            run.run(timeout_s=120.0)
        except Exception as error:  # noqa: BLE001 - the report of a schedule
            wrong.append((seed, repr(error)))
            break
    assert not wrong


class FakeServer:
    """Listens, and answers each connection with a function."""

    def __init__(self, answer: Any) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._answer = answer
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(0.5)
                    self._answer(connection)

    def __enter__(self) -> "FakeServer":  # noqa: PYI034  # Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def handshake(connection: socket.socket) -> None:
    """Answer the handshake as a store does, in two pieces."""
    data = b""
    while len(data) < HANDSHAKE_BYTES:
        part = connection.recv(HANDSHAKE_BYTES - len(data))
        if not part:
            raise ConnectionError
        data += part
    answer = data[-HANDSHAKE_ANSWER_BYTES:]
    connection.sendall(answer[:8])
    connection.sendall(answer[8:])


def hold(connection: socket.socket) -> None:
    """Say nothing, until the peer has gone."""
    while connection.recv(4096):
        pass


FAKE_SERVERS = {
    "something else": lambda connection: connection.sendall(b"HTTP"),
    "hangs up": lambda connection: connection.recv(1),
}


@pytest.mark.parametrize("answer", FAKE_SERVERS.values(), ids=FAKE_SERVERS)
def test_what_is_no_store_is_an_error_of_its_own(answer: Any) -> None:
    """A program that says something else, or hangs up, is no TCPStore."""
    with FakeServer(answer) as server, pytest.raises(StrangeStoreError):
        StoreClient("127.0.0.1", server.port, LONG)


def test_a_silent_server_is_a_lost_store() -> None:
    """A store that is stopped looks like that: it is lost, and torch would wait as well."""
    with FakeServer(hold) as server, pytest.raises(StoreLostError, match=r"nothing for 0.2 s") as e:
        StoreClient("127.0.0.1", server.port, LONG, answer_timeout_s=0.2)
    assert not isinstance(e.value, StrangeStoreError)


def test_who_answers_drop_by_drop_is_given_up() -> None:
    """The handshake as a whole has a limit, and not each byte of it."""

    def drip(connection: socket.socket) -> None:
        answer = connection.recv(4096)[-HANDSHAKE_ANSWER_BYTES:]
        for byte in answer:
            connection.sendall(bytes((byte,)))
            pause.wait(0.1)

    pause = threading.Event()
    with FakeServer(drip) as server, pytest.raises(StoreLostError, match=r"nothing for 0\.[45] s"):
        StoreClient("127.0.0.1", server.port, timedelta(seconds=0.5))


def test_nobody_there() -> None:
    """Where nobody listens there is no store, after a while."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(StoreLostError, match="no store answers at 127"):
            StoreClient("127.0.0.1", unused.getsockname()[1], LONG, refused_limit_s=0.1)


@pytest.mark.parametrize("seed", range(30))
def test_any_answer_ends(seed: int) -> None:
    """Whatever bytes come back, every operation ends with a value or a typed error, in time."""
    chance = random.Random(seed)

    def babble(connection: socket.socket) -> None:
        handshake(connection)
        for _ in range(chance.randrange(4)):
            connection.recv(4096)
            connection.sendall(chance.randbytes(chance.randrange(1, 40)))

    with FakeServer(babble) as server:
        store = StoreClient("127.0.0.1", server.port, LONG)
        store.answer_timeout_s = 0.1
        iteration_store = IterationStore(store, "p/")  # type: ignore[arg-type]
        for operation in (
            iteration_store.nodes,
            lambda: iteration_store.outcome(0, 0.05),
            lambda: iteration_store.renew_lease(0),
            lambda: iteration_store.leases([0]),
        ):
            with contextlib.suppress(StoreLostError, ForeignValueError):
                operation()
        store.close()


def test_a_store_that_hangs_is_lost_in_time() -> None:
    """A server that is silent after the handshake is a lost store, for a wait and a question."""

    def fall_silent(connection: socket.socket) -> None:
        handshake(connection)
        hold(connection)

    with FakeServer(fall_silent) as server:
        for use in (lambda b: b.outcome(0, 0.1), lambda b: b.renew_lease(0)):
            store = StoreClient("127.0.0.1", server.port, LONG)
            iteration_store = IterationStore(store, "p/")  # type: ignore[arg-type]
            store.answer_timeout_s = 0.1
            with pytest.raises(StoreLostError, match="no answer within"):
                use(iteration_store)
            store.close()
