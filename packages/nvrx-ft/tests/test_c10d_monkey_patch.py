# SPDX-License-Identifier: Apache-2.0
"""Torch's own rendezvous store with our settings, over real sockets."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousParameters

from nvidia_resiliency_ext.fault_tolerance import c10d_monkey_patch
from nvidia_resiliency_ext.fault_tolerance._workers.command import PortReservation
from nvidia_resiliency_ext.fault_tolerance.c10d_monkey_patch import (
    _wait_for_tcp_store_server,
    apply_c10d_patch,
)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that the function that torch has now stands there again afterwards.
    original = c10d_rendezvous_backend._create_tcp_store
    monkeypatch.setattr(c10d_rendezvous_backend, "_create_tcp_store", original)
    apply_c10d_patch()


@pytest.fixture
def free_port() -> Iterator[int]:
    reserved = PortReservation()
    yield reserved.port
    reserved.release()


def parameters(port: int, **conf: Any) -> RendezvousParameters:
    return RendezvousParameters("c10d", f"127.0.0.1:{port}", "job", 1, 1, **conf)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(("conf", "libuv"), [({}, True), ({"use_libuv": "false"}, False)])
def test_the_server_is_the_one_that_is_asked_for(
    free_port: int, conf: dict[str, str], libuv: bool
) -> None:
    """`use_libuv` decides which server torch's backend starts; the default is libuv."""
    backend, store = c10d_rendezvous_backend.create_backend(parameters(free_port, **conf))
    assert backend.name == "c10d"
    assert store.libuvBackend is libuv


@pytest.mark.usefixtures("patched")
def test_a_port_that_is_served_is_joined(free_port: int) -> None:
    """Without `is_host` a machine that cannot bind the port joins as a client."""
    server = TCPStore("127.0.0.1", free_port, is_master=True, wait_for_workers=False)
    server.set("who", "first")
    _, store = c10d_rendezvous_backend.create_backend(parameters(free_port))
    assert store.get("who") == b"first"


@pytest.mark.usefixtures("patched")
def test_who_must_serve_and_cannot_says_so() -> None:
    """With `is_host` true a taken port is an error and no silent client."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        conf = parameters(taken.getsockname()[1], is_host=True)
        with pytest.raises(RendezvousConnectionError, match="cannot be served"):
            c10d_rendezvous_backend.create_backend(conf)


@pytest.mark.usefixtures("patched")
def test_a_store_that_stays_away_is_an_error_in_time(free_port: int) -> None:
    """`store_connect_wait_seconds` bounds the wait for a store that another machine serves."""
    conf = parameters(free_port, is_host="0", store_connect_wait_seconds="0.2")
    began = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match="cannot be reached"):
        c10d_rendezvous_backend.create_backend(conf)
    assert time.monotonic() - began < 10


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("value", [0, -1])
def test_a_read_timeout_must_be_positive(free_port: int, value: int) -> None:
    """A read timeout of nothing is refused, by name."""
    with pytest.raises(ValueError, match="read_timeout"):
        c10d_rendezvous_backend.create_backend(parameters(free_port, read_timeout=value))


def test_the_patch_may_be_applied_twice(patched: None) -> None:
    """A second call changes nothing."""
    apply_c10d_patch()
    assert c10d_rendezvous_backend._create_tcp_store is c10d_monkey_patch.create_tcp_store


def test_a_store_that_comes_up_late_is_used_soon(free_port: int) -> None:
    """Attempts begin 50 ms apart: who starts listening after 0.3 s is found long before 60 s."""
    listening: list[tuple[float, socket.socket]] = []

    def listen() -> None:
        listening.append((time.monotonic(), socket.create_server(("127.0.0.1", free_port))))

    timer = threading.Timer(0.3, listen)
    timer.start()
    try:
        _wait_for_tcp_store_server("127.0.0.1", free_port, 90, probe_interval_seconds=60)
        found = time.monotonic()
    finally:
        timer.join()
        since, server = listening[0]
        server.close()
    assert found - since < 20


def test_nobody_there_is_a_timeout(free_port: int) -> None:
    """When the time is over it is a TimeoutError that names the address."""
    with pytest.raises(TimeoutError, match=f"127.0.0.1:{free_port}"):
        _wait_for_tcp_store_server("127.0.0.1", free_port, 0.2)
