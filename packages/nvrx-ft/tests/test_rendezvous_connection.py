# SPDX-License-Identifier: Apache-2.0
"""Connecting to a store that dies meanwhile; torch, which then goes on trying, is played here."""

import contextlib
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nvidia_resiliency_ext.fault_tolerance._rendezvous import store
from nvidia_resiliency_ext.fault_tolerance._rendezvous.connection import NoAnswerError, open_client
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import JobStore, StoreLostError
from nvidia_resiliency_ext.shared_utils import store_sockets

SOON_S = 10.0
PATIENCE_S = 60.0


class Client:
    """A client of torch."""

    def __init__(self, port: int, sock: socket.socket | None = None) -> None:
        self.host, self.port = "127.0.0.1", port
        self._sock = sock

    def set_timeout(self, timeout: object) -> None:
        """Take any timeout."""

    def add(self, *_: object) -> int:
        """Fail as for a connection that the store has closed."""
        raise RuntimeError("Connection reset by peer")

    def __del__(self) -> None:
        if self._sock is not None:
            self._sock.close()


class Torch:
    """What makes clients: it tries until it is let go, whatever happens to the store."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._sock: socket.socket | None = None
        self.is_let_go, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.made: list[weakref.ref[Client]] = []

    def make(self, *_: object, **__: object) -> Client:
        """Connect, but not before it is let go."""
        assert self.is_let_go.wait(PATIENCE_S)
        self.connect_again()
        assert self.may_end.wait(PATIENCE_S)
        client, self._sock = Client(self._port, self._sock), None
        self.made.append(weakref.ref(client))
        return client

    def connect_again(self) -> None:
        """Begin a connection, in place of one that was cut."""
        if self._sock is not None:
            self._sock.close()
        self._sock = socket.create_connection(("127.0.0.1", self._port))

    def end(self) -> None:
        """Let all go."""
        self.is_let_go.set()
        self.may_end.set()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A store of which nobody knows yet whether it lives."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def torch(listener: socket.socket) -> Iterator[Torch]:
    """Give torch, and let it go in the end."""
    made = Torch(listener.getsockname()[1])
    yield made
    made.end()
    for attempt in store_sockets.given_up:
        attempt.join(SOON_S)
    store_sockets.given_up.clear()


@contextlib.contextmanager
def dying(listener: socket.socket) -> Iterator[None]:
    """Let a store die once somebody has connected, before it takes the connection."""

    def die() -> None:
        select.select([listener], [], [], SOON_S)
        listener.close()

    thread = threading.Thread(target=die)
    thread.start()
    try:
        yield
    finally:
        thread.join(SOON_S)


def fails_soon(
    call: Callable[[], Any], error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    """Check that a call fails long before torch's patience ends."""
    began = time.monotonic()
    with pytest.raises(error):
        call()
    assert time.monotonic() - began < SOON_S / 2


def test_connecting_ends_when_the_store_dies(listener: socket.socket, torch: Torch) -> None:
    """Whoever connects to a store that is just dying learns it then, not when torch gives up."""
    address = listener.getsockname()
    with dying(listener):
        fails_soon(lambda: open_client(torch.make, address, PATIENCE_S), (NoAnswerError, OSError))


def test_a_counter_is_not_mended_in_a_store_that_dies(
    listener: socket.socket, torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that hung up on a counter because it was killed is lost at once.

    Else a launcher stands still for as long as torch tries, and its lease expires meanwhile.
    """
    monkeypatch.setattr(store, "_store_class", lambda: (torch.make, "2.13"))
    one = JobStore(Client(listener.getsockname()[1]), "job:", b"secret")
    with dying(listener):
        fails_soon(lambda: one.count("lease", 1), StoreLostError)


def test_what_is_connected_too_late_is_let_go(listener: socket.socket, torch: Torch) -> None:
    """A client that nobody waits for any more is closed when torch has made it."""
    with pytest.raises(NoAnswerError):
        open_client(torch.make, listener.getsockname(), 0.01)
    (attempt,) = store_sockets.given_up
    torch.is_let_go.set()
    attempt.join(SOON_S)
    assert [made() for made in torch.made] == [None]


def test_a_late_connection_is_not_taken_for_the_new_one(
    listener: socket.socket, torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket of a new client is found although one that was given up connects just then."""
    address = listener.getsockname()
    torch.is_let_go.set()
    torch.may_end.clear()
    with pytest.raises(NoAnswerError):
        open_client(torch.make, address, 0.01)
    (attempt,) = store_sockets.given_up
    end = attempt.join

    def join(timeout: float | None = None) -> None:
        torch.may_end.set()
        end(timeout)

    monkeypatch.setattr(attempt, "join", join)
    made: list[socket.socket] = []

    def make() -> Client:
        torch.connect_again()
        made.append(socket.create_connection(address))
        return Client(address[1], made[0].dup())

    client, link = open_client(make, address, SOON_S)
    with made[0] as sock, socket.socket(fileno=link._descriptor) as found:
        link._descriptor = -1
        assert found.getsockname() == sock.getsockname()
    del client


def test_where_nobody_listens_torch_is_not_asked(torch: Torch) -> None:
    """A machine that refuses is heard; torch would try again and again."""
    with socket.socket() as silent:
        # Nobody else is given the port.
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            open_client(torch.make, silent.getsockname(), PATIENCE_S)
    assert not store_sockets.given_up
