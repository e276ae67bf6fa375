# SPDX-License-Identifier: Apache-2.0
"""The job's part of a TCPStore, and what the protocol takes for granted of torch's store."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from rendezvous_store import PREFIX, SECRET, Served

from nvidia_resiliency_ext.fault_tolerance._rendezvous import endpoint, keys, store
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import (
    MAX_VALUE_BYTES,
    ForeignValueError,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import JobStore
from nvidia_resiliency_ext.shared_utils import store_sockets
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError, WaitExpiredError

pytestmark = pytest.mark.slow

SOON_S = 30.0
# A wait that has not ended by then does not go by its own time.
PATIENCE_S = 60.0


@pytest.fixture
def served() -> Iterator[Served]:
    """A store."""
    made = Served()
    yield made
    made.close()


@contextlib.contextmanager
def store_process() -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Serve a store in another process; give it and its port."""
    program = (
        "import sys;"
        "from nvidia_resiliency_ext.fault_tolerance._rendezvous import endpoint, store;"
        "listener = endpoint.claim('127.0.0.1', 0, None);"
        "port = listener.getsockname()[1];"
        "server = store.serve(listener, '127.0.0.1', 8);"
        "print(port, flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        yield server, int(server.stdout.readline())


@contextlib.contextmanager
def beside(function: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run `function` in a thread; its result, or what it raised, is in the list at the end."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:  # noqa: BLE001 - looked at by the test
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield results
    thread.join(SOON_S)
    assert not thread.is_alive()


# What is taken for granted of torch ------------------------------------------------------------


def test_compare_set_on_a_missing_key_makes_it_only_when_nothing_is_expected(
    served: Served,
) -> None:
    """With another expectation it answers with that, and the key stays missing."""
    client = served.raw()
    assert client.compare_set("k", "other", "mine") == b"other"
    assert not client.check(["k"])
    assert client.compare_set("k", "", "mine") == b"mine"
    assert client.compare_set("k", "", "second") == b"mine"
    assert client.compare_set("k", "mine", "second") == b"second"


def test_compare_set_takes_and_gives_any_bytes(served: Served) -> None:
    """A foreign value that is no text can be replaced, too."""
    client = served.raw()
    client.set("k", "x")
    assert client.compare_set("k", b"x", b"\xff\x00\xfe") == b"\xff\x00\xfe"
    assert client.compare_set("k", b"\xff\x00\xfe", "good") == b"good"


def test_reading_a_missing_key_may_wake_who_waits_for_it(served: Served) -> None:
    """Whoever is woken in vain must look again; here both is borne, woken or not."""
    waiting, reading = served.connect(), served.connect()
    with beside(lambda: waiting.wait_until_set("k", 0.5)) as results:
        while not results:
            assert reading.peek("k") is None
    assert results[0] in (True, False)
    assert not reading.has("k")


def test_append_is_atomic(served: Served) -> None:
    """Lines that many append at once are all there, and whole."""
    makers = [served.connect() for _ in range(4)]

    def append(index: int) -> None:
        for number in range(200):
            makers[index].append_line("k", f"{index}:{number}:" + "x" * 300)
        makers[index].count("done", 1)  # An append has no answer, but this has.

    threads = [threading.Thread(target=append, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines, end = served.connect().lines("k", 0, str)
    assert len(lines) == 800
    assert {line.rsplit(":", 1)[0] for line in lines} == {
        f"{index}:{number}" for index in range(4) for number in range(200)
    }
    assert served.connect().lines("k", end, str) == ([], end)


def test_a_wait_ends_when_the_key_is_set_deleted_or_not(served: Served) -> None:
    """A key set wakes who waits; a key deleted can be waited for again."""
    waiting, setting = served.connect(), served.connect()
    for _ in range(3):
        with beside(lambda: waiting.wait_until_set("k", SOON_S)) as results:
            setting.put("k", "v")
        assert results == [True]
        setting.delete("k")
    assert waiting.wait_until_set("k", 0.05) is False


def test_multi_get_waits_for_a_missing_key(served: Served) -> None:
    """That is why the host makes a counter before it reads many."""
    client = served.raw()
    client.set("there", "1")
    client.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(WaitExpiredError):
        client.multi_get(["there", "missing"])


def test_add_of_nothing_makes_a_counter(served: Served) -> None:
    """It is 0 then, and others can read it."""
    one = served.connect()
    assert one.count("k", 0) == 0
    assert one.counters(["k"]) == [0]
    assert one.count("k", 3) == 3


def test_what_one_connection_does_happens_in_order(served: Served) -> None:
    """A write has no answer; when a later call of the same connection has one, it is done."""
    one, other = served.connect(), served.connect()
    for number in range(200):
        one.append_line("k", str(number))
        one.put_all({"a": str(number)})
        one.put("b", str(number))
        one.count("c", 1)
        assert [other.peek("a"), other.peek("b")] == [str(number)] * 2
        assert len(other.lines("k", 0, str)[0]) == number + 1


# Signatures ------------------------------------------------------------------------------------


def test_values_come_back(served: Served) -> None:
    """Put, put_all, create, peek and has speak of the same values."""
    one, other = served.connect(), served.connect()
    one.put("a", "1")
    one.put_all({"b": "2", "c": ""})
    assert one.has("c")
    assert [other.peek(key) for key in "abcd"] == ["1", "2", "", None]
    assert [other.has(key) for key in "ad"] == [True, False]
    assert other.create("a", "9") == "1"
    assert other.create("d", "4") == "4"


@pytest.mark.parametrize("value", ["", "x", "0" * 32, "0" * 40, "\x00", "x" * 100_000])
def test_a_foreign_value_is_refused(served: Served, value: str) -> None:
    """What was not written with the secret raises ForeignValueError."""
    served.raw().set(PREFIX + "k", value)
    with pytest.raises(ForeignValueError, match="k"):
        served.connect().peek("k")
    if value:
        with pytest.raises(ForeignValueError):
            served.connect().create("k", "mine")


def test_another_secret_is_refused_both_ways(served: Served) -> None:
    """Launchers with different tokens do not take each other's values."""
    mine, other = served.connect(), served.connect(b"another secret")
    mine.put("a", "1")
    other.put("b", "1")
    assert mine.has("a")
    assert other.has("b")
    with pytest.raises(ForeignValueError):
        other.peek("a")
    with pytest.raises(ForeignValueError):
        mine.peek("b")


def test_a_value_copied_to_another_key_is_refused(served: Served) -> None:
    """A true value at the wrong place is foreign: its key is signed with it."""
    one = served.connect()
    one.put(keys.assignment("node-a"), "rank 0")
    raw = served.raw().get(PREFIX + keys.assignment("node-a"))
    served.raw().set(PREFIX + keys.assignment("node-b"), raw)
    with pytest.raises(ForeignValueError):
        one.peek(keys.assignment("node-b"))


def test_a_value_too_large_is_refused(served: Served) -> None:
    """Even one that is signed."""
    one = served.connect()
    one.put("k", "x" * MAX_VALUE_BYTES)
    with pytest.raises(ForeignValueError, match="bytes"):
        one.peek("k")


def test_a_key_cannot_be_made_to_look_missing(served: Served) -> None:
    """Whatever a foreign program writes, the key is there and foreign."""
    for value in ("-", "", store._NOTHING[:5]):
        served.raw().set(PREFIX + "k", value)
        with pytest.raises(ForeignValueError):
            served.connect().peek("k")


def test_foreign_lines_are_left_out_and_reported_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines of foreign programs among those of the job do no harm, and fill no log."""
    one = served.connect()
    for number in range(3):
        served.raw().append(PREFIX + "k", "garbage \x00\n")
        one.append_line("k", str(number))
    assert one.lines("k", 0, str)[0] == ["0", "1", "2"]
    assert len(caplog.records) == 1


def test_lines_that_somebody_else_has_written_over_are_named(served: Served) -> None:
    """A reader that is beyond the end of what is there now does not pass it over."""
    one = served.connect()
    for number in range(3):
        one.append_line("k", str(number))
    _, end = one.lines("k", 0, str)
    served.raw().set(PREFIX + "k", "garbage\n")
    with pytest.raises(ForeignValueError, match="k: somebody else has written over it"):
        one.lines("k", end, str)


def test_a_counter_that_is_no_number_counts_as_nothing(served: Served) -> None:
    """Reading many counters survives a foreign one among them."""
    one = served.connect()
    one.count("a", 2)
    served.raw().set(PREFIX + "b", "many")
    assert one.counters(["a", "b"]) == [2, 0]


@pytest.mark.parametrize("garbage", ["garbage", "", "9" * 30])
def test_a_counter_that_somebody_else_has_written_over_is_named(
    served: Served, garbage: str
) -> None:
    """torch's store hangs up on whoever adds to what is no number; the error says what is there."""
    one = served.connect()
    assert one.count("k", 3) == 3
    served.raw().set(PREFIX + "k", garbage)
    with pytest.raises(ForeignValueError, match=r"k: .* is no number"):
        one.count("k", 2)


def test_a_counter_survives_a_connection_that_was_reset(served: Served) -> None:
    """One connection that breaks is made anew, and the store stays what it is for this node."""
    one = served.connect()
    assert one.count("k", 3) == 3
    one._client.cut()
    assert one.count("k", 2) == 5


# Operations, waits, the end --------------------------------------------------------------------


def test_operations_are_counted_honestly(served: Served) -> None:
    """Each request to the store counts; waiting and reading are two."""
    one = served.connect()
    spent = []

    def count(call: Callable[[], Any]) -> None:
        before = one.operations
        call()
        spent.append(one.operations - before)

    for call in (
        lambda: one.put("k", "v"),
        lambda: one.put_all({"a": "1", "b": "2"}),
        lambda: one.create("k", "v"),
        lambda: one.has("k"),
        lambda: one.peek("k"),
        lambda: one.wait_until_set("k", 1),
        lambda: one.wait_for("k", 1),
        lambda: one.wait_for("missing", 0.01),
        lambda: one.append_line("l", "x"),
        lambda: one.lines("l", 0, str),
        lambda: one.count("c", 1),
        lambda: one.counters(["c"]),
        lambda: one.delete("k"),
    ):
        count(call)
    assert spent == [1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("timeout_s", [0.0, 0.05, 0.3])
def test_a_wait_ends_in_time(served: Served, timeout_s: float) -> None:
    """Nothing set means False, neither early nor late, and the connection goes on."""
    one = served.connect()
    began = time.monotonic()
    assert one.wait_until_set("k", timeout_s) is False
    assert timeout_s - 0.02 <= time.monotonic() - began < timeout_s + PATIENCE_S
    one.put("k", "v")
    assert one.wait_for("k", timeout_s) == "v"


def test_a_prefix_store_is_looked_at_without_waits_that_torch_warns_of(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    """A short wait through a caller's PrefixStore ends in time, sees the key, prints nothing."""
    from torch.distributed import PrefixStore, TCPStore

    torchs = TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False)
    one = JobStore(PrefixStore("their", torchs), PREFIX, SECRET).another()
    assert one.wait_until_set("k", 0.1) is False
    one.put("k", "v")
    assert one.wait_until_set("k", SOON_S) is True
    assert not served.connect().has("k")
    assert not capfd.readouterr().err


def test_a_timeout_of_the_network_is_not_the_end_of_the_wait(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that speaks of a timeout long before the time is a store that is lost."""
    one = served.connect()

    class Broken:
        def wait(self, *_: object) -> None:
            raise RuntimeError("Connection timed out")

    monkeypatch.setattr(one, "_client", Broken())
    with pytest.raises(StoreLostError, match="timed out"):
        one.wait_until_set("k", 60)


def test_a_connection_found_dead_is_a_lost_store(served: Served) -> None:
    """The kernel's ETIMEDOUT has the type of a timeout: it ends a question and a wait, late too."""
    for call in (lambda one: one.peek("k"), lambda one: one.wait_until_set("k", 0.001)):
        one = served.connect()
        one._client._sock = DeadSocket(one._client._sock)
        with pytest.raises(StoreLostError, match="dead"):
            call(one)


class DeadSocket:
    """A socket whose peer has acknowledged nothing for too long."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def recv(self, *_: int) -> bytes:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_many_messages_of_a_round_are_read(served: Served) -> None:
    """A round's messages may take more than the 16 MiB that other values are limited to."""
    one = served.connect()
    line = one._seal("k", "x" * 60_000) + "\n"
    for _ in range(3):
        one._client.append(PREFIX + "k", line * 100)
    assert len(one.lines("k", 0, str)[0]) == 300


def test_a_look_at_a_prefix_store_can_be_cut() -> None:
    """A short wait over a client that cannot be cut itself ends as soon as it is told to."""

    class Endless:
        def check(self, _: list[str]) -> bool:
            one.cut()
            return False

    one = JobStore(Endless(), PREFIX, SECRET)
    with pytest.raises(StoreLostError, match="cut"):
        one.wait_until_set("k", 50)


def test_a_name_that_none_can_have_is_told_of() -> None:
    """A host with an empty label is a store that is not there, and no traceback."""
    with pytest.raises(StoreLostError, match=r"a\.\.b"):
        store.connect("a..b", 29400, PREFIX, SECRET, 1.0)
    with pytest.raises(endpoint.EndpointError, match="does not resolve"):
        endpoint.claim("a..b", 29400, None)
    with pytest.raises(endpoint.EndpointError, match="not reachable"):
        endpoint.wait_until_reachable("a..b", 29400, 0.0, SystemClock(), threading.Event())


def test_who_finds_no_job_keeps_no_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends with the error, however long that is kept."""
    made = []
    connect = store._connect_client

    def remember(*where: Any) -> Any:
        made.append(connect(*where))
        return made[0]

    monkeypatch.setattr(store, "_connect_client", remember)
    with pytest.raises(store.NoJobError):
        store.connect("127.0.0.1", served.port, keys.prefix("other"), None, 0.01)
    assert made[0]._sock.fileno() == -1


def test_a_store_killed_ends_all_waits_at_once() -> None:
    """Who waits for a minute when the store's process dies gets StoreLostError at once."""
    with store_process() as (server, port):
        one = store.connect("127.0.0.1", port, PREFIX, SECRET, SOON_S)
        try:
            with beside(lambda: one.wait_until_set("k", 60)) as results:
                assert one.another().wait_until_set("k", 0.1) is False
                server.kill()
            assert isinstance(results[0], StoreLostError)
            with pytest.raises(StoreLostError):
                one.count("c", 1)
        finally:
            one.cut()
            server.kill()


@pytest.mark.parametrize(
    "call",
    [lambda one: one.wait_until_set("k", 60), lambda one: one.counters(["missing"])],
    ids=["wait", "multi_get"],
)
def test_a_wait_can_be_cut_from_another_thread(
    served: Served, call: Callable[[JobStore], Any]
) -> None:
    """`cut` ends whatever a connection waits for, and every later call; others go on."""
    one, other = served.connect(), served.connect()
    with beside(lambda: call(one)) as results:
        other.wait_until_set("never", 0.1)
        one.cut()
    assert isinstance(results[0], StoreLostError)
    with pytest.raises(StoreLostError):
        one.put("k", "v")
    one.cut()
    other.put("k", "v")


def test_an_answer_that_never_comes_can_be_cut() -> None:
    """A call to a store whose machine is frozen ends when it is cut."""
    with store_process() as (server, port):
        one = store.connect("127.0.0.1", port, PREFIX, SECRET, SOON_S)
        try:
            server.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, server.pid, os.WSTOPPED)
            with beside(lambda: one.count("c", 1)) as results:
                assert not results
                one.cut()
            assert isinstance(results[0], StoreLostError)
        finally:
            one.cut()
            server.kill()


def test_what_listens_and_is_no_store_is_said_so() -> None:
    """A program that accepts and says nothing does not hold a launcher up for good."""
    listener = endpoint.claim("127.0.0.1", 0, None)
    assert listener is not None
    with listener, pytest.raises(StoreLostError, match="no store answers at 127"):
        store.connect("127.0.0.1", listener.getsockname()[1], PREFIX, SECRET, 1.0, 0.2)


def test_a_store_without_the_job_is_said_so(served: Served) -> None:
    """Where no secret is left in time, the error names the store, the job and what to look at."""
    with pytest.raises(store.NoJobError) as missing:
        store.connect("127.0.0.1", served.port, keys.prefix("other"), None, 0.1)
    assert str(missing.value).startswith(f"the store at 127.0.0.1:{served.port} holds no job 'oth")
    assert "is --rdzv-id the same everywhere" in str(missing.value)
    served.raw().set("p:secret", "no hex")
    with pytest.raises(StoreLostError, match="is no key of a job"):
        store.connect("127.0.0.1", served.port, "p:", None, 0.1)


def test_a_shared_secret_is_found(served: Served) -> None:
    """Without a token nodes take the key that the host left."""
    secret = store.agree_on_secret(served.raw(), "p:")
    host = store.connect("127.0.0.1", served.port, "p:", secret, SOON_S)
    node = store.connect("127.0.0.1", served.port, "p:", None, SOON_S)
    host.put("k", "v")
    assert node.wait_for("k", SOON_S) == "v"
    for one in (host, node):
        one.cut()


def test_connections_leave_no_descriptors(served: Served) -> None:
    """Connecting, using, cutting and dropping a connection leaves nothing open."""
    served.connect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        one = store.connect("127.0.0.1", served.port, PREFIX, SECRET, SOON_S)
        another = one.another()
        another.put("k", "v")
        another.cut()
    del one, another
    deadline = time.monotonic() + SOON_S
    # The server, which is in this process too, closes its ends a moment later.
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < deadline
        served.connect().wait_until_set("never", 0.05)
        served._made.pop()


def test_each_connection_is_cut_alone(served: Served) -> None:
    """The others go on, though all go to one port."""
    made = [served.connect() for _ in range(5)]
    for index, one in enumerate(made):
        one.cut()
        with pytest.raises(StoreLostError):
            one.put("k", "v")
        for other in made[index + 1 :]:
            other.put("k", "v")


def test_a_connection_is_watched_over(served: Served) -> None:
    """The kernel asks an idle connection for signs of life, and bounds its silence."""
    sock = served.connect()._client._sock
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    limit_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert 0 < limit_ms <= store_sockets.SILENT_S * 1000


def test_the_limit_of_open_files_is_raised_only_as_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers inherit the limit, so a job of few nodes leaves it as it was."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(store.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(store.resource, "setrlimit", lambda _, limits: asked.append(limits))
    for wanted in (512, 1024, 2000, 100_000):
        store._allow_open_files(wanted)
    assert asked == [(2000, 4096), (4096, 4096)]


CONNECTING = """
import sys
from nvidia_resiliency_ext.fault_tolerance._rendezvous import store
try:
    store._connect_client("127.0.0.1", int(sys.argv[1]), 0.5)
except store.StoreLostError as error:
    print("lost:", error, *({"torch"} & sys.modules.keys()))
"""


def test_a_program_that_is_no_store_is_told_of_in_one_line():
    """What takes connections and says nothing costs one line, and no import of torch."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        done = subprocess.run(
            [sys.executable, "-c", CONNECTING, str(mute.getsockname()[1])],
            env={name: v for name, v in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.stdout.startswith("lost: "), done.stderr
    assert "torch" not in done.stdout
