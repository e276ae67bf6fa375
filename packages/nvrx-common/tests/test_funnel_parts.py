# SPDX-License-Identifier: Apache-2.0
"""The parts of the log funnel: messages, ledgers, memory, cycles, prefixes, batches."""

import asyncio
import json
import math
import random
import threading
from collections.abc import Iterator

import pytest

from nvidia_resiliency_ext.shared_utils._funnel.server import chunks
from nvidia_resiliency_ext.shared_utils._funnel.server import files as ledger
from nvidia_resiliency_ext.shared_utils._funnel.server.chunks import Refusal
from nvidia_resiliency_ext.shared_utils._funnel.server.cycles import Completion
from nvidia_resiliency_ext.shared_utils._funnel.server.files import LogPath
from nvidia_resiliency_ext.shared_utils._funnel.server.funnel import Funnel
from nvidia_resiliency_ext.shared_utils._funnel.server.leaf import Relay
from nvidia_resiliency_ext.shared_utils._funnel.server.queue import FunnelOptions, Queue
from nvidia_resiliency_ext.shared_utils._funnel.server.root import LoopQueue
from nvidia_resiliency_ext.shared_utils._funnel.server.target import Source, Target, claim
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

# --- chunks


def _pb():
    pytest.importorskip("google.protobuf", reason="needs the extra grpc of nvrx-common")
    from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2

    return log_aggregation_pb2


def _fields(chunk) -> tuple[object, ...]:
    names = ("node_id", "file_path", "stream_id", "seq", "resumed")
    return (bytes(chunk.data), *(getattr(chunk, name) for name in names))


def _random_chunk(pb, rng: random.Random):
    return pb.LogChunk(
        node_id="n" * rng.choice([0, 1, 200]),
        data=rng.randbytes(rng.choice([0, 1, 127, 128, 20_000])),
        file_path="/logs/é" * rng.choice([0, 1, 30]),
        stream_id="s" * rng.choice([0, 5]),
        seq=rng.choice([0, 1, 300, 2**64 - 1]),
        resumed=rng.random() < 0.3,
    )


def test_chunk_is_read_as_protobuf_reads_it() -> None:
    """Every field of every message comes out as protobuf's own class has it."""
    pb, rng = _pb(), random.Random(1)
    for _ in range(300):
        message = _random_chunk(pb, rng)
        assert _fields(chunks.decode(message.SerializeToString())) == _fields(message)


def _decoded(raw: bytes) -> tuple[object, ...] | str:
    try:
        return _fields(chunks.decode(raw))
    except Refusal as refusal:
        return refusal.code


def test_garbage_is_refused_where_protobuf_refuses_it() -> None:
    """Damaged messages never raise anything but a refusal, and agree with protobuf on the rest."""
    pb, rng = _pb(), random.Random(2)
    from google.protobuf.message import DecodeError

    agreed = 0
    for _ in range(6000):
        raw = bytearray(_random_chunk(pb, rng).SerializeToString()[:300])
        for _ in range(rng.randrange(1, 4)):
            if raw:
                raw[rng.randrange(len(raw))] = rng.randrange(256)
        if rng.random() < 0.2:
            raw = bytearray(rng.randbytes(rng.randrange(40)))
        try:
            expected = _fields(pb.LogChunk.FromString(bytes(raw)))
        except (DecodeError, UnicodeDecodeError):
            expected = None
        found = _decoded(bytes(raw))
        # Groups are the one thing that protobuf takes and this does not.
        assert expected is None or found in {expected, "INVALID_ARGUMENT"}
        agreed += found == expected
    assert agreed > 100


def test_a_leaf_names_a_chunk_without_reading_it() -> None:
    """What a leaf appends wins over what the sender gave, and the rest stays."""
    _pb()
    raw = b"\x0a\x011\x12\x03hi\n"
    found = chunks.decode(chunks.named(raw, "leaf", 300) + chunks.RESUMED)
    assert _fields(found) == (b"hi\n", "1", "", "leaf", 300, True)


# --- ledger


def _written(*batches: tuple[int, int, dict[str, int]]) -> bytes:
    return b"".join(ledger.encode(*batch) for batch in batches)


@pytest.mark.parametrize(
    ("size", "seqs", "cut"),
    [
        (0, {"a": 1}, None),  # somebody emptied the log: what was there stays acknowledged
        (100, {"a": 1}, 100),
        (150, {"a": 1}, 100),
        (199, {"a": 1}, 100),
        (200, {"a": 3, "b": 7}, None),
        (250, {"a": 3, "b": 7}, None),
    ],
)
def test_size_of_the_log_tells_what_it_holds(size: int, seqs: dict[str, int], cut) -> None:
    """A batch counts when the log has all of it; a part of it is cut off."""
    data = _written((0, 100, {"a": 1}), (100, 200, {"b": 7, "a": 3}))
    found = ledger.read_ledger(data, size)
    expected = {"a": 3, "b": 7} if size == 0 else seqs
    assert (found.seqs, found.cut_log_to) == (expected, cut)
    assert found.last_stream == ("a" if size == 200 else None)


def test_void_record_goes_from_the_ledger_too() -> None:
    """A batch that was cut off is not believed after the next start."""
    first = _written((0, 100, {"a": 1}))
    data = first + _written((100, 200, {"a": 2}))
    found = ledger.read_ledger(data, 150)
    assert found.cut_ledger_to == len(first)


def test_torn_and_foreign_lines_are_passed_over() -> None:
    """Nothing that is no whole record counts, and a torn last line is cut off."""
    good = _written((0, 10, {"a": 1}))
    record = b'{"start":0,"end":1,"seqs":%b}\n'
    for bad in (
        b"garbage\n", b"[]\n", b'{"start":0}\n', record % b'{"a":-1}', record % b"[1]",
        b"\xff\xfe\n", b"[" * 5000 + b"\n",
    ):  # fmt: skip
        assert ledger.read_ledger(bad + good + bad, 10).seqs == {"a": 1}
    torn = good + _written((10, 20, {"a": 2}))[:-3]
    found = ledger.read_ledger(torn, 10)
    assert (found.seqs, found.cut_ledger_to) == ({"a": 1}, len(good))


def test_random_bytes_never_break_a_ledger() -> None:
    """Whatever stands in a ledger, reading it gives an answer."""
    rng = random.Random(3)
    good = _written((0, 10, {"a": 1}), (10, 30, {"b": 2}))
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        found = ledger.read_ledger(bytes(data), rng.randrange(40))
        assert all(isinstance(seq, int) for seq in found.seqs.values())


def test_ids_of_any_kind_survive() -> None:
    """A stream may be called anything that is text."""
    seqs = {'"\n\\': 1, "é\u2028": 2, "": 3}
    assert ledger.read_ledger(ledger.encode(0, 1, seqs), 1).seqs == seqs
    assert json.loads(ledger.encode(0, 1, seqs))


# --- budget


@pytest.fixture
def funnel(tmp_path) -> Iterator[Funnel]:
    """A funnel with 1 MiB of memory: 128 KiB for one file, 512 KiB for those in trouble."""
    options = FunnelOptions(allowed_roots=(str(tmp_path),), max_buffered_bytes=1 << 20)
    made = Funnel(options)
    yield made
    made.close(Deadline.after(5))


@pytest.fixture
def queue(funnel: Funnel) -> Iterator[Queue]:
    yield funnel.queue
    funnel.queue.held_bytes = 0


def _target(held_kib: int, *, error: OSError | None = None, is_stalled: bool = False) -> Target:
    made = Target("/x", LogPath("/", ("x",)), None, held_bytes=held_kib << 10, error=error)
    made.is_stalled = is_stalled
    return made


def test_memory_shares(queue: Queue) -> None:
    """One file has an eighth, files in trouble a half, and nothing goes over the whole."""
    kib, failing = 1 << 10, OSError("full")
    assert queue.has_space(_target(0), 128 * kib)
    assert queue.has_space(_target(120), 10 * kib) is False
    assert queue.has_space(_target(120, error=failing), 10 * kib) is None
    assert queue.has_space(_target(0), (1 << 20) + 1) is None
    queue.troubled = {_target(505)}
    assert queue.has_space(_target(5), 10 * kib)
    assert queue.has_space(_target(5, is_stalled=True), 10 * kib) is False
    assert queue.has_space(_target(5, error=failing), 10 * kib) is None
    queue.take(1020 * kib)
    assert queue.has_space(_target(0), 10 * kib) is False
    queue.held_bytes -= 100 * kib
    assert queue.has_space(_target(0), 10 * kib)
    assert queue.peak_bytes == 1020 * kib


def test_large_chunk_for_an_idle_file_passes(queue: Queue) -> None:
    """A chunk over a file's share is taken when nothing else waits for that file."""
    assert queue.has_space(_target(0), 500 << 10)


def test_ledger_forgets_the_streams_that_were_silent_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many streams write one log, its ledger stays small enough to be read again."""
    monkeypatch.setattr(ledger, "_MOST_RECORD_BYTES", 1000)
    seqs: dict[str, int] = {}
    for number in range(500):
        ledger.merge(seqs, {f"s{number}": 1, "busy": number})
    record = ledger.encode_all(10, seqs)
    assert len(record) <= 1000
    found = ledger.read_ledger(record, 10).seqs
    assert found == seqs
    assert found["busy"] == 499
    assert "s499" in found
    assert "s0" not in found


# --- cycles


def _cycles(idle_s: float) -> Completion:
    """Return the cycles of a server that announces nothing by itself."""
    return Completion(idle_s, threading.Lock(), lambda _when, _function: None)


def _flushed(cycles: Completion, path: str, now: float, *, is_whole: bool = True):
    file = cycles.track(path, now)
    assert file is not None
    file.arrived_at, file.is_whole = now, is_whole
    return file


@pytest.mark.parametrize(
    "name", ["job.log", "job_cycle.log", "job_cyclex1.log", "job_cycle" + "1" * 40]
)
def test_other_names_are_no_cycles(name: str) -> None:
    """Only `_cycle` and digits make a file one of a family."""
    assert _cycles(1).track("/d/" + name, 0) is None


def test_old_cycle_is_complete_when_a_later_one_exists_and_it_is_idle() -> None:
    """Not before the idle time, not without a successor, not with bytes that wait; once."""
    cycles = _cycles(10)
    first = _flushed(cycles, "/d/a_cycle9.log", 0)
    assert cycles.take_complete(100) == ([], math.inf)
    _flushed(cycles, "/d/a_cycle10.log", 5)
    _flushed(cycles, "/d/b_cycle11.log", 5)
    _flushed(cycles, "/e/a_cycle12.log", 5)
    assert cycles.take_complete(9.9) == ([], 10)
    first.is_whole = False
    assert cycles.take_complete(10) == ([], math.inf)
    first.is_whole = True
    assert cycles.take_complete(10) == ([first], math.inf)
    assert cycles.take_complete(11) == ([], math.inf)


def test_at_the_end_the_newest_cycle_is_complete_too() -> None:
    """At shutdown no idle time and no successor are needed; what was never written is left out."""
    cycles = _cycles(10)
    files = [_flushed(cycles, f"/d/a_cycle{i}.log", 0) for i in range(2)]
    cycles.track("/d/b_cycle0.log", 0)
    assert cycles.take_complete(0, at_end=True) == (files, math.inf)


@pytest.mark.parametrize("name", ["a_cycle{}.log", "a_cycle{:06}.log"])
def test_cycles_do_not_grow_for_ever(name: str) -> None:
    """However many files come, a bounded number is remembered."""
    cycles = _cycles(0)
    for number in range(12_500):
        _flushed(cycles, "/d/" + name.format(number), 0)
        _flushed(cycles, f"/d/a_cycle{number}.log", 0)
    assert len(cycles._files) <= 10_000


def test_two_files_of_one_cycle() -> None:
    """A number that is written with and without zeros is two files, and both become complete."""
    cycles = _cycles(10)
    files = [_flushed(cycles, f"/d/a_cycle{number}.log", 0) for number in ("1", "01", "2")]
    assert cycles.take_complete(10) == (files[:2], math.inf)


# --- prefixes


def test_prefix_is_of_the_first_node_that_uses_it() -> None:
    """Another node's line is found anywhere in a chunk; a refused chunk claims nothing."""
    owners: dict[bytes, str] = {}
    assert claim(memoryview(b" 7: a\n 8: b\nno prefix\n"), "n1", owners) is None
    assert claim(memoryview(b" 9: x\n 7: forged\n"), "n2", owners) == ("7", "n1")
    assert claim(memoryview(b" 9: mine: 7: not a prefix\n"), "n2", owners) is None
    assert owners == {b"7": "n1", b"8": "n1", b"9": "n2"}


# --- options


def test_all_wrong_settings_are_named_at_once() -> None:
    """One error names each wrong setting with its value."""
    with pytest.raises(ConfigError) as caught:
        FunnelOptions(
            allowed_roots=None, flush_interval_s=float("nan"), max_files=0, fsync="perhaps"
        )
    assert all(name in str(caught.value) for name in ("flush_interval_s", "max_files", "fsync"))


# --- calls into the event loop


def _ignored(source: Source) -> None:
    """Take no note."""


def test_loop_queue_makes_each_call_once_in_the_loop() -> None:
    """Calls of several threads are all made, in the loop's thread; many make one wake-up."""
    sources = [Source(_ignored, f"{number}", "n") for number in range(400)]

    async def run() -> tuple[list[str], int]:
        loop = asyncio.get_running_loop()
        loop_queue, taken, done = LoopQueue(), [], asyncio.Event()
        wakes, call_soon = [], loop.call_soon_threadsafe

        def counted(callback, *arguments):
            wakes.append(callback)
            return call_soon(callback, *arguments)

        loop.call_soon_threadsafe = counted

        def take(source: Source) -> None:
            assert asyncio.get_running_loop() is loop
            taken.append(source.stream_id)
            if len(taken) == len(sources):
                done.set()

        def post(some: list[Source]) -> None:
            for source in some:
                loop_queue.post(take, source)

        threads = [threading.Thread(target=post, args=(sources[i:300:3],)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # The loop did not run meanwhile.
        assert len(wakes) == 1
        await asyncio.sleep(0)
        post(sources[300:])
        await asyncio.wait_for(done.wait(), 20)
        return taken, len(wakes)

    taken, wakes = asyncio.run(run())
    assert sorted(taken) == sorted(source.stream_id for source in sources)
    assert wakes == 2


def test_mailbox_of_an_ended_loop_is_silent() -> None:
    """A writer that is late by the loop's whole life does no harm."""

    async def make() -> LoopQueue:
        return LoopQueue()

    asyncio.run(make()).post(_ignored, Source(_ignored, "s", "n"))


# --- many streams over one connection


class _Call:
    """gRPC's side of a call with one chunk for each of many streams."""

    def __init__(self, messages: list[bytes], most_waiting: int) -> None:
        self._messages = messages
        self._most_waiting = most_waiting
        self._read = 0
        self._has_acked = asyncio.Event()
        self.acked: set[str] = set()

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def read(self) -> object:
        from grpc.aio import EOF

        await asyncio.sleep(0)
        while self._read - len(self.acked) > self._most_waiting:
            self._has_acked.clear()
            await self._has_acked.wait()
        self._read += 1
        return self._messages[self._read - 1] if self._read <= len(self._messages) else EOF

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(0)
        self.acked.add(_pb().Ack.FromString(message).stream_id)
        self._has_acked.set()


def test_each_of_many_streams_is_acknowledged(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that are forgotten to save memory have been told that all of theirs is written."""
    pb = _pb()
    from nvidia_resiliency_ext.shared_utils._funnel.server import root

    monkeypatch.setattr(root, "_MAX_SOURCES", 100)
    chunk = pb.LogChunk(file_path=f"{tmp_path}/x.log", data=b"x\n", seq=1)
    names = [f"s{number}" for number in range(1000)]
    messages = [chunks.named(chunk.SerializeToString(), name, 1) for name in names]
    funnel = Funnel(FunnelOptions(allowed_roots=(str(tmp_path),), flush_interval_s=0.0))

    async def program() -> None:
        call = _Call(messages, most_waiting=150)
        stream = root.StreamRpc(funnel, call, LoopQueue(), acknowledges=True)
        await asyncio.wait_for(stream.run(), 20)
        assert call.acked == set(names)
        assert len(stream.sources) <= 200

    try:
        asyncio.run(program())
    finally:
        funnel.close(Deadline.after(5))


def test_streams_that_nobody_listens_for_are_bounded(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that takes no answers and opens ever more streams is refused."""
    pb = _pb()
    from nvidia_resiliency_ext.shared_utils._funnel.server import root

    monkeypatch.setattr(root, "_MAX_SOURCES", 100)
    chunk = pb.LogChunk(file_path=f"{tmp_path}/x.log", data=b"x\n", seq=1).SerializeToString()
    messages = [chunks.named(chunk, f"s{number}", 1) for number in range(1000)]
    funnel = Funnel(FunnelOptions(allowed_roots=(str(tmp_path),), flush_interval_s=0.0))

    async def program() -> None:
        call = _Call(messages, most_waiting=1000)
        monkeypatch.setattr(call, "write", lambda _: asyncio.Event().wait())
        stream = root.StreamRpc(funnel, call, LoopQueue(), acknowledges=True)
        with pytest.raises(Refusal, match="too many streams"):
            await asyncio.wait_for(stream.run(), 20)
        assert len(stream.sources) <= 200

    try:
        asyncio.run(program())
    finally:
        funnel.close(Deadline.after(5))


def test_call_to_a_leaf_carries_one_stream(tmp_path) -> None:
    """A leaf has one stream for each call; a second name in it is refused."""
    pb = _pb()
    from nvidia_resiliency_ext.shared_utils._funnel.server.files import Roots
    from nvidia_resiliency_ext.shared_utils._funnel.server.leaf import Relay, RelayRpc

    chunk = pb.LogChunk(file_path=f"{tmp_path}/x.log", data=b"x\n", seq=1).SerializeToString()

    async def program() -> None:
        call = _Call([chunks.named(chunk, name, 1) for name in "sst"], most_waiting=1000)
        relay = Relay(5000, 1 << 20)
        carried = RelayRpc(relay, Roots([str(tmp_path)]), call, acknowledges=False)
        with pytest.raises(Refusal, match="one stream_id"):
            await carried.run()
        assert relay.held_chunks == 2

    asyncio.run(program())


def test_refused_senders_without_numbers_are_forgotten() -> None:
    """Only a stream with a name can come again, so only such a refusal is remembered."""
    refusal = Refusal("RESOURCE_EXHAUSTED", "/logs/a: No space left on device")
    relay = Relay(16, 1 << 20)
    for stream_id in ("a1b2", f"leaf-{'0' * 32}"):
        relay.confirm(stream_id, 0, refusal)
    assert relay._refused == {"a1b2"}


def test_what_is_stored_after_the_end_of_a_call_starts_nothing(funnel: Funnel, tmp_path) -> None:
    """An acknowledgement that nobody takes any more leaves no task to a loop that may be ending."""
    pb = _pb()
    from nvidia_resiliency_ext.shared_utils._funnel.server import root

    message = pb.LogChunk(file_path=f"{tmp_path}/x.log", data=b"x\n", stream_id="s", seq=1)

    async def program() -> None:
        call = _Call([message.SerializeToString()], most_waiting=1000)
        stream = root.StreamRpc(funnel, call, LoopQueue(), acknowledges=True)
        await asyncio.wait_for(stream.run(), 20)
        assert call.acked == {"s"}
        stream._note_progress(stream.sources["s"])
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(program())
