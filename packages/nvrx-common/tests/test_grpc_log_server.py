# SPDX-License-Identifier: Apache-2.0
"""The root of the log funnel as a process, with the real gRPC over TCP and Unix sockets."""

import os
import platform
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="needs the extra grpc of nvrx-common")
pytest.importorskip("google.protobuf", reason="needs the extra grpc of nvrx-common")

import funnel_peers as peers
import grpc
from funnel_peers import chunk, send, send_acked

from nvidia_resiliency_ext.shared_utils import grpc_log_server
from nvidia_resiliency_ext.shared_utils._funnel.server import files
from nvidia_resiliency_ext.shared_utils._funnel.server.queue import FunnelOptions
from nvidia_resiliency_ext.shared_utils.grpc_log_server import LogAggregationServicer
from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as pb

pytestmark = pytest.mark.slow

TOKEN = "s3cret-of-the-job"
SERVICE = "/nvidia_resiliency_ext.fault_tolerance.LogAggregationService/"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[peers.Server]:
    with peers.root(tmp_path) as made:
        yield made.start()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def health(address: str, **kwargs) -> pb.HealthResponse:
    with peers.stub(address) as stub:
        return stub.HealthCheck(pb.HealthRequest(), timeout=60, **kwargs)


# --- the wire


def test_stream_and_health(server: peers.Server, logs: Path) -> None:
    """Chunks come to the files that they name; the answer counts bytes that are in them."""
    answer = send(server.address, *(chunk(logs / "a/b.log", b"%d\n" % i) for i in range(9)))
    assert (answer.status, answer.bytes_received) == ("OK", 18)
    assert (logs / "a/b.log").read_bytes() == b"".join(b"%d\n" % i for i in range(9))
    assert health(server.address) == pb.HealthResponse(healthy=True)


def test_wire_numbers() -> None:
    """Fields and methods have the numbers and names that peers of other makes use."""
    numbers = {
        m: {f.name: f.number for f in pb.DESCRIPTOR.message_types_by_name[m].fields}
        for m in ("LogChunk", "StreamResponse", "HealthResponse", "Ack")
    }
    assert numbers == {
        "LogChunk": {
            "node_id": 1, "data": 2, "file_path": 3, "stream_id": 100, "seq": 101, "resumed": 102,
        },
        "StreamResponse": {"status": 1, "bytes_received": 2, "committed_seq": 100},
        "HealthResponse": {"healthy": 1, "connected_clients": 2},
        "Ack": {"stream_id": 1, "committed_seq": 2, "refusal": 100, "reason": 101},
    }  # fmt: skip
    service = pb.DESCRIPTOR.services_by_name["LogAggregationService"]
    assert service.full_name == "nvidia_resiliency_ext.fault_tolerance.LogAggregationService"
    assert [m.name for m in service.methods][:3] == ["StreamLogs", "StreamLogsAcked", "HealthCheck"]


def test_other_protos() -> None:
    """The node daemon's and the cycle's messages have the contract's names and numbers."""
    from nvidia_resiliency_ext.shared_utils.proto import nvhcd_pb2, nvrx_interface_pb2

    info = nvrx_interface_pb2.NVRxCycleInfo.DESCRIPTOR
    assert info.full_name == "nvidia_resiliency_ext.fault_tolerance.NVRxCycleInfo"
    assert [(f.name, f.number) for f in info.fields] == [
        ("job_id", 1), ("attempt_index", 2), ("cycle_number", 3), ("cycle_start_time", 4),
        ("cycle_end_time", 5), ("cycle_log_file", 6), ("active_nodes", 7), ("standby_nodes", 8),
        ("generation", 9), ("active_ranks", 10),
    ]  # fmt: skip
    assert nvhcd_pb2.DESCRIPTOR.services_by_name["HealthCheckService"].full_name == (
        "nvhcd.HealthCheckService"
    )
    response = nvhcd_pb2.HealthCheckResponse.DESCRIPTOR
    assert [f.name for f in response.fields] == ["success", "exit_code", "output", "error"]


def test_acknowledged_stream(server: peers.Server, logs: Path) -> None:
    """While the stream is open, acknowledgements say what is in the file; repeats are dropped."""
    with peers.stub(server.address) as stub:
        stream = peers.OpenStream(stub, acked=True)
        for seq in range(1, 4):
            stream.write(chunk(logs / "x.log", b"%d\n" % seq, "0", "s", seq))
            peers.until(lambda seq=seq: stream.committed("s") == seq, "the acknowledgement")
            assert (logs / "x.log").read_bytes().endswith(b"%d\n" % seq)
        stream.close()
        assert stream.error is None
    again = [chunk(logs / "x.log", b"%d\n" % seq, "0", "s", seq) for seq in range(1, 6)]
    assert send_acked(server.address, *again) == {"s": 5}
    assert (logs / "x.log").read_bytes() == b"1\n2\n3\n4\n5\n"
    with peers.stub(server.address) as stub:
        assert stub.Stats(pb.StatsRequest()).chunks_repeated == 3


def test_sender_sees_at_once_that_the_method_exists(server: peers.Server) -> None:
    """The call's metadata comes before any chunk, so a client need not guess."""
    with peers.stub(server.address) as stub:
        stream = peers.OpenStream(stub, acked=True)
        assert stream.call.initial_metadata() is not None
        stream.close()


def test_stats_of_open_streams(server: peers.Server, logs: Path) -> None:
    """Stats names each open stream with what it has sent and what is committed."""
    with peers.stub(server.address) as stub:
        stream = peers.OpenStream(stub, acked=True)
        stream.write(chunk(logs / "x.log", b"line\n", "n7", "s", 1))
        peers.until(lambda: stream.committed("s") == 1, "the acknowledgement")
        found = stub.Stats(pb.StatsRequest())
        assert (found.connected_clients, found.bytes_written, found.files) == (1, 5, 1)
        client = found.clients[0]
        assert (client.node_id, client.stream_id) == ("n7", "s")
        assert (client.last_seq, client.committed_seq, client.bytes_behind) == (1, 1, 0)
        stream.close()


def test_unix_socket(tmp_path: Path, socket_folder: Path, logs: Path) -> None:
    """The same service answers on a Unix socket."""
    with peers.root(tmp_path, "--host", f"unix:{socket_folder}/s.sock") as server:
        server.start()
        assert send(f"unix:{socket_folder}/s.sock", chunk(logs / "x.log", b"x\n")).status == "OK"
    assert (logs / "x.log").read_bytes() == b"x\n"


# --- bad input


@pytest.mark.parametrize("method", [send, send_acked])
def test_bad_paths(server: peers.Server, logs: Path, tmp_path: Path, method) -> None:
    """Whatever path a sender names, nothing is made outside, it is told why, and others go on."""
    (logs / "d").mkdir()
    (tmp_path / "outside").mkdir()
    (logs / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(logs / "fifo")
    before = sorted(tmp_path.rglob("*"))
    for path in (
        "", "relative.log", f"{logs}/../evil", f"{tmp_path}/evil", "/dev/full", "/dev/null",
        f"{logs}/d", f"{logs}/link/x", f"{logs}/fifo", f"{logs}/nl\nx", f"{logs}/nul\0x", str(logs),
    ):  # fmt: skip
        found = method(server.address, chunk(path, b"PWNED\n"))
        assert isinstance(found, tuple), path
        assert found[0] == "INVALID_ARGUMENT", path
    assert sorted(tmp_path.rglob("*")) == before
    assert not isinstance(
        method(server.address, chunk(logs / "ok.log", b"x\n", "0", "s", 1)), tuple
    )


def test_what_came_before_a_refused_chunk_is_written(server: peers.Server, logs: Path) -> None:
    """A refused chunk ends its stream with an error; what was before it is written."""
    with peers.stub(server.address) as stub:
        stream = peers.OpenStream(stub, acked=True)
        stream.write(chunk(logs / "x.log", b"1\n", "0", "s", 1))
        stream.write(chunk("/etc/x", b"2\n", "0", "s", 2))
        stream.close()
        assert stream.error.code() is grpc.StatusCode.INVALID_ARGUMENT
    peers.until((logs / "x.log").exists, "the first chunk's file")


def _raw(address: str, *messages: bytes, method: str = "StreamLogs"):
    with peers.channel(address) as made:
        call = made.stream_unary(SERVICE + method)
        try:
            return call(iter(messages), timeout=60)
        except grpc.RpcError as error:
            return error.code().name


def test_garbage_ends_its_own_stream_only(server: peers.Server, logs: Path) -> None:
    """Random bytes and invalid UTF-8 in place of messages hurt nobody else."""
    rng = random.Random(5)
    good = chunk(logs / "x.log", b"data\n", "0", "", 0).SerializeToString()
    with peers.stub(server.address) as stub:
        bystander = peers.OpenStream(stub)
        for number in range(150):
            raw = bytearray(good)
            for _ in range(rng.randrange(1, 5)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            _raw(server.address, bytes(raw) if number % 3 else rng.randbytes(number))
        assert _raw(server.address, b"\x1a\x02\xff\xfe") == "INVALID_ARGUMENT"
        bystander.write(chunk(logs / "bystander.log", b"here\n"))
        bystander.close()
        assert bystander.answer.status == "OK"
    assert (logs / "bystander.log").read_bytes() == b"here\n"
    # A sender may hear of its refusal a moment before its stream is taken out of the count.
    peers.until(lambda: health(server.address).connected_clients == 0, "no stream")
    assert server.stop() == 0


def test_bytes_that_are_no_grpc(server: peers.Server, logs: Path) -> None:
    """Somebody who does not speak HTTP/2 at all is no harm."""
    host, _, port = server.address.rpartition(":")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, os.urandom(5000)):
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(data)
    assert send(server.address, chunk(logs / "x.log", b"x\n")).status == "OK"


def test_oversize_chunk(server: peers.Server, logs: Path) -> None:
    """A chunk over 10 MiB is refused; one just below arrives."""
    large = chunk(logs / "x.log", b"z" * (10 << 20))
    assert send(server.address, large)[0] == "RESOURCE_EXHAUSTED"
    data = b"z" * ((10 << 20) - 1000) + b"\n"
    assert send(server.address, chunk(logs / "y.log", data)).bytes_received == len(data)
    assert (logs / "y.log").stat().st_size == len(data)


def test_invalid_utf8_in_the_data_is_kept(server: peers.Server, logs: Path) -> None:
    """Lines are bytes: what is no text comes through unchanged."""
    data = bytes(range(256)) + b"\n"
    assert send(server.address, chunk(logs / "x.log", data)).status == "OK"
    assert (logs / "x.log").read_bytes() == data


def test_silent_and_vanished_clients(server: peers.Server, logs: Path) -> None:
    """Clients that say nothing, and clients that go without a word, keep nobody else out."""
    with peers.stub(server.address) as stub:
        silent = [peers.OpenStream(stub, acked=bool(i % 2)) for i in range(20)]
        peers.until(lambda: health(server.address).connected_clients == 20, "20 streams")
        assert send(server.address, chunk(logs / "x.log", b"x\n")).status == "OK"
        for stream in silent:
            stream.cancel()
    peers.until(lambda: health(server.address).connected_clients == 0, "no stream")


def test_killed_client_loses_nothing_that_it_sent(server: peers.Server, logs: Path) -> None:
    """What a stream has sent before it breaks off is in the file, its line ended."""
    with peers.stub(server.address) as stub:
        stream = peers.OpenStream(stub)
        stream.write(chunk(logs / "x.log", b"whole\nhalf"))
        peers.until((logs / "x.log").exists, "the file")
        stream.cancel()
    peers.until(lambda: (logs / "x.log").read_bytes() == b"whole\nhalf\n", "the line's end")


# --- who may call


@pytest.mark.parametrize("metadata", [None, [("authorization", "Bearer wrong")],
                                      [("authorization", TOKEN)]])  # fmt: skip
def test_wrong_token(tmp_path: Path, logs: Path, token_file: Path, metadata) -> None:
    """Without the job's token every method answers UNAUTHENTICATED; with it all work."""
    env = {"NVRX_LOG_FUNNEL_TOKEN_FILE": str(token_file)}
    with peers.root(tmp_path, "--host", "0.0.0.0", "--port", "0", env=env) as server:
        server.start()
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        item = chunk(logs / "x.log", b"x\n", "0", "s", 1)
        for method in (send, send_acked):
            assert method(address, item, metadata=metadata)[0] == "UNAUTHENTICATED"
        for call in ("HealthCheck", "Stats"):
            with peers.stub(address) as stub, pytest.raises(grpc.RpcError) as caught:
                getattr(stub, call)(pb.HealthRequest(), metadata=metadata, timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert list(logs.iterdir()) == []
        right = [("authorization", f"Bearer {TOKEN}")]
        assert send_acked(address, item, metadata=right) == {"s": 1}
        assert health(address, metadata=right).healthy


def _replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.chmod(0o600)
    new.replace(path)


def test_token_is_replaced_while_the_servers_run(
    tmp_path: Path, logs: Path, token_file: Path
) -> None:
    """A new token counts at once, at the root, at a leaf, and from a leaf to a new root."""
    env = {"NVRX_LOG_FUNNEL_TOKEN_FILE": str(token_file)}
    old, new = ([("authorization", f"Bearer {token}")] for token in (TOKEN, "another"))
    with peers.root(tmp_path, env=env) as root:
        root.start()
        with peers.leaf(tmp_path, root.address, env=env) as leaf:
            leaf.start()
            for seq, right, wrong in ((1, old, new), (2, new, old)):
                if seq == 2:
                    _replace(token_file, b"another")
                for server in (root, leaf):
                    item = chunk(logs / f"{server.module}.log", b"x\n", "0", server.module, seq)
                    assert send_acked(server.address, item, metadata=wrong)[0] == "UNAUTHENTICATED"
                    found = send_acked(server.address, item, metadata=right)
                    assert found == {server.module: seq}
            root.kill()
            root.arguments = (*root.arguments[:-1], root.address.rpartition(":")[2])
            root.start()
            item = chunk(logs / "last.log", b"x\n", "0", "last", 1)
            assert send_acked(leaf.address, item, metadata=new) == {"last": 1}


def _certificates(folder: Path) -> Path:
    """Make an authority, and certificates of a server and a client that it signed."""
    script = """
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 \
      -subj /CN=ca -keyout ca.key -out ca.pem
    for name in server client; do
      openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=$name \
        -keyout $name.key -out $name.csr
      printf 'subjectAltName=DNS:localhost,IP:127.0.0.1' > $name.ext
      openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 1 \
        -extfile $name.ext -out $name.pem
    done
    """
    folder.mkdir()
    try:
        subprocess.run(["sh", "-ec", script], cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"openssl cannot make certificates here: {error}")
    return folder


def test_mutual_tls(tmp_path: Path, logs: Path) -> None:
    """With an authority given, only clients with its certificate get in, and a leaf does."""
    pem = _certificates(tmp_path / "pem")
    tls = ("--tls-cert", f"{pem}/server.pem", "--tls-key", f"{pem}/server.key",
           "--tls-ca", f"{pem}/ca.pem")  # fmt: skip
    read = {p.name: p.read_bytes() for p in pem.iterdir()}
    with peers.root(tmp_path, *tls) as server:
        server.start()
        item = chunk(logs / "x.log", b"x\n")
        for pair, is_in in (
            ((None, None), False),
            ((read["client.key"], read["client.pem"]), True),
        ):
            credentials = grpc.ssl_channel_credentials(read["ca.pem"], *pair)
            with grpc.secure_channel(server.address, credentials) as made:
                stub = peers.service.LogAggregationServiceStub(made)
                if is_in:
                    assert stub.StreamLogs(iter([item]), timeout=60).status == "OK"
                else:
                    with pytest.raises(grpc.RpcError):
                        stub.StreamLogs(iter([item]), timeout=5)
        assert send(server.address, item, timeout=5)[0] in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
        with peers.leaf(tmp_path, server.address, *tls) as leaf:
            leaf.start()


def test_certificates_are_replaced_while_the_servers_run(tmp_path: Path, logs: Path) -> None:
    """Certificates of a new authority count for the next connection, also from a leaf to a root."""
    pem, later = _certificates(tmp_path / "pem"), _certificates(tmp_path / "later")
    tls = ("--tls-cert", f"{pem}/server.pem", "--tls-key", f"{pem}/server.key",
           "--tls-ca", f"{pem}/ca.pem")  # fmt: skip

    def code(server: peers.Server, folder: Path, stream: str) -> str:
        files = (folder / name for name in ("ca.pem", "client.key", "client.pem"))
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
        with grpc.secure_channel(server.address, credentials) as made:
            call = peers.service.LogAggregationServiceStub(made).StreamLogsAcked(
                iter([chunk(logs / "x.log", b"x\n", "0", stream, 1)]), timeout=20
            )
            try:
                return str([*{ack.committed_seq for ack in call}])
            except grpc.RpcError as error:
                return error.code().name

    before = {name: (pem / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem")}
    with peers.root(tmp_path, *tls) as root:
        root.start()
        with peers.leaf(tmp_path, root.address, *tls) as leaf:
            leaf.start()
            assert [code(root, pem, "a"), code(leaf, pem, "b")] == ["[1]", "[1]"]
            for file in later.iterdir():
                _replace(pem / file.name, file.read_bytes())
            assert [code(root, later, "c"), code(leaf, later, "d")] == ["[1]", "[1]"]
            for name, content in before.items():
                _replace(later / name, content)
            assert {code(root, later, "e"), code(leaf, later, "f")} <= {"UNAVAILABLE", "UNKNOWN"}
            root.kill()
            root.arguments = (*root.arguments, "--port", root.address.rpartition(":")[2])
            root.start()
            assert code(leaf, pem, "g") == "[1]"


# --- many streams


def test_idle_streams_hold_nobody_up(server: peers.Server, logs: Path) -> None:
    """With 2000 idle streams, HealthCheck and a new stream answer as ever, in little memory."""
    program = Path(__file__).parent / "programs" / "idle_log_streams.py"
    with subprocess.Popen(
        [sys.executable, str(program), server.address, "2000"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "GRPC_VERBOSITY": "NONE"},
    ) as idle:  # fmt: skip
        assert idle.stdout.readline() == b"open\n"
        peers.until(lambda: health(server.address).connected_clients == 2000, "2000 streams")
        with peers.stub(server.address) as stub:
            took_s = []
            for _ in range(10):
                begin = time.perf_counter()
                stub.HealthCheck(pb.HealthRequest(), timeout=60)
                took_s.append(time.perf_counter() - begin)
            # Ten times the limit on an idle machine, which may hold up any; streams hold up all.
            assert min(took_s) < 1.0
        assert send(server.address, chunk(logs / "x.log", b"x\n")).status == "OK"
        assert len(os.listdir(f"/proc/{server.pid}/task")) < 40
        assert server.rss_mb() < 200
        idle.stdin.close()
        assert idle.wait(20) == 0


def test_memory_is_bounded_when_the_disk_is_slow(tmp_path: Path, logs: Path) -> None:
    """A log that another process holds makes its senders wait, not the server grow."""
    import fcntl

    data = b"z" * 65535 + b"\n"
    with peers.root(tmp_path, "--max-buffered-bytes", str(4 << 20)) as server:
        server.start()
        (logs / "held.log").touch()
        with (logs / "held.log").open("ab") as other, peers.stub(server.address) as stub:
            fcntl.flock(other, fcntl.LOCK_EX)
            stream = peers.OpenStream(stub, acked=True)
            for seq in range(1, 400):
                stream.write(chunk(logs / "held.log", data, "0", "s", seq))
            stream.close()
            # A file that cannot be written is an error to its sender once its share is used up.
            assert stream.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert send(server.address, chunk(logs / "x.log", data)).status == "OK"
            found = stub.Stats(pb.StatsRequest())
            assert found.buffered_bytes_peak <= 4 << 20
            assert server.rss_mb() < 120


# --- the end


def test_sigterm_serves_open_streams_to_their_end(server: peers.Server, logs: Path) -> None:
    """After SIGTERM an open stream may go on and end; then the server writes all and exits 0."""
    with peers.stub(server.address) as stub:
        stream = peers.OpenStream(stub)
        stream.write(chunk(logs / "x.log", b"before\n"))
        peers.until((logs / "x.log").exists, "the file")
        os.kill(server.pid, signal.SIGTERM)
        peers.until(lambda: "asked to end" in server.log.read_text(), "the signal's line")
        stream.write(chunk(logs / "x.log", b"after\n"))
        stream.close()
        assert stream.answer.status == "OK"
    assert server.process.wait(20) == 0
    assert (logs / "x.log").read_bytes() == b"before\nafter\n"


def test_sigterm_cuts_off_after_the_grace_time(tmp_path: Path, logs: Path) -> None:
    """Streams that do not end are cut off; everything that was accepted is on disk."""
    with peers.root(tmp_path, "--graceful-shutdown-timeout", "0.2") as server:
        server.start()
        with peers.stub(server.address) as stub:
            streams = [peers.OpenStream(stub, acked=True) for _ in range(10)]
            for number, stream in enumerate(streams):
                stream.write(chunk(logs / "x.log", b"%d\n" % number, "0", f"s{number}", 1))
            for number, stream in enumerate(streams):
                peers.until(lambda s=stream, n=number: s.committed(f"s{n}") == 1, "acknowledged")
            assert server.stop() == 0
            for stream in streams:
                stream.close()
                assert stream.error is not None
    assert len((logs / "x.log").read_bytes().splitlines()) == 10


def test_second_signal_ends_at_once(tmp_path: Path, logs: Path) -> None:
    """Who asks twice does not wait for the grace time."""
    with peers.root(tmp_path, "--graceful-shutdown-timeout", "600") as server:
        server.start()
        with peers.stub(server.address) as stub:
            stream = peers.OpenStream(stub)
            peers.until(lambda: health(server.address).connected_clients == 1, "the stream")
            os.kill(server.pid, signal.SIGTERM)
            peers.until(lambda: "asked to end" in server.log.read_text(), "the signal's line")
            os.kill(server.pid, signal.SIGTERM)
            assert server.process.wait(5) == -signal.SIGTERM
            stream.close()


def test_completion_lines_in_the_servers_log(tmp_path: Path, logs: Path) -> None:
    """The lines that other programs look for stand in the server's log, in the given form."""
    with peers.root(tmp_path, "--completion-idle-timeout", "0.1") as server:
        server.start()
        for cycle in (0, 1):
            send(server.address, chunk(logs / f"j_cycle{cycle}.log", b"x\n"))
        start = f"Heuristic cycle log complete: file_path={logs}/j_cycle0.log last_flush_time=20"
        peers.until(lambda: start in server.log.read_text(), "the line")
        assert server.stop() == 0
        assert f"file_path={logs}/j_cycle1.log last_flush_time=20" in server.log.read_text()


# --- the command line


def _run(*arguments: str, env: dict[str, str] | None = None, module: str = peers.ROOT):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, timeout=150, check=False, cwd="/",
        env={**os.environ, **(env or {})},
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "0"],
        ["--allowed-root", "/nonexistent/x"],
        ["--allowed-root", "{logs}", "--port", "70000"],
        ["--allowed-root", "{logs}", "--port", "x"],
        ["--allowed-root", "{logs}", "--completion-idle-timeout", "-1"],
        ["--allowed-root", "{logs}", "--completion-idle-timeout", "nan"],
        ["--allowed-root", "{logs}", "--graceful-shutdown-timeout", "inf"],
        ["--allowed-root", "{logs}", "--max-workers", "0"],
        ["--allowed-root", "{logs}", "--max-buffered-bytes", "5"],
        ["--allowed-root", "{logs}", "--host", "0.0.0.0"],
        ["--allowed-root", "{logs}", "--tls-cert", "x"],
        ["--allowed-root", "{logs}", "--unknown"],
    ],
)
def test_wrong_settings_are_one_line_and_exit_2(tmp_path: Path, arguments: list[str]) -> None:
    """A server that was told nonsense says so in one line and binds nothing."""
    done = _run(*(a.replace("{logs}", str(tmp_path)) for a in arguments))
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()
    assert "Traceback" not in done.stderr
    assert sum("usage" not in line and not line.startswith(" ") for line in last) == 1, done.stderr


@pytest.mark.parametrize(("content", "mode"), [("x\n", 0o644), ("", 0o600), ("a\nb\n", 0o600),
                                               ("\xe9\n", 0o600), (None, 0)])  # fmt: skip
def test_unusable_token_file(tmp_path: Path, content: str | None, mode: int) -> None:
    """A token that others can read, or that is none, is a wrong setting, not a missing one."""
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    done = _run(
        "--allowed-root", str(tmp_path), "--port", "0",
        env={"NVRX_LOG_FUNNEL_TOKEN_FILE": str(path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert str(path) in done.stderr


def test_port_in_use_is_one_line_and_exit_1(server: peers.Server, tmp_path: Path) -> None:
    """A second server does not share the port in silence."""
    done = _run("--allowed-root", str(tmp_path), "--port", server.address.rpartition(":")[2])
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("grpc_log_server: cannot listen on")


def test_unix_socket_in_use_is_not_taken_over(
    tmp_path: Path, socket_folder: Path, logs: Path
) -> None:
    """A second server leaves the first one's socket alone; one that nobody has is used again."""
    address = f"unix:{socket_folder}/s.sock"
    with peers.root(tmp_path, "--host", address) as server:
        server.start()
        done = _run("--allowed-root", str(tmp_path), "--host", address)
        assert done.returncode == 1
        assert done.stderr.startswith(f"grpc_log_server: cannot listen on {address}: another")
        assert done.stderr.count("\n") == 1
        assert send(address, chunk(logs / "x.log", b"x\n")).status == "OK"
        server.kill()
        server.start()
        assert send(address, chunk(logs / "x.log", b"y\n")).status == "OK"


def test_open_server_warns_once(tmp_path: Path) -> None:
    """Without any check of callers, on request only, the log says so."""
    with peers.root(tmp_path, "--host", "0.0.0.0", "--port", "0", "--insecure-no-auth") as server:
        server.start()
        assert server.log.read_text().count("WARNING") == 1


# --- in process


class _AbortError(Exception):
    pass


class _Context:
    def abort(self, code, details) -> None:
        raise _AbortError(code.name, details)


def test_servicer_in_process(tmp_path: Path) -> None:
    """The servicer works without a server: streams, counts, files, and a shutdown that repeats."""
    servicer = LogAggregationServicer(flush_interval=0.01)
    answer = servicer.StreamLogs(
        iter([chunk(tmp_path / "x.log", b"1\n"), chunk(tmp_path / "x.log", b"2\n")]), _Context()
    )
    assert (answer.status, answer.bytes_received) == ("OK", 4)
    assert (servicer.total_bytes_received, servicer.total_chunks_received) == (4, 2)
    assert list(servicer.files) == [str(tmp_path / "x.log")]
    with pytest.raises(_AbortError, match="INVALID_ARGUMENT"):
        servicer.StreamLogs(iter([chunk("", b"x\n")]), _Context())
    with servicer.clients_lock:
        assert servicer.connected_clients == 0
    assert servicer.HealthCheck(pb.HealthRequest(), _Context()).healthy
    servicer.graceful_shutdown()
    servicer.shutdown()
    assert (tmp_path / "x.log").read_bytes() == b"1\n2\n"


def test_servicer_behind_a_server_with_threads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It also serves gRPC's server with threads, and keeps no ended call alive in its log."""
    from concurrent import futures

    servicer = LogAggregationServicer(allowed_roots=[str(tmp_path)])
    pool = futures.ThreadPoolExecutor(2)
    server = grpc.server(pool)
    peers.service.add_LogAggregationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert send(f"127.0.0.1:{port}", chunk(tmp_path / "x", b"x\n")).status == "OK"
        assert send_acked(f"127.0.0.1:{port}", chunk(tmp_path / "x", b"x\n"))[0] == "UNIMPLEMENTED"
        assert send(f"127.0.0.1:{port}", chunk("/etc/x", b"x\n"))[0] == "INVALID_ARGUMENT"
    finally:
        server.stop(None).wait()
        pool.shutdown()
        servicer.shutdown()
    (said,) = [record for record in caplog.records if "is refused" in record.getMessage()]
    assert said.args is not None
    assert not any(isinstance(part, BaseException) for part in said.args)


def test_graceful_shutdown_follows_the_count_of_clients() -> None:
    """A caller that counts a client itself, under the lock, holds the end up until it is gone."""
    servicer = LogAggregationServicer(graceful_shutdown_timeout=20.0)
    with servicer.clients_lock:
        servicer.connected_clients = 1
    closing = threading.Thread(target=servicer.graceful_shutdown)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    with servicer.clients_lock:
        servicer.connected_clients = 0
    closing.join(10.0)
    assert not closing.is_alive()


def test_nobody_is_told_that_lines_are_written_when_the_server_ends_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that waits for space, and one whose file hangs, are refused when the server ends."""
    gate, entered, written = threading.Event(), threading.Event(), threading.Event()
    hung: list[files.LogFile] = []
    write = files.LogFile._write

    def hang(file: files.LogFile, buffers: list[bytes]) -> None:
        hung.append(file)
        entered.set()
        gate.wait(60)
        write(file, buffers)
        written.set()

    monkeypatch.setattr(files.LogFile, "_write", hang)
    monkeypatch.setattr(grpc_log_server, "CLOSE_S", 0.3)
    monkeypatch.setattr(grpc_log_server, "_PATIENCE_S", 0.1)
    options = FunnelOptions(
        allowed_roots=(str(tmp_path),), max_buffered_bytes=8 << 20, flush_bytes=1 << 16
    )
    servicer = LogAggregationServicer(options=options)
    told: list[str] = []

    def send_all(data: bytes) -> None:
        with pytest.raises(_AbortError) as refused:
            servicer.StreamLogs(iter([chunk(tmp_path / "x", data)]), _Context())
        told.append(refused.value.args[0])

    threads = [
        threading.Thread(target=send_all, args=(data,)) for data in (b"a" * 1000000, b"b" * 500000)
    ]
    try:
        threads[0].start()
        assert entered.wait(20)
        threads[1].start()
        peers.until(lambda: servicer.connected_clients == 2, "the second stream")
        servicer.shutdown()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    finally:
        gate.set()
        assert written.wait(20)
        hung[0].close()
    assert told == ["UNAVAILABLE", "UNAVAILABLE"]


def test_clients_that_leave_a_file_that_hangs_keep_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with threads serves others when clients that waited for space have left."""
    from concurrent import futures

    gate = threading.Event()
    write = files.LogFile._write

    def hang(file: files.LogFile, buffers: list[bytes]) -> None:
        gate.wait(60)
        write(file, buffers)

    monkeypatch.setattr(files.LogFile, "_write", hang)
    options = FunnelOptions(allowed_roots=(str(tmp_path),), max_buffered_bytes=8 << 20)
    servicer = LogAggregationServicer(options=options)
    pool = futures.ThreadPoolExecutor(2)
    server = grpc.server(pool)
    peers.service.add_LogAggregationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with peers.stub(f"127.0.0.1:{port}") as stub:
            half_a_share = [chunk(tmp_path / "x", b"x" * 600_000)] * 2
            calls = [stub.StreamLogs.future(iter(half_a_share)) for _ in range(2)]
            peers.until(lambda: servicer.total_chunks_received == 3, "two that wait for space")
            for call in calls:
                call.cancel()
            assert stub.HealthCheck(pb.HealthRequest(), timeout=10).healthy
            peers.until(lambda: servicer.connected_clients == 0, "the end of both calls")
    finally:
        gate.set()
        server.stop(None).wait()
        pool.shutdown()
        servicer.shutdown()


def test_graceful_shutdown_waits_for_streams(tmp_path: Path) -> None:
    """It returns when the last stream has ended, and not before."""
    servicer = LogAggregationServicer(graceful_shutdown_timeout=20.0)
    may_end = threading.Event()

    def requests():
        yield chunk(tmp_path / "x", b"x\n")
        may_end.wait(20)

    streaming = threading.Thread(target=servicer.StreamLogs, args=(requests(), _Context()))
    streaming.start()
    peers.until(lambda: servicer.total_chunks_received == 1, "the chunk")
    closing = threading.Thread(target=servicer.graceful_shutdown)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    may_end.set()
    closing.join(20)
    streaming.join(20)
    assert (tmp_path / "x").read_bytes() == b"x\n"


def test_negative_idle_timeout_is_a_value_error() -> None:
    """As the signature promises."""
    with pytest.raises(ValueError, match="completion_idle_timeout"):
        LogAggregationServicer(completion_idle_timeout=-1)


def test_module_needs_no_grpc_to_be_imported() -> None:
    """The public modules import without any third-party package."""
    program = (
        "import sys; sys.modules['grpc'] = sys.modules['google.protobuf'] = None;"
        "import nvidia_resiliency_ext.shared_utils.grpc_log_server as s;"
        "import nvidia_resiliency_ext.shared_utils.grpc_log_leaf_server as l;"
        "s.LogAggregationServicer().shutdown(); sys.exit(s.main(['--allowed-root', '/tmp']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith("install nvrx-common[grpc]")


def test_first_answer_imports_nothing() -> None:
    """Whatever an answer needs is there before the first call, which would hold up all streams."""
    program = """if True:
        import sys
        from nvidia_resiliency_ext.shared_utils._funnel.server import command, process
        from nvidia_resiliency_ext.shared_utils._funnel.server import chunks as messages
        async def answer():
            before = set(sys.modules)
            messages.health(1), messages.response("OK", 1), messages.ack("s", 1)
            print(*sorted(set(sys.modules) - before))
        process.run_until_complete(answer)
        """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_memory_of_messages_is_used_again() -> None:
    """The pages of a message serve for the next one, without a fault for each."""
    program = """if True:
        import resource
        from nvidia_resiliency_ext.shared_utils._funnel.server import process
        async def take():
            begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for size in [65_500] * 100 + [262_100] * 50:
                messages = [bytes([1]) * size for _ in range(4)]
                del messages
            print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin)
        process.run_until_complete(take)
        """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=True
    )
    assert int(done.stdout) < 2000


def test_files_are_private_to_the_group(server: peers.Server, logs: Path) -> None:
    """Logs are 0640 in directories of 0750, less the umask, and the ledger is the server's own."""
    send_acked(server.address, chunk(logs / "d/x.log", b"x\n", "0", "s", 1))
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [logs / "d", *(logs / "d").iterdir()]}
    assert modes == {"d": 0o750, "x.log": 0o640, ".x.log.nvrx-acks": 0o600}
