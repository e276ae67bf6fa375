# SPDX-License-Identifier: Apache-2.0
"""The client of the log funnel over real gRPC, against a server that behaves as the test wants."""

import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import funnel_peers as peers
import grpc
import ports
import pytest
from funnel_peer import FunnelPeer
from results import no_second_try

from nvidia_resiliency_ext.shared_utils._funnel.client import limits
from nvidia_resiliency_ext.shared_utils._funnel.client.send_buffer import SendBuffer
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import (
    ConfigError,
    DeadlineExceededError,
    LogFunnelClosedError,
    LogTargetRefusedError,
)
from nvidia_resiliency_ext.shared_utils.grpc_log_client import FunnelTls, LogFunnelClient
from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as messages

pytestmark = pytest.mark.slow

Connect = Callable[..., LogFunnelClient]
MIB = 1024 * 1024
_DEADLINE_S = 60.0


@pytest.fixture
def claimed_address() -> Iterator[str]:
    """Give an address that stays the test's between two servers."""
    with ports.claimed() as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def start_peer(tmp_path: Path) -> Iterator[Callable[..., FunnelPeer]]:
    """Start servers, and stop them before the directory of their files goes."""
    started: list[FunnelPeer] = []

    def start(address: str = "127.0.0.1:0", credentials: Any = None, **how: Any) -> FunnelPeer:
        started.append(FunnelPeer(**how).start(address, credentials))
        return started[-1]

    yield start
    for peer in started:
        peer.stop()


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Make clients, and close them."""
    made: list[LogFunnelClient] = []

    def build(endpoint: str, **settings: Any) -> LogFunnelClient:
        given = {"node_id": "node7", "spill_dir": str(tmp_path / "spill"), **settings}
        made.append(LogFunnelClient(endpoint, **given))
        return made[-1]

    yield build
    for client in made:
        client.close(0.0)


def messages_of(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def wait_for_message(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until the client, whose threads take their time, has said something."""
    limit = time.monotonic() + _DEADLINE_S
    while not any(text in line for line in messages_of(caplog)):
        assert time.monotonic() < limit, f"not said: {text}"
        threading.Event().wait(0.01)


@pytest.fixture(autouse=True)
def _catch_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("nvrx")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.DEBUG, "nvrx")


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_lines_arrive(
    start_peer: Callable[..., FunnelPeer],
    connect: Connect,
    tmp_path: Path,
    socket_folder: Path,
    kind: str,
) -> None:
    """What is written to a target stands in its file when `flush` returns, over TCP and Unix."""
    peer = start_peer(*([f"unix:{socket_folder}/funnel.sock"] if kind == "unix" else []))
    log = tmp_path / "a.log"
    client = connect(peer.endpoint)
    target = client.open(str(log))
    assert client.open(str(log)) is target
    target.write(b"one\ntwo\nthr")
    target.flush(20.0)
    assert log.read_bytes() == b"one\ntwo\n"
    target.write(bytearray(b"ee\n"))
    target.write(memoryview(b"last"))
    assert target.close(20.0)
    assert log.read_bytes() == b"one\ntwo\nthree\nlast\n"
    assert {chunk.node_id for chunk in peer.chunks} == {"node7"}
    stats = client.stats
    assert (stats.lines_taken, stats.lines_confirmed, stats.bytes_in_memory) == (4, 4, 0)
    assert client.close()
    with pytest.raises(LogFunnelClosedError):
        target.write(b"late\n")
    with pytest.raises(LogFunnelClosedError):
        client.open("/other.log")


def test_server_that_does_not_end_the_call(
    start_peer: Callable[..., FunnelPeer], connect: Connect, tmp_path: Path
) -> None:
    """`close` does not wait for a server that has confirmed everything and holds the call open."""
    peer = start_peer()
    peer.may_end.clear()
    target = connect(peer.endpoint).open(str(tmp_path / "a.log"))
    target.write(b"x\n")
    began = time.monotonic()
    assert target.close(60.0)
    assert time.monotonic() - began < 20.0


def test_connects_before_the_first_line(
    start_peer: Callable[..., FunnelPeer], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a target connects at once, without a line and without a random wait."""
    for name in ("_FIRST_S", "_LONGEST_S"):
        monkeypatch.setattr(limits, name, 1e6)  # a wait would be longer than any test
    peer = start_peer()
    connect(peer.endpoint).open("/a.log")
    peer.wait_for_calls(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_flush_ends_with_its_sender_thread(
    start_peer: Callable[..., FunnelPeer], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush without a deadline does not wait for a sender thread that a bug has ended."""

    def fail(*_: Any) -> None:
        raise ValueError("unforeseen")

    monkeypatch.setattr(SendBuffer, "_make_call", fail)
    target = connect(start_peer().endpoint).open("/logs/job.log")
    target.write(b"a line\n")
    with pytest.raises(DeadlineExceededError):
        target.flush(None)


def test_many_threads(
    start_peer: Callable[..., FunnelPeer], connect: Connect, tmp_path: Path
) -> None:
    """Whole lines of many threads stay whole, and those of each thread in order."""
    target = connect(start_peer().endpoint).open(str(tmp_path / "a.log"))

    def write(name: int) -> None:
        for number in range(5000):
            target.write(b"%d %d\n" % (name, number))

    threads = [threading.Thread(target=write, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.close(30.0)
    found: dict[bytes, list[int]] = {}
    for line in (tmp_path / "a.log").read_bytes().splitlines():
        name, number = line.split()
        found.setdefault(name, []).append(int(number))
    assert list(found.values()) == [list(range(5000))] * 8


def test_many_targets_and_one_refused(
    start_peer: Callable[..., FunnelPeer],
    connect: Connect,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file that the server refuses is told in one line and by `write`; others go on."""

    def refuses(path: str) -> tuple[grpc.StatusCode, str] | None:
        if "bad" in path:
            return grpc.StatusCode.INVALID_ARGUMENT, "outside of all roots"
        return None

    peer = start_peer(refuses=refuses)
    client = connect(peer.endpoint)
    good, bad = client.open(str(tmp_path / "good.log")), client.open(str(tmp_path / "bad.log"))
    bad.write(b"x\n")
    with pytest.raises(LogTargetRefusedError, match="outside of all roots"):
        bad.flush(20.0)
    with pytest.raises(LogTargetRefusedError):
        bad.write(b"y" * 65537)
    good.write(b"fine\n")
    good.flush(20.0)
    assert not bad.close(5.0)
    assert client.close(20.0)
    assert len([line for line in messages_of(caplog) if "refuses" in line]) == 1
    assert client.stats.lines_dropped >= 1


def test_refused_lines_are_counted_when_dropping(
    start_peer: Callable[..., FunnelPeer], connect: Connect, tmp_path: Path
) -> None:
    """With `drop-oldest` a refused target raises nothing; its lines are counted as dropped."""
    refusal = (grpc.StatusCode.INVALID_ARGUMENT, "no")
    target = connect(start_peer(refuses=lambda _: refusal).endpoint, when_full="drop-oldest").open(
        "/bad.log"
    )
    target.write(b"x\n")
    with pytest.raises(LogTargetRefusedError):
        target.flush(20.0)
    for _ in range(1000):
        target.write(b"y" * 999 + b"\n")
    assert not target.close(5.0)
    assert target.stats.lines_dropped == 1001
    assert target.stats.bytes_in_memory == 0


def test_wrong_token(
    start_peer: Callable[..., FunnelPeer],
    connect: Connect,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong token gives one clear line and no loop of tries; the right one is let in."""
    peer = start_peer(token="right")
    token = tmp_path / "token"
    token.write_text("wrong\n")
    token.chmod(0o600)
    client = connect(peer.endpoint, token_file=str(token))
    for name in "ab":
        client.open(str(tmp_path / name)).write(b"x\n")
    peer.wait_for_calls(2)
    wait_for_message(caplog, "does not let us in")
    with pytest.raises(DeadlineExceededError):
        client.flush(1.5)
    assert peer.calls == 2
    (line,) = messages_of(caplog)
    assert "does not let us in (UNAUTHENTICATED: wrong token)" in line
    assert peer.endpoint in line
    client.close(0.0)
    token.write_text("right\n")
    again = connect(peer.endpoint, token_file=str(token))
    again.open(str(tmp_path / "a"))
    again.flush(20.0)
    # What the first client left has come first.
    assert (tmp_path / "a").read_bytes() == b"x\n"


def test_a_token_that_changed_is_shown_at_once_on_request(
    start_peer: Callable[..., FunnelPeer], connect: Connect, tmp_path: Path
) -> None:
    """A client that was refused tries again when it is told so, and not half a minute later."""
    peer = start_peer(token="right")
    token = tmp_path / "token"
    token.write_text("wrong\n")
    token.chmod(0o600)
    client = connect(peer.endpoint, token_file=str(token))
    client.open(str(tmp_path / "a")).write(b"x\n")
    with peer.has_called:
        assert peer.has_called.wait_for(lambda: peer.calls, 20.0)
    token.write_text("right\n")
    client.try_again()
    client.flush(15.0)
    assert (tmp_path / "a").read_bytes() == b"x\n"


def test_token_from_the_environment(
    start_peer: Callable[..., FunnelPeer],
    connect: Connect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an argument the token comes from the file that the environment names."""
    (tmp_path / "token").write_text("right")
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("NVRX_LOG_FUNNEL_TOKEN_FILE", str(tmp_path / "token"))
    target = connect(start_peer(token="right").endpoint).open(str(tmp_path / "a.log"))
    target.write(b"x\n")
    assert target.close(20.0)


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda chunk: messages.Ack(stream_id=chunk.stream_id, committed_seq=chunk.seq + 1000),
        lambda chunk: messages.Ack(stream_id="another", committed_seq=chunk.seq),
        lambda chunk: messages.Ack(stream_id=chunk.stream_id, committed_seq=2**64 - 1),
    ],
    ids=["future", "another stream", "largest number"],
)
def test_nonsense_confirms_nothing(
    start_peer: Callable[..., FunnelPeer],
    connect: Connect,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    nonsense: Callable[[Any], Any],
) -> None:
    """Confirmations of what was never sent are ignored, counted and told once."""
    peer = start_peer(answer=nonsense)
    target = connect(peer.endpoint).open(str(tmp_path / "a.log"))
    for number in range(3):
        target.write(b"%d\n" % number)
        with pytest.raises(DeadlineExceededError):
            target.flush(0.2)
        peer.wait_for_chunks(number + 1)
    wait_for_message(caplog, "never sent")
    assert target.stats.lines_confirmed == 0
    peer.answer = lambda chunk: messages.Ack(stream_id=chunk.stream_id, committed_seq=chunk.seq)
    target.write(b"3\n")
    assert target.close(20.0)
    assert (tmp_path / "a.log").read_bytes() == b"0\n1\n2\n3\n"
    assert len([line for line in messages_of(caplog) if "never sent" in line]) == 1


def test_older_server(
    start_peer: Callable[..., FunnelPeer],
    connect: Connect,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server without acknowledged streams gets plain ones; their end is the confirmation."""
    peer = start_peer(knows_acks=False)
    target = connect(peer.endpoint).open(str(tmp_path / "a.log"))
    for round_number in range(3):
        for number in range(1000):
            target.write(b"%d %d\n" % (round_number, number))
        target.flush(20.0)
        assert target.stats.lines_confirmed == 1000 * (round_number + 1)
    target.write(b"idle\n")  # the stream ends by itself when nothing more comes
    limit = time.monotonic() + 20.0
    while target.stats.lines_confirmed < 3001 and time.monotonic() < limit:
        peer.wait_for_chunks(1)
    assert target.close(20.0)
    lines = (tmp_path / "a.log").read_bytes().splitlines()
    assert lines[:-1] == [b"%d %d" % (one, two) for one in range(3) for two in range(1000)]
    assert len([line for line in messages_of(caplog) if "no acknowledged" in line]) == 1


def test_something_that_is_no_log_server(
    connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A gRPC server without the service is told once and not asked in a loop."""
    from concurrent import futures

    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        target = connect(f"127.0.0.1:{port}").open(str(tmp_path / "a.log"))
        target.write(b"x\n")
        wait_for_message(caplog, "does not let us in")
        with pytest.raises(DeadlineExceededError, match="1 lines"):
            target.flush(1.0)
        assert target.stats.reconnects == 1
        assert not target.close(0.0)
    finally:
        server.stop(0).wait()
    lines = [line for line in messages_of(caplog) if "does not let us in" in line]
    assert len(lines) == 1
    assert "UNIMPLEMENTED" in lines[0]


def test_block_waits_and_gives_up(
    start_peer: Callable[..., FunnelPeer], connect: Connect, tmp_path: Path
) -> None:
    """With `block` a full client makes `write` wait, at most its time; then nothing was taken."""
    peer = start_peer()
    peer.may_read.clear()
    client = connect(
        peer.endpoint,
        memory_limit_bytes=MIB,
        spill_limit_bytes=MIB,
        write_timeout_s=0.3,
    )
    target = client.open(str(tmp_path / "a.log"))
    taken = 0

    def fill() -> None:
        nonlocal taken
        for number in range(10_000):
            target.write(b"%08d" % number + b"x" * 991 + b"\n")
            taken += 1

    with pytest.raises(DeadlineExceededError, match="does not confirm any"):
        fill()
    assert 1500 < taken < 3500
    peer.may_read.set()
    target.flush(30.0)  # it has space once the server confirms, however late that is
    target.write(b"%08d" % taken + b"x" * 991 + b"\n")
    assert target.close(30.0)
    lines = (tmp_path / "a.log").read_bytes().splitlines()
    assert [int(line[:8]) for line in lines] == list(range(taken + 1))


def test_waiting_writer_is_woken(
    start_peer: Callable[..., FunnelPeer], connect: Connect, tmp_path: Path
) -> None:
    """A writer that waits for space ends its wait when the target is closed."""
    peer = start_peer()
    peer.may_read.clear()
    client = connect(peer.endpoint, memory_limit_bytes=MIB, spill_limit_bytes=0)
    target = client.open(str(tmp_path / "a.log"))
    ended: list[BaseException] = []
    is_full = threading.Event()

    def write() -> None:
        try:
            for number in range(100):
                target.write(b"x" * 65535 + b"\n")
                if number >= 14:
                    is_full.set()
        except LogFunnelClosedError as error:
            ended.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    assert is_full.wait(20.0)
    target.close(0.0)
    writer.join(20.0)
    assert ended


def test_drop_oldest_never_waits(
    start_peer: Callable[..., FunnelPeer], connect: Connect, tmp_path: Path
) -> None:
    """With `drop-oldest` a stuck server costs old lines, which are counted in the log, not time."""
    peer = start_peer()
    peer.may_read.clear()
    client = connect(
        peer.endpoint,
        memory_limit_bytes=MIB,
        spill_limit_bytes=4 * MIB,
        when_full="drop-oldest",
    )
    target = client.open(str(tmp_path / "a.log"))
    began = time.monotonic()
    for number in range(20_000):
        target.write(b"%08d" % number + b"x" * 991 + b"\n")
    assert time.monotonic() - began < 20.0
    assert target.stats.bytes_in_memory <= MIB + 256 * 1024
    assert client.stats.bytes_in_spill <= 4 * MIB
    peer.may_read.set()
    assert target.close(30.0)
    dropped, numbers = 0, []
    for line in (tmp_path / "a.log").read_bytes().splitlines():
        if line.startswith(b"[nvrx] dropped "):
            dropped += int(line.split()[2])
        else:
            numbers.append(int(line[:8]))
    assert dropped == target.stats.lines_dropped > 10_000
    with no_second_try():
        assert len(numbers) + dropped == 20_000
        assert numbers == sorted(set(numbers))
    assert numbers[-3000:] == list(range(17_000, 20_000))


def test_long_lines(
    start_peer: Callable[..., FunnelPeer], connect: Connect, tmp_path: Path
) -> None:
    """A line of more than 1 MiB arrives in several lines, in one call or many, nothing missing."""
    target = connect(start_peer().endpoint).open(str(tmp_path / "a.log"))
    target.write(b"a" * (3 * MIB + 5) + b"\nshort\n")
    for _ in range(50):
        target.write(b"b" * 50_000)
    target.write(b"\n")
    assert target.close(30.0)
    content = (tmp_path / "a.log").read_bytes()
    with no_second_try():
        assert (content.count(b"a"), content.count(b"b")) == (3 * MIB + 5, 2_500_000)
    assert max(map(len, content.splitlines())) <= MIB
    assert b"\nshort\n" in content


def test_storm(
    start_peer: Callable[..., FunnelPeer], connect: Connect, tmp_path: Path, claimed_address: str
) -> None:
    """Fifty clients that lose their server come back spread over time, and lose nothing."""
    peer = start_peer(claimed_address)
    targets = [connect(peer.endpoint).open(str(tmp_path / str(n))) for n in range(20)]
    for target in targets:
        target.write(b"before\n")
        target.flush(20.0)
    peer.stop()
    for target in targets:
        target.write(b"while away\n")
        with pytest.raises(DeadlineExceededError):
            target.flush(0.05)
    again = start_peer(claimed_address)
    for target in targets:
        assert target.close(30.0)
    assert again.calls <= 3 * len(targets)
    with no_second_try():
        for number in range(20):
            assert (tmp_path / str(number)).read_bytes() == b"before\nwhile away\n"


def test_left_behind_at_close(
    start_peer: Callable[..., FunnelPeer],
    connect: Connect,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is not confirmed at the end of a client waits in private files for the next one."""
    log = tmp_path / "a.log"
    peer = start_peer()
    client = connect(peer.endpoint, spill_name="job")
    target = client.open(str(log))
    target.write(b"arrived\n")
    target.flush(20.0)
    peer.may_read.clear()
    for number in range(1000):
        target.write(b"%d\n" % number)
    target.write(b"part")
    assert not client.close(0.2)
    assert "1001 lines" in messages_of(caplog)[-1]
    assert str(tmp_path / "spill") in messages_of(caplog)[-1]
    for path in (tmp_path / "spill").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    peer.may_read.set()
    assert connect(peer.endpoint, spill_name="another job").left_behind() == []
    successor = connect(peer.endpoint, spill_name="job")
    assert successor.left_behind() == [str(log)]
    again = successor.open(str(log))
    assert successor.left_behind() == []
    again.write(b"new\n")
    assert again.close(20.0)
    expected = [b"arrived", *(b"%d" % number for number in range(1000)), b"part", b"new"]
    with no_second_try():
        assert log.read_bytes().splitlines() == expected
    assert not (tmp_path / "spill").exists()


def test_no_files_wanted(
    start_peer: Callable[..., FunnelPeer],
    connect: Connect,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without files what is not confirmed at the end is lost, and one line says how much."""
    peer = start_peer()
    peer.may_read.clear()
    client = connect(peer.endpoint, spill_limit_bytes=0)
    client.open(str(tmp_path / "a.log")).write(b"x\ny\n")
    assert not client.close(0.2)
    assert "2 lines (4 bytes)" in messages_of(caplog)[-1]
    assert "are lost" in messages_of(caplog)[-1]
    assert not (tmp_path / "spill").exists()


def test_logging_through_the_funnel(
    start_peer: Callable[..., FunnelPeer], connect: Connect, tmp_path: Path, claimed_address: str
) -> None:
    """A handler of our own logger may write to a target: what the client says cannot block it."""
    peer = start_peer(claimed_address)
    target = connect(peer.endpoint, memory_limit_bytes=MIB).open(str(tmp_path / "a.log"))

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            target.write(self.format(record).encode() + b"\n")

    handler = Handler()
    logging.getLogger("nvrx").addHandler(handler)
    try:
        peer.stop()
        for _ in range(2000):
            target.write(b"x" * 999 + b"\n")
        again = start_peer(claimed_address)
        target.flush(30.0)
        again.stop()
    finally:
        logging.getLogger("nvrx").removeHandler(handler)
    target.close(0.0)
    assert b"log lines for" in (tmp_path / "a.log").read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"endpoint": "nowhere"}, "neither host:port nor unix:"),
        ({"endpoint": "h:0"}, "neither host:port nor unix:"),
        ({"endpoint": "h:65536"}, "neither host:port nor unix:"),
        ({"endpoint": "unix:relative"}, "not an absolute path"),
        ({"endpoint": "unix:/" + "x" * 200}, "not an absolute path"),
        ({"when_full": "panic"}, "neither 'block' nor 'drop-oldest'"),
        ({"memory_limit_bytes": 1000}, "memory_limit_bytes=1000 is below"),
        ({"spill_limit_bytes": -1}, "is negative"),
        ({"write_timeout_s": -1.0}, "no time to wait"),
        ({"write_timeout_s": float("nan")}, "no time to wait"),
        ({"token_file": "/nowhere/token"}, "/nowhere/token"),
        ({"tls": FunnelTls("/nowhere/ca.pem")}, "ca_file '/nowhere/ca.pem'"),
        ({"tls": FunnelTls("/ca", cert_file="/cert")}, "go together"),
        ({"tls": FunnelTls(None)}, "ca_file is empty"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    """A wrong setting is an error at construction that names it, and nothing is left running."""
    endpoint = settings.pop("endpoint", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=message):
        LogFunnelClient(endpoint, **settings)


@pytest.mark.parametrize(
    "path",
    ["relative", "/a\nb", "/a\0b", "/a\ud800", "", "/x" * 2001, "/a/" + "\xe9" * 116 + "/b"],
)
def test_paths_that_make_no_sense(connect: Connect, path: str) -> None:
    """A path that no server would take is an error where it is given."""
    with pytest.raises(ConfigError, match="the log target"):
        connect("127.0.0.1:1").open(path)


def test_forked_child(
    start_peer: Callable[..., FunnelPeer], connect: Connect, tmp_path: Path
) -> None:
    """A forked child is told to open its own client; the parent's lines are not touched by it."""
    peer = start_peer()
    program = f"""
import os, sys
from nvidia_resiliency_ext.shared_utils.errors import LogFunnelClosedError
from nvidia_resiliency_ext.shared_utils.grpc_log_client import LogFunnelClient
client = LogFunnelClient({peer.endpoint!r}, node_id="n", spill_dir={str(tmp_path / "spill")!r})
target = client.open({str(tmp_path / "a.log")!r})
target.write(b"before\\n")
child = os.fork()
if child == 0:
    for call in (lambda: target.write(b"child\\n"), lambda: target.flush(1.0),
                 lambda: client.open("/other.log")):
        try:
            call()
        except LogFunnelClosedError as error:
            assert "open a client of your own" in str(error) or "make one of your own" in str(error)
        else:
            sys.exit("no error")
    assert client.close(1.0) and target.close(1.0)
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
target.write(b"after\\n")
assert client.close(20.0)
"""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "a.log").read_bytes() == b"before\nafter\n"


def test_program_that_forgets_to_close(
    start_peer: Callable[..., FunnelPeer], tmp_path: Path
) -> None:
    """A program that ends without closing its client has its lines sent all the same."""
    peer = start_peer()
    writer = Path(__file__).parent / "programs" / "funnel_writer.py"
    log = str(tmp_path / "a.log")
    command = [sys.executable, str(writer), peer.endpoint, log, "--lines=500", "--rate=1e9"]
    run = subprocess.run(
        [*command, "--close=forget", f"--spill-dir={tmp_path / 'spill'}"],
        timeout=150,
        check=False,
        capture_output=True,
    )
    assert run.returncode == 0, run.stderr
    assert len(Path(log).read_bytes().splitlines()) == 500


def test_without_grpc() -> None:
    """Without gRPC the module imports, and a client says what to install."""
    program = """
import sys
sys.modules["grpc"] = None
from nvidia_resiliency_ext.shared_utils import grpc_log_client
try:
    grpc_log_client.LogFunnelClient("127.0.0.1:1")
except ImportError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False
    )
    assert "run: pip install nvrx-common[grpc]" in run.stdout, run.stderr


def make_certificates(directory: Path) -> None:
    """Make an authority, and certificates for a server and a client."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=directory, check=True, capture_output=True)

    request = ["req", "-newkey", "rsa:2048", "-nodes", "-subj"]
    run(*request, "/CN=authority", "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    (directory / "names").write_text("subjectAltName=DNS:logs.test")
    for name in ("server", "client"):
        run(*request, "/CN=logs.test", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        sign = ["x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"]
        run(*sign, "-CAcreateserial", "-days", "2", "-extfile", "names", "-out", f"{name}.pem")


def test_certificates_that_changed_are_shown_to_the_next_server(
    start_peer: Callable[..., FunnelPeer], connect: Connect, tmp_path: Path
) -> None:
    """A client goes on after server and client have got certificates of a new authority."""
    folders = [tmp_path / name for name in ("used", "next")]
    for folder in folders:
        folder.mkdir()
        make_certificates(folder)
    used, later = folders

    def server_of(address: str) -> FunnelPeer:
        pair = ((used / "server.key").read_bytes(), (used / "server.pem").read_bytes())
        authority = (used / "ca.pem").read_bytes()
        credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=True)
        return start_peer(address, credentials)

    first = server_of("127.0.0.1:0")
    files = [str(used / name) for name in ("ca.pem", "client.pem", "client.key")]
    client = connect(first.endpoint, tls=FunnelTls(*files, server_name="logs.test"))
    target = client.open(str(tmp_path / "a.log"))
    target.write(b"one\n")
    target.flush(30.0)
    first.stop()
    for file in later.iterdir():
        file.replace(used / file.name)
    server_of(first.endpoint)
    target.write(b"two\n")
    target.flush(50.0)
    assert (tmp_path / "a.log").read_bytes() == b"one\ntwo\n"


def test_mutual_tls(
    start_peer: Callable[..., FunnelPeer],
    connect: Connect,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Client and server show certificates; a client without one is not let in and says why."""
    make_certificates(tmp_path)
    pair = ((tmp_path / "server.key").read_bytes(), (tmp_path / "server.pem").read_bytes())
    credentials = grpc.ssl_server_credentials(
        [pair], (tmp_path / "ca.pem").read_bytes(), require_client_auth=True
    )
    peer = start_peer(credentials=credentials)
    ca = str(tmp_path / "ca.pem")
    uncertified = connect(peer.endpoint, tls=FunnelTls(ca, server_name="logs.test"))
    uncertified.open(str(tmp_path / "b.log")).write(b"x\n")
    wait_for_message(caplog, "is away (UNAVAILABLE")
    with pytest.raises(DeadlineExceededError):
        uncertified.flush(1.0)
    assert not uncertified.close(0.0)
    tls = FunnelTls(
        ca, str(tmp_path / "client.pem"), str(tmp_path / "client.key"), server_name="logs.test"
    )
    target = connect(peer.endpoint, tls=tls).open(str(tmp_path / "a.log"))
    target.write(b"secret\n")
    assert target.close(20.0)
    assert (tmp_path / "a.log").read_bytes() == b"secret\n"


def test_a_slow_close_leaves_the_newly_opened_path_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads close a target and a third opens its path again: its lines are kept."""
    client = LogFunnelClient("127.0.0.1:9", spill_dir=str(tmp_path), spill_limit_bytes=1 << 20)
    target = client.open("/x/o.log")
    target.write(b"one\n")
    close, late, may_go, calls = SendBuffer.close, threading.Event(), threading.Event(), []

    def held_up(send_buffer: SendBuffer, deadline: Deadline) -> None:
        close(send_buffer, deadline)
        calls.append(deadline)
        if len(calls) == 2:
            late.set()
            may_go.wait(60)

    monkeypatch.setattr(SendBuffer, "close", held_up)
    closers = [threading.Thread(target=target.close, args=(0.1,)) for _ in range(2)]
    for closer in closers:
        closer.start()
    assert late.wait(20)
    peers.until(lambda: sum(closer.is_alive() for closer in closers) == 1, "the faster one")
    client.open("/x/o.log").write(b"two\n")
    may_go.set()
    for closer in closers:
        closer.join(20)
    monkeypatch.undo()
    assert client.close(0.2) is False
    assert client.left_behind() == ["/x/o.log"]
