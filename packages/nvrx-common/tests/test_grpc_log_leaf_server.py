# SPDX-License-Identifier: Apache-2.0
"""Leaves of the log funnel between clients and the root, as processes with the real gRPC."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import ports
import pytest

pytest.importorskip("grpc", reason="needs the extra grpc of nvrx-common")
pytest.importorskip("google.protobuf", reason="needs the extra grpc of nvrx-common")

import funnel_peers as peers
import grpc
from funnel_peers import chunk, send, send_acked

from nvidia_resiliency_ext.shared_utils._funnel.server.chunks import Chunk, Refusal
from nvidia_resiliency_ext.shared_utils._funnel.server.files import Roots
from nvidia_resiliency_ext.shared_utils._funnel.server.leaf import LeafConfig, Relay, RelayRpc
from nvidia_resiliency_ext.shared_utils._funnel.server.leaf import run as run_leaf
from nvidia_resiliency_ext.shared_utils._funnel.server.service import AddressError
from nvidia_resiliency_ext.shared_utils._funnel.shared import Access
from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as pb

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path) -> Iterator[peers.Server]:
    with peers.root(tmp_path) as made:
        yield made.start()


@pytest.fixture
def leaf(tmp_path: Path, root: peers.Server) -> Iterator[peers.Server]:
    with peers.leaf(tmp_path, root.address) as made:
        yield made.start()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


def test_old_and_new_clients_through_a_leaf(leaf: peers.Server, logs: Path) -> None:
    """Both methods deliver through a leaf, and an answer means that the root has written."""
    answer = send(leaf.address, *(chunk(logs / "a.log", b"%d\n" % i) for i in range(50)))
    assert (answer.status, answer.bytes_received) == ("OK", 140)
    assert (logs / "a.log").read_bytes() == b"".join(b"%d\n" % i for i in range(50))
    items = [chunk(logs / "b.log", b"%d\n" % i, "0", "s", i) for i in range(1, 51)]
    assert send_acked(leaf.address, *items) == {"s": 50}
    assert send_acked(leaf.address, *items) == {"s": 50}
    assert (logs / "b.log").read_bytes() == b"".join(b"%d\n" % i for i in range(1, 51))


def test_last_line_is_ended(leaf: peers.Server, logs: Path) -> None:
    """A stream through a leaf that ends inside lines has them ended, in each of its files."""
    parts = [(logs / "a.log", b"1\n2"), (logs / "b.log", b"3"), (logs / "b.log", b"4\n")]
    answer = send(leaf.address, *(chunk(path, data) for path, data in parts))
    assert (answer.status, answer.bytes_received) == ("OK", 6)
    assert (logs / "a.log").read_bytes() == b"1\n2\n"
    assert (logs / "b.log").read_bytes() == b"34\n"
    with peers.stub(leaf.address) as stub:
        broken = peers.OpenStream(stub)
        broken.write(chunk(logs / "a.log", b"half"))
        peers.until(lambda: (logs / "a.log").read_bytes().endswith(b"half"), "the half line")
        broken.cancel()
        peers.until(lambda: (logs / "a.log").read_bytes().endswith(b"half\n"), "its end")


def test_acknowledgements_come_while_the_stream_is_open(leaf: peers.Server, logs: Path) -> None:
    """A leaf passes the root's word on without waiting for the stream's end."""
    with peers.stub(leaf.address) as stub:
        stream = peers.OpenStream(stub, acked=True)
        stream.write(chunk(logs / "x.log", b"1\n", "0", "s", 1))
        peers.until(lambda: stream.committed("s") == 1, "the acknowledgement")
        assert (logs / "x.log").read_bytes() == b"1\n"
        stream.close()


def test_bad_path_is_refused_by_the_leaf(leaf: peers.Server, logs: Path) -> None:
    """A path outside of the roots does not get past the leaf."""
    for method in (send, send_acked):
        assert method(leaf.address, chunk("/etc/x", b"x\n", "0", "s", 1))[0] == "INVALID_ARGUMENT"
    assert send(leaf.address, chunk(logs / "x.log", b"x\n")).status == "OK"


def test_refusal_of_the_root_hits_one_stream_only(
    leaf: peers.Server, logs: Path, tmp_path: Path
) -> None:
    """What only the root can see is wrong reaches its sender, and no other; it may come again."""
    (logs / "d").symlink_to(tmp_path)
    with peers.stub(leaf.address) as stub:
        bystander = peers.OpenStream(stub, acked=True)
        bystander.write(chunk(logs / "x.log", b"1\n", "0", "b", 1))
        peers.until(lambda: bystander.committed("b") == 1, "the acknowledgement")
        for method in (send, send_acked):
            found = method(leaf.address, chunk(logs / "d/x", b"evil\n", "0", "s", 1))
            assert found[0] == "INVALID_ARGUMENT", found
        bystander.write(chunk(logs / "x.log", b"2\n", "0", "b", 2))
        peers.until(lambda: bystander.committed("b") == 2, "the acknowledgement")
        bystander.close()
        assert bystander.error is None
    # The stream that was refused goes on when what was wrong is put right.
    (logs / "d").unlink()
    assert send_acked(leaf.address, chunk(logs / "d/x", b"good\n", "0", "s", 1)) == {"s": 1}
    assert (logs / "d/x").read_bytes() == b"good\n"
    assert not (tmp_path / "x").exists()


def test_file_without_room_holds_up_one_stream_only(tmp_path: Path, logs: Path) -> None:
    """A log that cannot be written is an error to its sender; others behind the leaf go on."""
    import fcntl

    data = b"z" * 65535 + b"\n"
    with peers.root(tmp_path, "--max-buffered-bytes", str(2 << 20)) as root:
        root.start()
        with peers.leaf(tmp_path, root.address) as leaf, (logs / "held.log").open("ab") as other:
            leaf.start()
            fcntl.flock(other, fcntl.LOCK_EX)
            with peers.stub(leaf.address) as stub:
                stuck = peers.OpenStream(stub, acked=True)
                for seq in range(1, 40):
                    stuck.write(chunk(logs / "held.log", data, "0", "s", seq))
                items = [chunk(logs / "x.log", data, "1", "t", seq) for seq in range(1, 100)]
                assert send_acked(leaf.address, *items) == {"t": 99}
                stuck.close()
                assert stuck.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            fcntl.flock(other, fcntl.LOCK_UN)
            items = [chunk(logs / "held.log", data, "0", "s", seq) for seq in range(1, 40)]
            # The next try of the file's writer is at most 2 s away.
            peers.until(lambda: send_acked(leaf.address, *items) == {"s": 39}, "the held lines")
    assert (logs / "held.log").read_bytes() == data * 39


def test_health_follows_the_root(leaf: peers.Server, root: peers.Server) -> None:
    """A leaf is healthy only while its stream to the root is up."""

    def is_healthy() -> bool:
        with peers.stub(leaf.address) as stub:
            return stub.HealthCheck(pb.HealthRequest(), timeout=60).healthy

    peers.until(is_healthy, "healthy")
    root.kill()
    peers.until(lambda: not is_healthy(), "not healthy")


def test_no_healthy_root_in_time_is_an_error(tmp_path: Path) -> None:
    """Without a healthy root a leaf binds no port and says where it looked."""
    with ports.claimed() as port:
        upstream = f"127.0.0.1:{port}"
        config = LeafConfig(
            host="127.0.0.1", port=0, upstream=upstream, grace_s=1.0, access=Access(),
            allowed_roots=(str(tmp_path),), root_timeout_s=0.2,
        )  # fmt: skip
        with pytest.raises(AddressError, match=f"no healthy root at {upstream}"):
            run_leaf(config)


def test_ending_leaf_takes_no_new_stream(leaf: peers.Server, logs: Path) -> None:
    """After SIGTERM open streams go on to their end, and new ones are told to go elsewhere."""
    with peers.stub(leaf.address) as stub:
        stream = peers.OpenStream(stub, acked=True)
        stream.write(chunk(logs / "x.log", b"1\n", "0", "s", 1))
        peers.until(lambda: stream.committed("s") == 1, "the acknowledgement")
        os.kill(leaf.pid, signal.SIGTERM)
        peers.until(lambda: "asked to end" in leaf.log.read_text(), "the signal's line")
        for method in (send, send_acked):
            assert method(leaf.address, chunk(logs / "y.log", b"x\n"))[0] == "UNAVAILABLE"
        stream.write(chunk(logs / "x.log", b"2\n", "0", "s", 2))
        stream.close()
        assert stream.error is None
    assert leaf.process.wait(20) == 0
    assert (logs / "x.log").read_bytes() == b"1\n2\n"


def test_last_figures_are_those_of_the_end(tmp_path: Path, logs: Path) -> None:
    """What the root did not take in time is an error, and the statistics after it are the last."""
    with peers.root(tmp_path) as root:
        root.start()
        with peers.leaf(tmp_path, root.address, "--graceful-shutdown-timeout", "0.1") as leaf:
            leaf.start()
            with peers.stub(leaf.address) as stub:
                stream = peers.OpenStream(stub, acked=True)
                stream.write(chunk(logs / "x.log", b"1\n", "0", "s", 1))
                peers.until(lambda: stream.committed("s") == 1, "the acknowledgement")
                os.kill(root.pid, signal.SIGSTOP)
                stream.write(chunk(logs / "x.log", b"2\n", "0", "s", 2))
                peers.until(
                    lambda: stub.Stats(pb.StatsRequest(), timeout=60).chunks_received == 2,
                    "the chunk",
                )
                assert leaf.stop() == 1
                stream.close()
            error, last = leaf.log.read_text().splitlines()[-2:]
    assert "1 chunks did not reach the root in time" in error
    assert "received 4 bytes in 2 chunks, 1 chunks with" in last


def test_root_that_does_not_acknowledge(tmp_path: Path, logs: Path) -> None:
    """In front of a root that knows StreamLogs only, a leaf delivers over that."""
    from nvidia_resiliency_ext.shared_utils.grpc_log_server import LogAggregationServicer

    logs.mkdir()
    servicer = LogAggregationServicer(flush_interval=0.01, allowed_roots=[str(logs)])
    pool = futures.ThreadPoolExecutor(4)
    server = grpc.server(pool)
    peers.service.add_LogAggregationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with peers.leaf(tmp_path, f"127.0.0.1:{port}") as leaf:
            leaf.start()
            assert send_acked(leaf.address, chunk(logs / "x", b"1\n", "0", "s", 1)) == {"s": 1}
            assert send(leaf.address, chunk(logs / "x", b"2\n")).status == "OK"
            peers.until(
                lambda: (logs / "x").exists() and (logs / "x").read_bytes() == b"1\n2\n",
                "the lines",
            )
            assert leaf.stop() == 0
    finally:
        server.stop(None).wait()
        pool.shutdown()
        servicer.shutdown()


def test_many_streams_over_one(leaf: peers.Server, root: peers.Server, logs: Path) -> None:
    """All nodes of a leaf share one stream to the root; each one's lines come whole, in order."""
    threads = [
        threading.Thread(
            target=send_acked,
            args=(leaf.address, *(chunk(logs / "x.log", b"%d %d\n" % (n, i), str(n), f"s{n}", i)
                                  for i in range(1, 101))),
        )
        for n in range(12)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    with peers.stub(root.address) as stub:

        def clients() -> int:
            return stub.HealthCheck(pb.HealthRequest(), timeout=60).connected_clients

        # A leaf listens a moment before its stream to the root is there.
        peers.until(clients, "the leaf's stream")
        assert clients() == 1
    for thread in threads:
        thread.join()
    lines = (logs / "x.log").read_bytes().splitlines()
    for n in range(12):
        mine = [int(line.split()[1]) for line in lines if line.startswith(b"%d " % n)]
        assert mine == list(range(1, 101))


# --- the relay's bookkeeping


def _in_loop(program) -> None:
    import asyncio

    asyncio.run(program())


def _chunk(seq: int, name: str = "s") -> Chunk:
    return Chunk("0", memoryview(b"x"), "/x", name, seq)


def _stream(relay: Relay, name: str) -> RelayRpc:
    """Return a call that has read its first chunk."""
    made = RelayRpc(relay, Roots(["/"]), None, acknowledges=False)
    made.begin(_chunk(1, name))
    return made


def _seqs(relay: Relay) -> list[tuple[int, bool]]:
    found = []
    while (item := relay.next_unsent()) is not None:
        found.append((item[0].seq, item[1] != item[0].raw))
    return found


def test_refused_stream_starts_again_with_a_mark() -> None:
    """A refusal ends the call; what its sender then sends again goes with a mark on the first."""

    async def program() -> None:
        relay = Relay(100, 1 << 20)
        stream = _stream(relay, "s")
        for seq in (1, 2, 3):
            await relay.put(stream, _chunk(seq), b"raw%d" % seq)
        assert _seqs(relay) == [(1, False), (2, False), (3, False)]
        relay.confirm("s", 1, Refusal("UNAVAILABLE", "full"))
        assert relay.held_chunks == relay.held_bytes == 0
        with pytest.raises(Refusal, match="full"):
            await relay.put(stream, _chunk(4), b"raw4")
        again = _stream(relay, "s")
        for seq in (2, 3):
            await relay.put(again, _chunk(seq), b"raw%d" % seq)
        assert _seqs(relay) == [(2, True), (3, False)]
        relay.confirm("s", 3)
        assert relay.held_chunks == relay.held_bytes == 0

    _in_loop(program)


def test_new_connection_sends_everything_again() -> None:
    """What the root has not confirmed goes over the next connection, in order, without a mark."""

    async def program() -> None:
        relay = Relay(100, 1 << 20)
        stream = _stream(relay, "s")
        for seq in (1, 2, 3):
            await relay.put(stream, _chunk(seq), b"raw")
        relay.confirm("s", 1)
        relay.start_session()
        assert _seqs(relay) == [(2, False), (3, False)]

    _in_loop(program)


def test_full_queue_makes_senders_wait() -> None:
    """Nothing is dropped: over a stream's share, `put` waits until the root confirms."""
    import asyncio

    async def program() -> None:
        relay = Relay(max_chunks=16, max_bytes=1 << 20)
        stream, other = _stream(relay, "s"), _stream(relay, "t")
        await relay.put(stream, _chunk(1), b"raw")
        await relay.put(stream, _chunk(2), b"raw")
        waiting = asyncio.ensure_future(relay.put(stream, _chunk(3), b"raw"))
        await asyncio.sleep(0)
        assert not waiting.done()
        await relay.put(other, _chunk(1), b"raw")
        relay.confirm("s", 1)
        await waiting
        assert relay.held_chunks == 3

    _in_loop(program)
