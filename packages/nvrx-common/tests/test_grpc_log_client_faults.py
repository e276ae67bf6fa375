# SPDX-License-Identifier: Apache-2.0
"""The client of the log funnel and the real server, with processes killed and stopped."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ports
import pytest

from nvidia_resiliency_ext.shared_utils.grpc_log_client import LogFunnelClient

pytestmark = pytest.mark.slow

_DEADLINE_S = 60.0
_LINE_BYTES = 100
_PROGRAMS = Path(__file__).parent / "programs"
_WRITER = _PROGRAMS / "funnel_writer.py"
_SERVERS = "nvidia_resiliency_ext.shared_utils."


class Server:
    """A server process that can be killed and started again at the same port."""

    def __init__(self, port: int, logs: Path, module: str, *more: str) -> None:
        self.port = port
        self.endpoint = f"127.0.0.1:{self.port}"
        self._command = [
            *(sys.executable, "-m", _SERVERS + module),
            *("--host=127.0.0.1", f"--port={self.port}"),
            *(f"--allowed-root={logs}", "--graceful-shutdown-timeout=5", *more),
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        limit = time.monotonic() + _DEADLINE_S
        while time.monotonic() < limit:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            except OSError:
                assert self.process.poll() is None, "the server has ended"
                threading.Event().wait(0.02)
            else:
                return
        raise AssertionError("the server does not listen")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_DEADLINE_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start servers, and end them, the last one first."""
    with contextlib.ExitStack() as stack:

        def start(module: str = "grpc_log_server", *more: str) -> Server:
            server = Server(stack.enter_context(ports.claimed()), tmp_path, module, *more)
            stack.callback(server.end)
            return server

        yield start


class Writer:
    """A process that writes numbered lines and tells how many it has handed over."""

    def __init__(self, endpoint: str, path: Path, *more: str) -> None:
        spill = path.parent / "spill"
        self.process = subprocess.Popen(
            [sys.executable, str(_WRITER), endpoint, str(path), f"--spill-dir={spill}", *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.fed = 0
        assert self.process.stdout is not None
        self._said = self.process.stdout
        assert self._said.readline() == "open\n"

    def wait_for(self, fed: int) -> None:
        while self.fed < fed:
            line = self._said.readline()
            assert line, "the writer has ended"
            if line.strip().isdigit():
                self.fed = int(line)

    def wait_for_word(self, word: str) -> str:
        for line in self._said:
            if line.startswith(word):
                return line.strip()
        raise AssertionError("the writer has ended")

    def kill(self) -> None:
        self.process.kill()
        rest = self.process.communicate()[0].split()
        self.fed = max([self.fed, *(int(word) for word in rest if word.isdigit())])

    def end(self) -> None:
        self.process.communicate(timeout=_DEADLINE_S)
        assert self.process.returncode == 0


def numbers_in(path: Path) -> list[int]:
    """Return the numbers of the lines; a line that is not whole is an error.

    Nobody may be writing meanwhile: a write is seen page by page.
    """
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert {len(line) for line in lines} <= {_LINE_BYTES - 1}
    return [int(line[:8]) for line in lines]


def has_lines(path: Path, count: int) -> bool:
    """Tell whether so many lines are in a file that is being written."""
    return path.exists() and path.stat().st_size >= count * _LINE_BYTES


def wait_until(condition: Callable[[], bool], timeout_s: float = _DEADLINE_S) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit
        threading.Event().wait(0.02)


@pytest.mark.parametrize("kill_at", [2000, 3000])
@pytest.mark.no_second_try
def test_killed_server(serve: Callable[..., Server], tmp_path: Path, kill_at: int) -> None:
    """A server killed while lines come and started again 0.5 s later loses and doubles none."""
    server = serve()
    writer = Writer(server.endpoint, tmp_path / "a.log", "--lines=6000")
    writer.wait_for(kill_at)
    server.kill()
    writer.wait_for(kill_at + 1000)
    server.start()
    assert writer.wait_for_word("closed") == "closed True"
    writer.end()
    assert numbers_in(tmp_path / "a.log") == list(range(6000))


@pytest.mark.parametrize("killed", ["leaf", "root"])
@pytest.mark.no_second_try
def test_killed_in_two_levels(serve: Callable[..., Server], tmp_path: Path, killed: str) -> None:
    """Through a leaf a kill of either server loses and doubles nothing."""
    root = serve()
    leaf = serve("grpc_log_leaf_server", f"--upstream={root.endpoint}")
    writer = Writer(leaf.endpoint, tmp_path / "a.log", "--lines=6000")
    writer.wait_for(2000)
    server = leaf if killed == "leaf" else root
    server.kill()
    writer.wait_for(3000)
    server.start()
    assert writer.wait_for_word("closed") == "closed True"
    writer.end()
    assert numbers_in(tmp_path / "a.log") == list(range(6000))


@pytest.mark.no_second_try
def test_server_killed_again_and_again(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Five kills at random moments under full load lose and double nothing, in order."""
    draw = random.Random(5)
    server = serve()
    writer = Writer(server.endpoint, tmp_path / "a.log", "--lines=60000", "--rate=12000")
    fed = 0
    for _ in range(5):
        fed += draw.randrange(3000, 9000)
        writer.wait_for(fed)
        server.kill()
        server.start()
    assert writer.wait_for_word("closed") == "closed True"
    writer.end()
    assert numbers_in(tmp_path / "a.log") == list(range(60_000))


@pytest.mark.no_second_try
def test_killed_client(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Of a client killed while it writes all but the last moment's lines are in the file."""
    server = serve()
    log = tmp_path / "a.log"
    writer = Writer(server.endpoint, log, "--lines=1000000000", "--rate=4000")
    writer.wait_for(8000)
    # How long a moment is, is the machine's affair.
    wait_until(lambda: has_lines(log, 8000))
    writer.kill()
    server.end()
    found = numbers_in(log)
    assert len(found) >= 8000
    assert found == list(range(len(found)))


@pytest.mark.no_second_try
def test_stopped_server(serve: Callable[..., Server], tmp_path: Path) -> None:
    """A server that is stopped holds up no writer; what came meanwhile follows, in order."""
    server = serve()
    client = LogFunnelClient(
        server.endpoint,
        node_id="n",
        spill_dir=str(tmp_path / "spill"),
        memory_limit_bytes=1 << 20,
    )
    target = client.open(str(tmp_path / "a.log"))
    target.write(b"%08d %s\n" % (0, b"z" * 90))
    target.flush()
    server.process.send_signal(signal.SIGSTOP)
    for number in range(1, 200_000):
        target.write(b"%08d %s\n" % (number, b"z" * 90))
    stats = client.stats
    assert stats.bytes_in_spill > 10 << 20
    assert stats.bytes_in_memory < 2 << 20
    server.process.send_signal(signal.SIGCONT)
    assert client.close(_DEADLINE_S)
    assert numbers_in(tmp_path / "a.log") == list(range(200_000))
    assert not (tmp_path / "spill").exists()


@pytest.mark.no_second_try
def test_killed_client_with_files(serve: Callable[..., Server], tmp_path: Path) -> None:
    """What a killed client had in files is sent by the next one, once, before its own lines."""
    server = serve()
    log = tmp_path / "a.log"
    first = Writer(
        server.endpoint,
        log,
        *("--lines=100000", "--rate=1e9", f"--memory={1 << 20}", "--close=never"),
    )
    wait_until(lambda: has_lines(log, 100))
    server.process.send_signal(signal.SIGSTOP)
    first.wait_for_word("written")
    first.kill()
    server.process.send_signal(signal.SIGCONT)
    second = Writer(server.endpoint, log, "--first=1000000", "--lines=1000", "--rate=1e9")
    assert second.wait_for_word("closed") == "closed True"
    second.end()
    found = numbers_in(log)
    assert found == sorted(set(found)), "doubled or out of order"
    assert found[-1000:] == list(range(1_000_000, 1_001_000))
    # Lost is what it had in memory: the newest lines, and those on their way.
    assert len(found) - 1000 > 70_000
    assert not (tmp_path / "spill").exists()


@pytest.mark.no_second_try
def test_lossy_line(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Over a line that is slow and breaks again and again nothing is lost or doubled."""
    server = serve()
    log = tmp_path / "a.log"
    with Relay(server.port, cut_after_bytes=300_000) as relay:
        client = LogFunnelClient(
            f"127.0.0.1:{relay.port}", node_id="n", spill_dir=str(tmp_path / "spill")
        )
        target = client.open(str(log))
        for number in range(30_000):
            target.write(b"%08d %s\n" % (number, b"z" * 90))
        assert client.close(_DEADLINE_S)
        assert relay.cuts >= 5
    assert numbers_in(log) == list(range(30_000))


class Relay:
    """Passes connections on to a port of this machine, slowly, and cuts each after so many bytes.

    Args:
        port: Where they lead.
        cut_after_bytes: What one may carry.
    """

    def __init__(self, port: int, cut_after_bytes: int) -> None:
        self.cuts = 0
        self._to = port
        self._cut_after_bytes = cut_after_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._sockets: list[socket.socket] = []
        self._ended = threading.Event()

    def __enter__(self) -> "Relay":  # noqa: PYI034 - Self is not in Python 3.10
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in self._sockets:
            self._shut(end)
        for thread in self._threads:
            thread.join(_DEADLINE_S)
        for end in [self._listener, *self._sockets]:
            end.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._to))
            self._sockets += [here, there]
            for one, other in ((here, there), (there, here)):
                self._threads.append(threading.Thread(target=self._pass, args=(one, other)))
                self._threads[-1].start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        passed = 0
        while passed < self._cut_after_bytes:
            try:
                data = one.recv(32768)
                self._ended.wait(0.002)
                other.sendall(data)
            except OSError:
                break
            if not data:
                break
            passed += len(data)
        else:
            self.cuts += 1
        self._shut(one)
        self._shut(other)

    @staticmethod
    def _shut(end: socket.socket) -> None:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # shut already


@pytest.fixture
def lossy_network() -> Iterator[list[str]]:
    """Give a prefix for commands in a network namespace where 10.9.0.2 is reached over a bad line.

    What is sent there arrives at 10.9.0.1; 5 % of the packets are lost, in both directions.
    """
    ip = shutil.which("ip")
    if os.geteuid() != 0 or ip is None:
        pytest.skip("network namespaces need root and ip")
    name = f"nvrx-funnel-{os.getpid()}"
    made = subprocess.run([ip, "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespace here: {made.stderr.decode().strip()}")
    inside = [ip, "netns", "exec", name]
    relay = subprocess.Popen(
        [*inside, sys.executable, str(_PROGRAMS / "lossy_tun.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert relay.stdout is not None
        if relay.stdout.readline() != "up\n":
            pytest.skip(f"no tun device here: {relay.communicate()[1].strip()[-200:]}")
        yield inside
    finally:
        relay.kill()
        relay.communicate()
        subprocess.run([ip, "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.netns
@pytest.mark.no_second_try
def test_packet_loss(lossy_network: list[str], tmp_path: Path) -> None:
    """Between two hosts with 5 % packet loss nothing is lost or doubled; a token is needed."""
    port, log, token = 5000, tmp_path / "a.log", tmp_path / "token"  # of a network of its own
    token.write_text("secret")
    token.chmod(0o600)
    environment = {**os.environ, "NVRX_LOG_FUNNEL_TOKEN_FILE": str(token)}
    command = [*lossy_network, sys.executable, "-m", _SERVERS + "grpc_log_server"]
    server = subprocess.Popen(
        [*command, "--host=10.9.0.1", f"--port={port}", f"--allowed-root={tmp_path}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        writer = subprocess.run(
            [
                *(*lossy_network, sys.executable, str(_WRITER), f"10.9.0.2:{port}", str(log)),
                *("--lines=10000", "--rate=5000", f"--spill-dir={tmp_path / 'spill'}"),
            ],
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
            env=environment,
        )
        assert writer.stdout.splitlines()[-1] == "closed True", writer.stderr
    finally:
        server.terminate()
        server.wait(_DEADLINE_S)
    assert numbers_in(log) == list(range(10_000))
