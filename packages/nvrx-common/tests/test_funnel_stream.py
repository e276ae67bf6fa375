# SPDX-License-Identifier: Apache-2.0
"""The order of a target's lines: batches, memory, files, confirmations; no thread, no network."""

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvidia_resiliency_ext.shared_utils._funnel.client.limits import (
    BATCH_BYTES,
    MAX_LINE_BYTES,
    RESERVE_BYTES,
    Backoff,
    Chunk,
    MemoryBudget,
    Notices,
)
from nvidia_resiliency_ext.shared_utils._funnel.client.send_buffer import SendBuffer
from nvidia_resiliency_ext.shared_utils._funnel.client.spill import Identity, Spill, adopt
from nvidia_resiliency_ext.shared_utils._funnel.client.stream import Stream

pytestmark = pytest.mark.slow

KIB = 1024
WINDOW = 128 * KIB


class Server:
    """What the real one does with chunks: it appends those that it does not have."""

    def __init__(self) -> None:
        self.committed = 0
        self.content = bytearray()

    def take(self, chunk: Chunk) -> None:
        if chunk.seq > self.committed:
            self.content += chunk.data
            self.committed = chunk.seq


def make_stream(budget: MemoryBudget, spill: Spill | None = None, *, drops: bool = False) -> Stream:
    budget.window_bytes = WINDOW
    return Stream(budget, spill, drops=drops)


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(256 * KIB, 8 * 1024 * KIB)


def make_spill(directory: Path, budget: MemoryBudget) -> Spill:
    identity = Identity("job", "node", "/logs/a.log", "stream")
    return Spill(str(directory / "spill"), identity, budget, lambda *_: None)


@pytest.fixture
def spill(tmp_path: Path, budget: MemoryBudget) -> Iterator[Spill]:
    made = make_spill(tmp_path, budget)
    yield made
    made.close(keeps_files=False)


def fill(stream: Stream, lines: int, size: int = 1000, first: int = 0) -> bytes:
    """Write numbered lines until there is no space; return what was taken."""
    taken = bytearray()
    for number in range(first, first + lines):
        if len(stream.buffer) >= stream.attention_at and not stream.make_way():
            break
        line = b"%08d " % number + b"x" * (size - 10) + b"\n"
        stream.buffer += line
        taken += line
    return bytes(taken)


def drain(stream: Stream, server: Server, now: float = 1e9) -> None:
    """Send and confirm everything."""
    while (chunk := stream.take(now)) is not None:
        server.take(chunk)
        assert stream.confirm(chunk.seq)
        now += 1.0


def test_first_line_leaves_at_once_and_the_next_ones_together(budget: MemoryBudget) -> None:
    """A line after a pause leaves at once; those within 20 ms behind it leave in one chunk."""
    stream = make_stream(budget)
    stream.buffer += b"one\n"
    assert stream.wait_s(100.0) == 0.0
    assert stream.take(100.0) == Chunk(1, b"one\n", 1)
    stream.buffer += b"two\n"
    stream.buffer += b"three\n"
    assert stream.take(100.0) is None
    assert stream.wait_s(100.005) == pytest.approx(0.015)
    assert stream.take(100.021) == Chunk(2, b"two\nthree\n", 2)


def test_part_of_a_line_waits_for_the_rest(budget: MemoryBudget) -> None:
    """Only whole lines leave; the rest of the last one follows later."""
    stream = make_stream(budget)
    stream.buffer += b"whole\npart"
    assert stream.take(1.0) == Chunk(1, b"whole\n", 1)
    assert stream.take(2.0) is None
    assert stream.wait_s(2.0) is None
    stream.buffer += b"ial\n"
    assert stream.take(3.0) == Chunk(2, b"partial\n", 1)
    stream.buffer += b"last"
    stream.finish_line()
    assert stream.take(4.0) == Chunk(3, b"last\n", 1)


def test_full_batch_needs_no_deadline(budget: MemoryBudget) -> None:
    """A buffer of 64 KiB becomes a chunk with the next write, whatever the time."""
    stream = make_stream(budget)
    fill(stream, 200)
    first = stream.take(0.0)
    assert first is not None
    assert BATCH_BYTES <= len(first.data) < BATCH_BYTES + 1000


@pytest.mark.no_second_try
def test_endless_line_is_broken(budget: MemoryBudget) -> None:
    """A line of more than 1 MiB goes on in a new line, and no byte of it is lost."""
    stream = make_stream(MemoryBudget(64 * 1024 * KIB, 0))
    piece = b"y" * BATCH_BYTES
    for _ in range(40):
        if len(stream.buffer) >= stream.attention_at:
            assert stream.make_way()
        stream.buffer += piece
    stream.finish_line()
    server = Server()
    stream.is_urgent = True
    while len(stream.buffer):
        drain(stream, server)
        stream.is_urgent = True
    lines = bytes(server.content).splitlines()
    assert max(map(len, lines)) <= MAX_LINE_BYTES
    assert sum(map(len, lines)) == 40 * BATCH_BYTES
    assert stream.counts["lines_broken"] == 2


def test_memory_is_bounded_and_refuses(budget: MemoryBudget) -> None:
    """Without files and dropping there is no space beyond the limit until a confirmation."""
    stream = make_stream(budget)
    fill(stream, 10_000)
    assert budget.memory_bytes <= 256 * KIB
    assert not stream.make_way()
    chunk = stream.take(1.0)
    assert chunk is not None
    assert stream.confirm(chunk.seq)
    assert stream.make_way()


def test_window_is_bounded(budget: MemoryBudget) -> None:
    """No more than the window is on its way without a confirmation."""
    stream = make_stream(budget)
    fill(stream, 10_000)
    sent = 0
    while (chunk := stream.take(1.0)) is not None:
        sent += len(chunk.data)
    assert WINDOW <= sent <= WINDOW + BATCH_BYTES + 1000
    assert stream.wait_s(1.0) is None


def test_others_always_have_some_room(budget: MemoryBudget) -> None:
    """A target finds space for two batches when another has used up the memory."""
    greedy, modest = make_stream(budget), make_stream(budget)
    fill(greedy, 10_000)
    assert len(fill(modest, 10_000)) >= RESERVE_BYTES


def test_rewind_sends_again_in_order(budget: MemoryBudget) -> None:
    """After a broken connection everything unconfirmed comes again, with the same numbers."""
    stream = make_stream(budget)
    sent = []
    for number in range(5):
        stream.buffer += b"%d\n" % number
        sent.append(stream.take(float(number)))
    assert stream.confirm(2)
    stream.rewind()
    assert stream.take(10.0) == sent[2]
    stream.rewind()
    assert [stream.take(10.0) for _ in range(3)] == sent[2:]
    assert stream.counts["chunks_resent"] == 4
    assert stream.confirm(5)
    assert not stream.has_chunks()
    assert budget.memory_bytes == 0


@pytest.mark.parametrize("seq", [3, 1 << 63])
def test_confirmation_of_the_future_is_nonsense(budget: MemoryBudget, seq: int) -> None:
    """A number that was never sent confirms nothing."""
    stream = make_stream(budget)
    stream.buffer += b"a\n"
    stream.take(1.0)
    assert stream.confirm(seq) is None
    assert stream.has_chunks()
    assert stream.confirm(0) is False


def test_flush_covers_what_is_in_the_buffer(budget: MemoryBudget) -> None:
    """What was written before a flush is done only once it is cut, sent and confirmed."""
    stream = make_stream(budget)
    stream.buffer += b"a\n"
    upto = stream.seq_after_cut()
    assert not stream.is_done(upto)
    chunk = stream.take(1.0)
    assert chunk is not None
    assert not stream.is_done(upto)
    stream.confirm(chunk.seq)
    assert stream.is_done(upto)


def test_files_take_over_and_order_stays(budget: MemoryBudget, spill: Spill) -> None:
    """When memory is full the oldest lines go to files, and all leave in the order written."""
    stream = make_stream(budget, spill)
    taken = fill(stream, 4000)
    assert len(taken) == 4_000_000
    assert budget.memory_bytes <= 256 * KIB
    assert budget.spill_bytes > 3_000_000
    server = Server()
    stream.is_urgent = True
    drain(stream, server)
    assert bytes(server.content) == taken
    assert (budget.memory_bytes, budget.spill_bytes) == (0, 0)


def notices_in(content: bytes) -> tuple[int, int]:
    """Return the sum of the dropped lines and bytes that notices tell of."""
    found = [line.split() for line in content.splitlines() if line.startswith(b"[nvrx] dropped ")]
    return sum(int(words[2]) for words in found), sum(int(words[4][1:]) for words in found)


@pytest.mark.parametrize("has_files", [True, False])
def test_drop_oldest_counts_every_line(budget: MemoryBudget, spill: Spill, has_files: bool) -> None:
    """What is dropped stands counted in its place in the log; what stays is the newest."""
    stream = make_stream(budget, spill if has_files else None, drops=True)
    taken = fill(stream, 20_000)
    assert len(taken) == 20_000_000
    assert budget.memory_bytes <= 256 * KIB
    assert budget.spill_bytes <= budget.spill_limit_bytes
    server = Server()
    stream.is_urgent = True
    drain(stream, server)
    content = bytes(server.content)
    kept = [line for line in content.splitlines(keepends=True) if line[:1] == b"0"]
    assert notices_in(content) == (stream.counts["lines_dropped"], stream.counts["bytes_dropped"])
    assert len(kept) + stream.counts["lines_dropped"] == 20_000
    assert b"".join(kept) == taken[-len(b"".join(kept)) :]
    assert (len(kept) > 7000) == has_files
    assert content.startswith(b"[nvrx] dropped ")


def test_no_room_in_files(tmp_path: Path, budget: MemoryBudget) -> None:
    """A directory that cannot be used counts as full, with one line about it."""
    (tmp_path / "spill").write_text("in the way")
    reported: list[str] = []
    identity = Identity("job", "node", "/logs/a.log", "stream")
    spill = Spill(str(tmp_path / "spill"), identity, budget, lambda *said: reported.append(said[1]))
    stream = make_stream(budget, spill)
    fill(stream, 4000)
    assert not stream.make_way()
    assert len(reported) == 1
    assert "cannot wait in" in reported[0]


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_events_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    """Whatever is written, sent, confirmed and broken in whatever order, the file is as written.

    A killed process loses only what it had in memory; its successor sends what is in the files.
    """
    draw = random.Random(seed)
    drops = seed % 2 == 1
    budget = MemoryBudget(256 * KIB, 1024 * KIB)
    spill = make_spill(tmp_path, budget)
    stream = make_stream(budget, spill, drops=drops)
    server, number, now, dropped = Server(), 0, 0.0, 0
    for _ in range(3000):
        event = draw.random()
        now += draw.choice((0.0, 0.001, 0.03))
        if event < 0.5:
            for _ in range(draw.randrange(30)):
                if len(stream.buffer) >= stream.attention_at and not stream.make_way():
                    break
                stream.buffer += b"%08d " % number + b"x" * draw.randrange(4000) + b"\n"
                number += 1
        elif event < 0.9:
            chunk = stream.take(now)
            if chunk is not None and draw.random() < 0.9:
                server.take(chunk)
                if draw.random() < 0.7:
                    stream.confirm(chunk.seq)
            elif chunk is not None:
                stream.rewind()
        elif event < 0.98:
            stream.rewind()
        elif event > 0.998 and not drops:
            spill.forget_descriptors()
            budget = MemoryBudget(256 * KIB, 1024 * KIB)
            budget.window_bytes = WINDOW
            adopted = adopt(str(tmp_path / "spill"), spill.identity, budget, lambda *_: None)
            spill = adopted or make_spill(tmp_path, budget)
            first = server.committed + 1 if adopted is None else spill.next_generation()
            stream = Stream(budget, spill, drops=drops, first_seq=first)
            number += 10_000_000
            dropped = -1
    stream.rewind()
    stream.is_urgent = True
    drain(stream, server, now + 1e6)
    lines = bytes(server.content).splitlines()
    numbers = [int(line[:8]) for line in lines if not line.startswith(b"[nvrx]")]
    assert numbers == sorted(set(numbers)), "doubled or out of order"
    lost, _ = notices_in(bytes(server.content))
    assert lost == stream.counts["lines_dropped"]
    if not dropped:
        assert len(numbers) + lost == number
    assert (budget.memory_bytes, budget.spill_bytes) == (0, 0)
    assert not (tmp_path / "spill").exists()


@pytest.mark.parametrize(
    ("code", "is_plain", "expected"),
    [
        ("UNAVAILABLE", False, (True, False, "short")),
        ("UNAVAILABLE", True, (True, False, "short")),
        ("OK", False, (True, False, "short")),
        ("RESOURCE_EXHAUSTED", False, (True, False, "short")),
        ("UNIMPLEMENTED", False, (True, True, "none")),
        ("UNIMPLEMENTED", True, (True, True, "long")),
        ("UNAUTHENTICATED", False, (True, False, "long")),
        ("PERMISSION_DENIED", True, (True, True, "long")),
        ("INVALID_ARGUMENT", True, (False, False, "none")),
    ],
)
def test_each_end_of_a_call_leads_to_what_may_help(
    code: str, is_plain: bool, expected: tuple[bool, bool, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status says whether there is another call, of which kind, and after what pause."""
    pauses: list[float] = []
    monkeypatch.setattr(SendBuffer, "_run", lambda _: None)
    monkeypatch.setattr(SendBuffer, "_pause", lambda _, seconds: pauses.append(seconds))
    stream = Stream(MemoryBudget(1 << 20, 0), None, drops=False)
    link: Any = SimpleNamespace(endpoint="host:1")
    identity = Identity("job", "node", "/a", "s")
    send_buffer = SendBuffer(identity, stream, link, Notices(), write_timeout_s=1.0)
    send_buffer._is_plain = is_plain
    goes_on = send_buffer._after(code, "why", has_progressed=False)
    pause = "none" if not pauses else "long" if pauses[0] > 20 else "short"
    assert (goes_on, send_buffer._is_plain, pause) == expected


def test_backoff_spreads_and_starts_again() -> None:
    """Delays are spread over the whole interval, grow to 5 s, and begin small after a success."""
    backoff = Backoff()
    assert backoff.next_s() <= 0.1
    for _ in range(20):
        backoff.next_s()
    late = [backoff.next_s() for _ in range(1000)]
    assert max(late) <= 5.0
    assert min(late) < 0.5
    assert 2.2 < sum(late) / len(late) < 2.8
    backoff.reset()
    assert backoff.next_s() <= 0.1
