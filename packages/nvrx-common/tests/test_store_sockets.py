# SPDX-License-Identifier: Apache-2.0
"""The sockets under stores: who listens, which are connected to a port, what torch is given."""

import os
import shutil
import socket
import struct
import subprocess
import sys

import ports
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


@pytest.mark.parametrize("version", ["2.8.0", "2.13.0+cpu", "3.0a0"])
def test_a_store_gets_the_socket(listener, version) -> None:
    """The very socket that listens is handed over."""
    given = listener.dup()
    options = store_sockets.serving_options(given, version)
    assert given.fileno() == -1
    with socket.socket(fileno=options.pop("master_listen_fd")) as taken:
        assert taken.getsockname() == listener.getsockname()
    assert options == {"is_master": True}


@pytest.mark.parametrize("version", ["2.4.0+cu121", "2.7.1"])
def test_an_old_torch_listens_itself(version) -> None:
    """Where torch's server takes no socket, the port is free for it."""
    with ports.claimed() as port:
        address = ("127.0.0.1", port)
        given = store_sockets.listen_at(socket.AF_INET, address)
        assert store_sockets.serving_options(given, version) == {"is_master": True}
        store_sockets.listen_at(socket.AF_INET, address).close()


def test_an_old_torch_has_another_server_that_takes_the_socket(listener) -> None:
    """Without libuv it serves at the very socket, and no client that goes silent stalls it long."""
    options = store_sockets.serving_options(listener.dup(), "2.4.0+cu121", without_libuv=True)
    with socket.socket(fileno=options.pop("master_listen_fd")) as taken:
        assert taken.getsockname() == listener.getsockname()
        with socket.create_connection(taken.getsockname()), taken.accept()[0] as served:
            for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                limit_s, _ = struct.unpack("ll", served.getsockopt(socket.SOL_SOCKET, limit, 16))
                assert 0 < limit_s < 10
    assert options == {"is_master": True, "use_libuv": False}


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


def test_a_client_that_is_not_answered_is_given_up(listener) -> None:
    """After its time its connection is ended, and the thread that made it comes back."""
    address = listener.getsockname()
    with socket.create_connection(address) as other, listener.accept()[0]:

        def connect() -> None:
            with socket.create_connection(address) as client:
                client.recv(1)

        with pytest.raises(store_sockets.NoAnswerError, match=f"port {address[1]} does not answer"):
            store_sockets.open_client(connect, address[1], 0.2)
        store_sockets.given_up.pop().join(60.0)
        # One that was there before is left alone.
        (found,) = store_sockets.connected_sockets(address[1])
        with found:
            assert found.getsockname() == other.getsockname()
        assert other.send(b"1") == 1


def test_a_number_that_is_taken_over_by_a_pipe_leaves_nothing_open(monkeypatch) -> None:
    """A socket that is closed while it is looked at, and becomes a pipe, is let go."""
    reading, writing = os.pipe()
    dup = os.dup
    taken = socket.socket()

    def dup_too_late(descriptor: int) -> int:
        os.dup2(writing, descriptor, inheritable=False)
        return dup(descriptor)

    with taken, monkeypatch.context() as late:
        late.setattr(os, "dup", dup_too_late)
        assert store_sockets.tcp_socket(taken.fileno()) is None
    os.close(writing)
    os.set_blocking(reading, False)
    assert os.read(reading, 1) == b"", "somebody holds the pipe open"
    os.close(reading)


def test_a_connection_is_watched_over(listener) -> None:
    """The kernel asks an idle peer for a sign of life, also of one that was accepted."""
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0] as served:
        store_sockets.watch_over(client)
        for sock in (client, served):
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        limit_ms = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert limit_ms == store_sockets.SILENT_S * 1000


REACHES_NOBODY = """
import socket
from nvidia_resiliency_ext.shared_utils import store_sockets
address = ("127.0.0.1", 40000)
try:
    store_sockets.reach(address, 5.0)
except ConnectionRefusedError:
    with store_sockets.listen_at(socket.AF_INET, address):
        store_sockets.reach(address, 5.0).close()
        print("refused, then reached")
"""


@pytest.mark.netns
def test_nobody_reaches_itself() -> None:
    """A client that is given the store's own port has reached nobody, and leaves the port free."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip")
    # A host of its own that has two ports for clients, and takes the even one first.
    prepare = "ip link set lo up && echo 40000 40001 > /proc/sys/net/ipv4/ip_local_port_range"
    inside = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
    if subprocess.run([*inside, prepare], capture_output=True, check=False, timeout=150).returncode:
        pytest.skip("no network namespace can be made here")
    done = subprocess.run(
        [*inside, f'{prepare} && exec "$0" -c "$1"', sys.executable, REACHES_NOBODY],
        capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert done.stdout == "refused, then reached\n", done.stderr
