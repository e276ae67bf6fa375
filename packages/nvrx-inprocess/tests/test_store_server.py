# SPDX-License-Identifier: Apache-2.0
"""The process that hosts the store: its start, whose it is, and its end."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from nvidia_resiliency_ext.inprocess import _store_server as hosting
from nvidia_resiliency_ext.inprocess._store import endpoint
from nvidia_resiliency_ext.inprocess._store.endpoint import Endpoint
from nvidia_resiliency_ext.inprocess._store_server import (
    StoreInUseError,
    StoreServer,
    StoreServerStartError,
    host_store,
)
from nvidia_resiliency_ext.inprocess.store import TCPStore
from nvidia_resiliency_ext.shared_utils.children import PidHandle

SOON = timedelta(seconds=20)
END_S = 30.0
HERE = Endpoint("127.0.0.1", 0, is_served=False)

pytestmark = pytest.mark.slow


def start(endpoint: Endpoint = HERE, job: str = "job") -> StoreServer:
    return host_store(endpoint, job, TCPStore.connect, is_single_node=True)


@pytest.fixture(scope="module")
def store_server() -> Iterator[StoreServer]:
    """Yield one for all tests that leave it as it was: most of its start is torch's import."""
    started = start()
    yield started
    started.stop()


def test_a_store_server_serves_all_and_ends_on_sigterm() -> None:
    """Once it is started anybody can connect; on SIGTERM it ends with status 0."""
    store_server = start()
    assert store_server.process is not None
    first, second = (TCPStore.connect(store_server.endpoint, SOON) for _ in range(2))
    first.set("k", "v")
    assert second.get("k") == b"v"
    store_server.process.terminate()
    assert store_server.process.wait(END_S) == 0
    store_server.stop()


def test_a_store_server_is_nobodys_child_in_spirit(store_server: StoreServer) -> None:
    """It has a session of its own, no file of its starter's, and signals to a terminal miss it."""
    assert store_server.process is not None
    pid = store_server.process.pid
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/cwd").resolve() == Path("/")
    names = {os.readlink(f"/proc/{pid}/fd/{n}") for n in ("0", "1", "2")}
    assert names == {os.devnull}
    shared = _descriptors(pid).intersection(_descriptors(os.getpid()))
    assert not any(name.startswith(("pipe:", "socket:")) for name in shared)
    for sent in (signal.SIGHUP, signal.SIGINT):
        os.kill(pid, sent)
    TCPStore.connect(store_server.endpoint, SOON).set("k", "v")
    assert store_server.process.poll() is None


def _descriptors(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        # The listing's own descriptor is gone by now.
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def test_the_same_job_finds_its_store_server_again(store_server: StoreServer) -> None:
    """A second start for the same job joins what runs and cannot end it."""
    again = start(store_server.endpoint)
    assert again.process is None
    assert again.endpoint == store_server.endpoint
    again.stop()
    TCPStore.connect(store_server.endpoint, SOON).set("k", "v")


def test_another_job_is_turned_away(store_server: StoreServer) -> None:
    """The port belongs to one job: another one's error names port, job and what to do."""
    with pytest.raises(StoreInUseError, match=r"port \d+ is in use.*'job'.*'other'.*store_kwargs"):
        start(store_server.endpoint, job="other")


def test_a_port_of_something_else_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is no store at the port is named as such, in bounded time."""
    monkeypatch.setattr(hosting, "_PROBE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = Endpoint("127.0.0.1", other.getsockname()[1], is_served=False)
        with pytest.raises(StoreInUseError, match="no store of this job"):
            start(taken)


def test_a_port_that_a_connection_holds_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens, but the port is another program's, the error says what to do."""
    monkeypatch.setattr(hosting, "_PROBE_S", 0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as outgoing,
    ):
        taken = Endpoint("127.0.0.1", outgoing.getsockname()[1], is_served=False)
        with pytest.raises(StoreInUseError, match=r"port \d+ is taken.*EADDRINUSE.*another port"):
            start(taken)


def test_only_the_store_servers_main_thread_is_ended_by_a_signal(store_server: StoreServer) -> None:
    """A thread of torch that took it, as after SIGSTOP and SIGCONT, would wake nobody."""
    assert store_server.process is not None
    TCPStore.connect(store_server.endpoint, SOON)
    pid, blocked = store_server.process.pid, {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        (line,) = re.findall(r"^SigBlk:\s*(\w+)", (task / "status").read_text(), re.MULTILINE)
        blocked[int(task.name)] = bool(int(line, 16) & 1 << signal.SIGTERM - 1)
    assert len(blocked) > 1
    assert [thread for thread, is_blocked in blocked.items() if not is_blocked] == [pid]


def test_an_address_of_another_host_is_a_clear_error() -> None:
    """A store server is started where its address is; elsewhere the error quotes the system."""
    with pytest.raises(StoreServerStartError, match=r"192\.0\.2\.1:\d+.*[Aa]ssign"):
        start(Endpoint("192.0.2.1", 29999, is_served=False))


def test_a_store_server_listens_at_its_address_alone(store_server: StoreServer) -> None:
    """Other addresses of the host do not lead to the store."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store_server.endpoint.port), 5)


STARTER = """
import sys
from nvidia_resiliency_ext.inprocess._store.endpoint import Endpoint
from nvidia_resiliency_ext.inprocess._store_server import host_store
from nvidia_resiliency_ext.inprocess.store import TCPStore
here = Endpoint("127.0.0.1", 0, is_served=False)
store_server = host_store(here, "job", TCPStore.connect, is_single_node=True, idle_s=0.5)
print(store_server.process.pid, store_server.endpoint.port, flush=True)
sys.stdin.read()
"""


def test_a_store_server_outlives_its_starter_and_then_its_users() -> None:
    """SIGKILL of its starter's group leaves the store to those who use it; after them it ends."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert starter.stdout is not None
    pid, port = map(int, starter.stdout.readline().split())
    with PidHandle(pid) as store_server:
        # It stays with its starter, though nobody is connected.
        assert not store_server.wait(1.0)
        store = TCPStore.connect(Endpoint("127.0.0.1", port, is_served=True), SOON)
        os.killpg(starter.pid, signal.SIGKILL)
        starter.communicate()
        assert not store_server.wait(1.5)
        store.set("k", "v")
        assert store.get("k") == b"v"
        del store
        assert store_server.wait(END_S)


def test_a_start_that_says_nothing_is_given_up() -> None:
    """If the process does not speak in time it is killed, and the error says so."""
    with pytest.raises(StoreServerStartError, match="it has not reported within 0 s"):
        host_store(HERE, "job", TCPStore.connect, is_single_node=True, start_s=0.0)


def test_a_loopback_name_is_not_enough_for_many_nodes(caplog: pytest.LogCaptureFixture) -> None:
    """Where the host's name means a loopback address here, others still reach the store."""
    store_server = host_store(HERE, "job", TCPStore.connect)
    try:
        assert "listens at all its addresses" in caplog.text
        socket.create_connection(("127.0.0.2", store_server.endpoint.port), 5).close()
    finally:
        store_server.stop()


def test_reports_are_one_line_of_json(tmp_path: Path) -> None:
    """The store server reports its address, or the error, in one line and closes the channel."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as taken:
        order = {"address": "127.0.0.1", "port": taken.getsockname()[1], "job": "j"}
        duty = {**order, "starter": os.getpid(), "idle_s": 1.0, "channel_fd": theirs.fileno()}
        command = [sys.executable, hosting.PROGRAM, "--store", json.dumps(duty)]
        fds = [theirs.fileno()]
        done = subprocess.run(command, pass_fds=fds, check=False, cwd=tmp_path, timeout=150)
        theirs.close()
        with ours.makefile("rb") as channel:
            report = json.loads(channel.read())
    assert done.returncode == 1
    assert report == {"error": "Address already in use", "errno": 98}


def test_a_store_server_hosts_further_stores(store_server: StoreServer) -> None:
    """It serves a store at another port at once; another job's, or a taken port, is an error."""
    first, second = (
        host_store(HERE, job, TCPStore.connect, is_single_node=True, beside=store_server)
        for job in ("job", "other")
    )
    assert first.process is second.process is None
    assert len({each.endpoint.port for each in (store_server, first, second)}) == 3
    TCPStore.connect(second.endpoint, SOON).set("k", "v")
    TCPStore.connect(store_server.endpoint, SOON).set("k", "v")
    with pytest.raises(StoreInUseError, match="serves job 'job', this is job 'other'"):
        host_store(
            first.endpoint, "other", TCPStore.connect, is_single_node=True, beside=store_server
        )


def test_a_store_server_that_cannot_be_asked_is_not_needed() -> None:
    """When it has ended, or an order was not valid, another one is started."""
    store_server = start()
    assert store_server.process is not None
    assert store_server.channel is not None
    assert store_server.ask({"no": "order"}, 0.2) is None
    store_server.process.kill()
    store_server.process.wait(END_S)
    other = host_store(HERE, "job", TCPStore.connect, is_single_node=True, beside=store_server)
    assert other.process is not None
    other.stop()
    store_server.stop()


def test_only_connections_of_others_count() -> None:
    """The server's own connection is no reason to stay."""
    store = TCPStore("127.0.0.1", 0, 1, wait_for_workers=False)
    assert endpoint.count_served(store.port, 9) == 1
    clone = store.clone()
    clone.set("k", "v")
    assert endpoint.count_served(store.port, 9) == 2
    assert endpoint.count_served(store.port, 1) == 1
