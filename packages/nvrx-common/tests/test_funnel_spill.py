# SPDX-License-Identifier: Apache-2.0
"""Files in which log lines wait: limits, damage, full disks, taking over from ended processes."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_files import largest_file

from nvidia_resiliency_ext.shared_utils._funnel.client.limits import Chunk, MemoryBudget
from nvidia_resiliency_ext.shared_utils._funnel.client.spill import (
    Identity,
    Spill,
    adopt,
    left_behind,
)
from nvidia_resiliency_ext.shared_utils._funnel.client.stream import Stream

KIB = 1024


class SpillCase:
    """A spill directory, what was said about it, and spills in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.said: list[str] = []
        self.budget = MemoryBudget(1024 * KIB, 1024 * KIB)
        self.budget.window_bytes = 1 << 20
        self.made: list[Spill] = []

    def identity(self, path: str = "/logs/a.log") -> Identity:
        return Identity("job", "node", path, f"stream-{len(self.made)}")

    def report(self, _: int, line: str) -> None:
        self.said.append(line)

    def make(self, path: str = "/logs/a.log", budget: MemoryBudget | None = None) -> Spill:
        spill = Spill(str(self.directory), self.identity(path), budget or self.budget, self.report)
        self.made.append(spill)
        return spill

    def adopt(self) -> Spill | None:
        spill = adopt(str(self.directory), self.identity(), self.budget, self.report)
        if spill is not None:
            self.made.append(spill)
        return spill


@pytest.fixture
def case(tmp_path: Path) -> Iterator[SpillCase]:
    made = SpillCase(tmp_path / "spill")
    yield made
    for spill in made.made:
        spill.close(keeps_files=False)


def chunk(seq: int, size: int = 1000) -> Chunk:
    return Chunk(seq, b"%d " % seq + b"x" * size + b"\n", 1)


def read_all(spill: Spill) -> list[int]:
    found = []
    while spill.has_unread():
        read = spill.read()
        if read is not None:
            found.append(read.seq)
    return found


def test_order_and_removal(case: SpillCase) -> None:
    """Chunks come back in order; files go when all in them is confirmed, at last the directory."""
    spill = case.make()
    for seq in range(1, 601):
        assert spill.append(chunk(seq))
    files = sorted(Path(spill.path).glob("*.lines"))
    assert len(files) == 3
    assert read_all(spill) == list(range(1, 601))
    spill.confirmed(300)
    assert len(sorted(Path(spill.path).glob("*.lines"))) == 2
    spill.confirmed(600)
    assert not case.directory.exists()
    assert case.budget.spill_bytes == 0


def test_files_are_private(case: SpillCase) -> None:
    """Directories have mode 0700 and files 0600."""
    spill = case.make()
    assert spill.append(chunk(1))
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in case.directory.rglob("*")}
    assert set(found.values()) == {0o700, 0o600}
    assert stat.S_IMODE(case.directory.stat().st_mode) == 0o700


def test_limit(case: SpillCase) -> None:
    """Files never take more than the limit, counted with all that is beside the lines."""
    spill = case.make()
    seq = 0
    while spill.append(chunk(seq + 1)):
        seq += 1
    used = sum(path.stat().st_size for path in Path(spill.path).glob("*.lines"))
    assert used == case.budget.spill_bytes <= 1024 * KIB
    assert used > 1000 * KIB


def test_chunks_that_were_read_come_back_after_newer_ones_were_dropped(case: SpillCase) -> None:
    """Files read and not confirmed do not stand in the way of what is put back before the rest."""
    spill = case.make()
    for seq in range(1, 601):
        assert spill.append(chunk(seq))
    read = [spill.read() for _ in range(300)]  # the first file, and a part of the second
    gap = spill.drop_oldest()
    assert gap is not None
    assert spill.put_first([one for one in read if one is not None])
    spill.close(keeps_files=True)
    case.made.remove(spill)
    after = case.adopt()
    assert after is not None
    assert read_all(after) == [*range(1, 301), *range(gap.seq + 1, 601)]


def test_torn_end(case: SpillCase) -> None:
    """A record that a crash left half written is cut off; those before it are sent."""
    spill = case.make()
    for seq in range(1, 11):
        assert spill.append(chunk(seq))
    (file,) = Path(spill.path).glob("*.lines")
    spill.close(keeps_files=True)
    os.truncate(file, file.stat().st_size - 100)
    successor = case.adopt()
    assert successor is not None
    assert successor.append(chunk(11))
    assert read_all(successor) == [*range(1, 10), 11]


def test_damage_is_told(case: SpillCase) -> None:
    """Lines in a damaged part of a file are counted as lost, also in the log; others are sent."""
    spill = case.make()
    for seq in range(1, 301):
        assert spill.append(chunk(seq))
    file = min(Path(spill.path).glob("*.lines"))
    with file.open("r+b") as opened:
        opened.seek(10_000)
        opened.write(b"damage")
    stream = Stream(case.budget, spill, drops=False)
    lines = []
    while (sent := stream.take(1.0)) is not None:
        lines.append(sent.data)
    numbers = [int(line.split()[0]) for line in lines if line[:1] != b"["]
    (notice,) = [line for line in lines if line[:1] == b"["]
    assert len(numbers) + int(notice.split()[2]) == 300
    assert stream.counts["lines_dropped"] == int(notice.split()[2])
    assert numbers[-1] == 300
    assert any("is damaged" in line for line in case.said)


def test_damage_in_a_file_that_is_taken_over_is_told(case: SpillCase) -> None:
    """It is said how many bytes are lost, from the damage on; lines before it are sent."""
    spill = case.make()
    for seq in range(10, 20):
        assert spill.append(chunk(seq))
    (file,) = Path(spill.path).glob("*.lines")
    spill.close(keeps_files=True)
    half = file.stat().st_size // 2
    with file.open("r+b") as opened:
        opened.seek(half)
        opened.write(b"damage")
    successor = case.adopt()
    assert successor is not None
    assert read_all(successor) == [10, 11, 12, 13, 14]
    (said,) = [line for line in case.said if "is damaged" in line]
    assert f"{file} is damaged: its last {half} bytes are lost" == said


def test_gap_survives_the_process(case: SpillCase) -> None:
    """What was dropped is still told when a later process sends the rest."""
    spill = case.make()
    for seq in range(1, 601):
        assert spill.append(chunk(seq))
    stream = Stream(case.budget, spill, drops=True, first_seq=601)
    for _ in range(2):
        assert stream._drop_oldest()
    assert stream.move_to_spill()
    spill.close(keeps_files=True)
    successor = case.adopt()
    assert successor is not None
    first = successor.read()
    assert first is not None
    rest = read_all(successor)
    assert first.data.startswith(b"[nvrx] dropped %d lines" % (600 - len(rest)))
    assert rest[0] == first.seq + 1


def test_full_disk(case: SpillCase) -> None:
    """A disk that fills in the middle of a record counts as full, and is used again later."""
    spill = case.make()
    assert spill.append(chunk(1))
    (file,) = Path(spill.path).glob("*.lines")
    before = case.budget.spill_bytes
    with largest_file(file.stat().st_size + 50):
        assert not spill.append(chunk(2))
        assert not spill.append(chunk(2))
        assert case.budget.spill_bytes == before
        assert file.stat().st_size > before, "a part of the record was written"
    assert spill.append(chunk(2))
    assert read_all(spill) == [1, 2]
    assert [line.partition(" wait in")[0] for line in case.said[1:]] == [
        "log lines cannot",
        "log lines can",
    ]


def test_disk_without_room_for_a_directory(case: SpillCase) -> None:
    """A try for which there is no space leaves nothing behind, however often it is repeated."""
    spill = case.make()
    with largest_file(10):
        for _ in range(3):
            assert not spill.append(chunk(1))
    assert list(case.directory.iterdir()) == []
    assert case.budget.spill_bytes == 0
    assert spill.append(chunk(1))
    assert read_all(spill) == [1]


def test_owner_alive(case: SpillCase) -> None:
    """Files of a process that lives are nobody else's; those of a killed one are, one at a time."""
    owner = case.make()
    assert owner.append(chunk(1))
    assert case.adopt() is None
    assert left_behind(str(case.directory), "job", "node") == []
    owner.forget_descriptors()
    assert left_behind(str(case.directory), "job", "node") == ["/logs/a.log"]
    assert left_behind(str(case.directory), "another job", "node") == []
    assert left_behind(str(case.directory), "job", "another node") == []
    successor = case.adopt()
    assert successor is not None
    assert successor.identity.stream_id == owner.identity.stream_id
    assert case.adopt() is None


def test_lock_ends_with_the_process(case: SpillCase) -> None:
    """The lock of a process killed with SIGKILL is gone with it, although a child of it lives."""
    program = f"""
import os, subprocess, sys
from nvidia_resiliency_ext.shared_utils._funnel.client.limits import Chunk
from nvidia_resiliency_ext.shared_utils._funnel.client.limits import MemoryBudget
from nvidia_resiliency_ext.shared_utils._funnel.client.spill import Spill
from nvidia_resiliency_ext.shared_utils._funnel.client.spill import Identity
spill = Spill({str(case.directory)!r}, Identity("job", "node", "/logs/a.log", "s"),
              MemoryBudget(1 << 20, 1 << 20), print)
assert spill.append(Chunk(1, b"a\\n", 1))
child = subprocess.Popen(["cat"], stdin=sys.stdin, close_fds=False)
print("ready", flush=True)
child.wait()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    for line in process.stdout:
        if line == "ready\n":
            break
    assert case.adopt() is None
    process.kill()
    process.wait(20.0)
    successor = case.adopt()
    process.stdin.close()
    process.stdout.close()
    assert successor is not None
    assert read_all(successor) == [1]


def test_directory_of_others(case: SpillCase) -> None:
    """A spill directory that others may write to is not used, nor is what lies in an open one."""
    case.directory.mkdir(mode=0o777)
    case.directory.chmod(0o777)
    spill = case.make()
    assert not spill.append(chunk(1))
    assert "others may write" in case.said[0]
    case.directory.chmod(0o700)
    assert spill.append(chunk(1))
    Path(spill.path).chmod(0o755)
    spill.forget_descriptors()
    assert case.adopt() is None


@pytest.mark.parametrize(
    "content",
    [b"", b"nvrxlog1", b"\0" * 100, b"nvrxlog1" + bytes(range(256)) * 16],
    ids=["empty", "half a header", "zeros", "noise"],
)
def test_garbage(case: SpillCase, content: bytes) -> None:
    """Files that are none of ours, or an owner's file that says nothing, harm nobody."""
    spill = case.make()
    assert spill.append(chunk(1))
    (Path(spill.path) / "00000500.lines").write_bytes(content)
    (Path(spill.path) / "notes.txt").write_bytes(content)
    (case.directory / f"{spill.identity.key}-other").mkdir(mode=0o700)
    (case.directory / f"{spill.identity.key}-other" / "stream.json").write_bytes(content)
    os.mkfifo(case.directory / f"{spill.identity.key}-fifo")
    spill.close(keeps_files=True)
    successor = case.adopt()
    assert successor is not None
    assert read_all(successor) == [1]


def test_numbers_of_a_successor(case: SpillCase) -> None:
    """New lines get numbers beyond all that the ended process may have sent from its memory."""
    spill = case.make()
    assert spill.append(chunk(100))
    spill.close(keeps_files=True)
    successor = case.adopt()
    assert successor is not None
    first_seq = successor.next_generation()
    stream = Stream(case.budget, successor, drops=False, first_seq=first_seq)
    stream.buffer += b"new\n"
    old, new = stream.take(1.0), stream.take(2.0)
    assert old is not None
    assert new is not None
    assert old.seq == 100
    assert new.seq >= 1 << 32
    # The server had more than the files know of, and says so: no nonsense.
    assert stream.confirm(150)
    assert stream.has_chunks()
    assert stream.confirm(new.seq)
    assert not stream.has_chunks()
