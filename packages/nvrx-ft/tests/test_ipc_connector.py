# SPDX-License-Identifier: Apache-2.0
"""The mailbox between processes: delivery, order, and clients that misbehave."""

import contextlib
import os
import pickle
import resource
import select
import socket
import stat
import struct
import subprocess
import sys
import threading
import time

import pytest

from nvidia_resiliency_ext.fault_tolerance._core.messages import MESSAGES, Mailbox
from nvidia_resiliency_ext.fault_tolerance.data import (
    ErrorMsg,
    WorkloadAction,
    WorkloadControlRequest,
)
from nvidia_resiliency_ext.fault_tolerance.ipc_connector import IpcConnector
from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError, WireError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop
from nvidia_resiliency_ext.shared_utils.wire import receive_message

REQUEST = (3, WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "enough"))

SENDER = """
import sys
from nvidia_resiliency_ext.fault_tolerance.ipc_connector import IpcConnector
connector = IpcConnector(sys.argv[1])
for number in range(int(sys.argv[3])):
    connector.send((sys.argv[2], number))
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A short socket path, whatever the name of the test's folder."""
    monkeypatch.chdir(tmp_path)
    return "box.sock"


@pytest.fixture
def receiver(path):
    """A receiving connector at `path`."""
    connector = IpcConnector(path)
    connector.start_receiving()
    yield connector
    connector.stop_receiving()


@pytest.fixture
def raw(receiver):
    """Makes plain client connections to the receiver, closed at the end."""
    with contextlib.ExitStack() as stack:

        def connect():
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(30)
            sock.connect(receiver.socket_path)
            return sock

        yield connect


def is_dropped(sock):
    """Whether the receiver has closed this connection, waiting for it if need be."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def test_messages_arrive_in_order_with_their_types(receiver, path):
    """An acknowledged message is there, plain data and requests keep their types."""
    sent = [REQUEST, {"a": (1, {2})}, WorkloadAction.Continue, None, "x" * 900_000]
    for message in sent:
        IpcConnector(path).send(message)
    assert receiver.peek_received() == sent
    assert receiver.fetch_received() == sent
    assert receiver.fetch_received() == []


def test_clear_forgets(receiver, path):
    """Cleared messages are gone."""
    IpcConnector(path).send(1)
    receiver.clear()
    assert receiver.peek_received() == []


def test_many_processes_at_once(receiver, path):
    """Messages of several processes all arrive, those of each in order."""
    senders = [subprocess.Popen([sys.executable, "-c", SENDER, path, name, "50"]) for name in "abc"]
    try:
        assert [sender.wait(50) for sender in senders] == [0, 0, 0]
    finally:
        for sender in senders:
            sender.kill()
            sender.wait()
    received = receiver.fetch_received()
    for name in "abc":
        assert [number for sender, number in received if sender == name] == list(range(50))


def test_nobody_there(path):
    """Without a socket the file is missing; without a listener the connection is refused."""
    with pytest.raises(FileNotFoundError):
        IpcConnector(path).send(1)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with pytest.raises(ConnectionRefusedError):
        IpcConnector(path).send(1)


def test_stale_socket_is_replaced(path):
    """A socket that a dead process left does not stand in the way."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    connector = IpcConnector(path)
    connector.start_receiving()
    try:
        IpcConnector(path).send(1)
        assert connector.fetch_received() == [1]
    finally:
        connector.stop_receiving()


def test_other_files_and_live_listeners_are_left_alone(path, receiver):
    """Neither a file nor somebody else's mailbox is removed."""
    with open("file", "w") as file:
        file.write("mine")
    with pytest.raises(FileExistsError, match="not a socket"):
        IpcConnector("file").start_receiving()
    with pytest.raises(FileExistsError, match="somebody listens"):
        IpcConnector(path).start_receiving()
    IpcConnector(path).send("still there")
    assert receiver.fetch_received() == ["still there"]


def test_starting_twice_is_an_error(receiver):
    """One connector has one receiver."""
    with pytest.raises(RuntimeError, match="already"):
        receiver.start_receiving()


def test_stopping_may_be_repeated_and_undone(path):
    """Stopping removes the socket and keeps what was received; starting again works."""
    connector = IpcConnector(path)
    connector.stop_receiving()
    for number in range(3):
        connector.start_receiving()
        IpcConnector(path).send(number)
        connector.stop_receiving()
        connector.stop_receiving()
        assert not os.path.exists(path)
    assert connector.fetch_received() == [0, 1, 2]


def test_only_this_user_may_connect(receiver, path):
    """The socket's mode is 0600."""
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert receiver.socket_path == path


@pytest.mark.parametrize("call", ["send", "start"])
def test_too_long_path(tmp_path, call):
    """A path that does not fit into a socket address is an error that says so."""
    connector = IpcConnector(str(tmp_path / ("x" * 108)))
    with pytest.raises(ValueError, match="allows 107"):
        connector.send(1) if call == "send" else connector.start_receiving()


def test_longest_path(tmp_path, monkeypatch):
    """107 bytes are not too many."""
    monkeypatch.chdir(tmp_path)
    connector = IpcConnector("x" * 107)
    connector.start_receiving()
    connector.send(1)
    connector.stop_receiving()
    assert connector.fetch_received() == [1]


@pytest.mark.parametrize("message", [object(), "x" * (1 << 20)], ids=["type", "size"])
def test_what_cannot_be_sent_fails_at_the_sender(receiver, path, message):
    """An unknown type or too large a message never leaves the sender."""
    with pytest.raises(WireError):
        IpcConnector(path).send(message)
    assert receiver.fetch_received() == []


def test_silent_and_half_spoken_clients_delay_nobody(receiver, path, raw):
    """Clients that say nothing, or half a message, cost other senders nothing."""
    half = MESSAGES.encode(REQUEST)[:-5]
    held = [raw() for _ in range(20)]
    for sock in held[10:]:
        sock.sendall(half)
    began = time.monotonic()
    for number in range(10):
        IpcConnector(path).send(number)
    assert time.monotonic() - began < IpcConnector.SEND_TIMEOUT_S / 3
    assert receiver.fetch_received() == list(range(10))


def test_receiver_survives_clients_that_die(receiver, path, raw):
    """Connections that end before, within and after a message end only themselves."""
    frame = MESSAGES.encode(REQUEST)
    for cut in (0, 2, 4, 10, len(frame)):
        sock = raw()
        sock.sendall(frame[:cut])
        # A reset instead of an orderly end, as after a kill with unread data.
        sock.close()
    IpcConnector(path).send("after")
    assert receiver.fetch_received() == [REQUEST, "after"]


class Bomb:
    """A pickle that would create a file where it is loaded."""

    def __reduce__(self):
        return open, ("exploded", "w")


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 4) + b"nope",
        struct.pack(">I", len(pickle.dumps(Bomb()))) + pickle.dumps(Bomb()),
        struct.pack(">I", 0),
        struct.pack(">I", 0xFFFFFFFF),
        b'\x00\x00\x00\x15{"$":"Popen","f":{}}!',
    ],
    ids=["garbage", "pickle", "empty", "oversize", "unknown type"],
)
def test_garbage_costs_only_its_sender(receiver, path, raw, data):
    """A frame that is no message is answered with an error and ends that connection alone."""
    other = raw()
    sock = raw()
    sock.sendall(data)
    assert isinstance(receive_message(sock, MESSAGES, 30), ErrorMsg)
    assert is_dropped(sock)
    other.sendall(MESSAGES.encode("fine"))
    receive_message(other, MESSAGES, 30)
    IpcConnector(path).send("after")
    assert receiver.fetch_received() == ["fine", "after"]
    assert not os.path.exists("exploded")


def test_client_that_reads_no_answers_is_dropped(receiver, path, raw):
    """Answers nobody reads are not stored without end."""
    sock = raw()
    sock.settimeout(30)
    # The answers to these take far more than any socket buffer.
    with pytest.raises(ConnectionError):
        sock.sendall(MESSAGES.encode(0) * 1_000_000)
    IpcConnector(path).send("after")
    assert receiver.fetch_received()[-1] == "after"


def test_several_messages_on_one_connection(receiver, raw):
    """A client may send on; every message is acknowledged."""
    sock = raw()
    sock.sendall(b"".join(MESSAGES.encode(number) for number in range(3)))
    for _ in range(3):
        receive_message(sock, MESSAGES, 30)
    assert receiver.fetch_received() == [0, 1, 2]


class Responder:
    """A stand-in for a broken receiver: answers each connection with fixed bytes."""

    def __init__(self, path, answer):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.bind(path)
        self.sock.listen(1)
        self.answer = answer
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        """Serve one connection."""
        client, _ = self.sock.accept()
        with client:
            client.recv(65536)
            client.sendall(self.answer)

    def close(self):
        """End the thread."""
        self.thread.join(30)
        self.sock.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (MESSAGES.encode(ErrorMsg("the box is full")), "the box is full"),
        (MESSAGES.encode("thanks"), "not accepted: 'thanks'"),
        (b"\x00\x00\x00\x02OK", "not an answer"),
        (b"", "closed without an answer"),
    ],
)
def test_bad_acknowledgement(path, answer, message):
    """Anything but an acknowledgement is a RuntimeError that tells what came."""
    responder = Responder(path, answer)
    try:
        with pytest.raises(RuntimeError, match=message):
            IpcConnector(path).send(1)
    finally:
        responder.close()


@pytest.mark.parametrize(("queue_is_full", "timeout_s"), [(False, 0.2), (True, 0.2), (True, 0.0)])
def test_receiver_that_never_answers(path, queue_is_full, timeout_s):
    """Sending ends at its deadline, whether the receiver accepts connections or not."""
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(socket.socket(socket.AF_UNIX))
        stopped.bind(path)
        stopped.listen(0)
        if queue_is_full:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.connect(path)
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            IpcConnector(path).send(1, timeout_s=timeout_s)
        assert time.monotonic() - began < IpcConnector.SEND_TIMEOUT_S / 3


@pytest.fixture
def loop():
    """An event loop, closed at the end."""
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def mailbox(path, loop):
    """A mailbox on that loop, with what it has received."""
    received = []
    mailbox = Mailbox(path, loop, received.append)
    yield mailbox, received
    mailbox.close()


def run_ready(loop, rounds=3):
    """Call what is due now: a connection, what it sent, what follows."""
    for _ in range(rounds):
        loop.run_once(until=0.0)


def test_mailbox_serves_from_its_owners_loop(path, loop, mailbox):
    """No thread is needed: messages arrive while the owner's loop runs."""
    box, received = mailbox
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(path)
        client.sendall(MESSAGES.encode(REQUEST))
        deadline = time.monotonic() + 30
        while not received and time.monotonic() < deadline:
            loop.run_once(until=deadline)
        assert received == [REQUEST]
        receive_message(client, MESSAGES, 30)
    box.close()
    assert not os.path.exists(path)


def test_mailbox_drops_the_oldest_of_too_many_clients(path, loop, monkeypatch):
    """The number of clients is bounded; new ones get in at the cost of the oldest."""
    monkeypatch.setattr("nvidia_resiliency_ext.fault_tolerance._core.messages._MOST_CLIENTS", 2)
    received = []
    mailbox = Mailbox(path, loop, received.append)
    with contextlib.closing(mailbox), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for client in clients:
            client.settimeout(30)
            client.connect(path)
            run_ready(loop)
        assert clients[0].recv(1) == b""
        clients[2].sendall(MESSAGES.encode(1))
        run_ready(loop)
        assert received == [1]


def test_mailbox_leaves_its_owner_descriptors(path, loop):
    """However many connect and stay, three quarters of the process's descriptors are left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        mailbox = Mailbox(path, loop, print)
        with contextlib.closing(mailbox), contextlib.ExitStack() as stack:
            before = len(os.listdir("/proc/self/fd"))
            clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(60)]
            for client in clients:
                client.connect(path)
                run_ready(loop)
            accepted = len(os.listdir("/proc/self/fd")) - before - len(clients)
            assert accepted == 50
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_mailbox_does_not_fill_the_log(path, loop, mailbox, caplog):
    """Of a hundred senders of garbage five have a line in the log; then their number follows."""
    for _ in range(100):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(b"\xff" * 8)
            run_ready(loop)
    mailbox[0].close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 6
    assert all("sent no message" in line for line in lines[:5])
    assert lines[5] == f"95 more refusals at {path}"


def test_mailbox_survives_without_descriptors(path, loop, mailbox):
    """While the process has no descriptors left clients wait, and the loop does not spin."""
    received = mailbox[1]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(socket.socket(socket.AF_UNIX))
        client.connect(path)
        client.sendall(MESSAGES.encode(2))
        limit = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    stack.callback(os.close, os.dup(0))
            run_ready(loop, 1)
            assert select.select([loop._selector], [], [], 0)[0] == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        deadline = time.monotonic() + 30
        while not received and time.monotonic() < deadline:
            loop.run_once(until=deadline)
        assert received == [2]


def test_closing_leaves_a_successors_socket_alone(path, loop):
    """A mailbox that closes late does not remove the socket of the one after it."""
    old = Mailbox(path, loop, print)
    os.unlink(path)
    with contextlib.closing(Mailbox(path, loop, print)):
        old.close()
        assert os.path.exists(path)
