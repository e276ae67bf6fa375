# SPDX-License-Identifier: Apache-2.0
"""The sockets under stores: who listens, which are connected to a port, what torch is given."""

import socket

import pytest

from nvidia_resiliency_ext.shared_utils import store_sockets


@pytest.fixture
def listener():
    """Listen on a free port."""
    with store_sockets.listen_at(socket.AF_INET, ("127.0.0.1", 0)) as sock:
        yield sock


def test_a_taken_address_is_an_error(listener) -> None:
    """Two cannot listen at one port, and the second leaves no socket."""
    with pytest.raises(OSError, match="in use"):
        store_sockets.listen_at(socket.AF_INET, listener.getsockname())


@pytest.mark.parametrize(
    ("version", "is_older_server"),
    [("2.4.0+cu121", True), ("2.5.0", False), ("2.13.0+cpu", False), ("3.0a0", False)],
)
def test_an_old_torch_serves_with_its_older_server(listener, version, is_older_server) -> None:
    """Only a torch whose newer server takes no socket is told not to use it."""
    options = store_sockets.serving_options(listener.dup(), version)
    socket.socket(fileno=options.pop("master_listen_fd")).close()
    assert options == {"is_master": True, **({"use_libuv": False} if is_older_server else {})}


def test_connections_to_a_port_are_found(listener) -> None:
    """Of all sockets of this process, those connected to a port are told from the others."""
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0]:
        named = list(store_sockets.tcp_sockets())
        assert len({name for name, _ in named}) == len(named)
        found = [sock for _, sock in named]
        wanted = [sock for sock in found if store_sockets.is_connected_to(sock, port)]
        assert [sock.getsockname() for sock in wanted] == [client.getsockname()]
        for sock in found:
            sock.close()


def test_a_connection_is_watched_over(listener) -> None:
    """The kernel asks an idle peer for a sign of life, also of one that was accepted."""
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0] as served:
        store_sockets.watch_over(client)
        for sock in (client, served):
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        limit_ms = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert limit_ms == store_sockets.SILENT_S * 1000
