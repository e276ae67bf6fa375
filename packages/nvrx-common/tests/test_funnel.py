# SPDX-License-Identifier: Apache-2.0
"""The funnel behind the servers, driven in process over real files; it needs no gRPC."""

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_files import PREFIX_BYTES, Hung, largest_file, make_large
from results import no_second_try

from nvidia_resiliency_ext.shared_utils._funnel.server import files, queue
from nvidia_resiliency_ext.shared_utils._funnel.server.chunks import Chunk, Refusal
from nvidia_resiliency_ext.shared_utils._funnel.server.files import (
    LogFile,
    LogPath,
    Roots,
    ledger_name,
)
from nvidia_resiliency_ext.shared_utils._funnel.server.funnel import Funnel
from nvidia_resiliency_ext.shared_utils._funnel.server.queue import FunnelOptions
from nvidia_resiliency_ext.shared_utils._funnel.server.target import Source, Target
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, UnsafePathError

WAIT_S = 60.0


class Told:
    """A connection that remembers what it was told."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def __call__(self, source: Source) -> None:  # noqa: ARG002 - one is enough to look
        with self.changed:
            self.changed.notify_all()

    def until(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S)


class Rig:
    """A funnel with helpers."""

    def __init__(self, root: Path, **options) -> None:
        self.root = root
        self.funnel = Funnel(FunnelOptions(allowed_roots=(str(root),), **options))
        self.told = Told()

    def source(self, stream: str = "", node: str = "0", **kw) -> Source:
        return Source(self.told, stream, node, **kw)

    def offer(self, source: Source, name: str, data: bytes, seq: int = 0) -> bool:
        chunk = Chunk(
            source.node_id, memoryview(data), str(self.root / name), source.stream_id, seq
        )
        return self.funnel.offer(source, chunk, len(data) + 50)

    def settle(self, source: Source, timeout_s: float = WAIT_S) -> bool:
        return self.funnel.wait(
            source, lambda it: it.is_settled or it.refusal is not None, timeout_s
        )

    def until_writing(self, target: Target) -> None:
        """Wait until a writer has taken what waits for a target; there is no event for it."""
        self.until(lambda: target.waiting and target.waiting[-1].growing is None)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for what the funnel's threads do or say; there is no event for it."""
        end = Deadline.after(WAIT_S)
        while not condition():
            assert not end.expired()
            threading.Event().wait(0.005)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    @no_second_try()
    def assert_log(self, name: str, content: bytes) -> None:
        """Check that a settled log has each line once."""
        assert self.read(name) == content


def _offer_all(rig: Rig, source: Source, items: list[tuple[str, bytes]]) -> None:
    for seq, (name, data) in enumerate(items, 2):
        rig.offer(source, name, data, seq)


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator:
    made: list[Rig] = []

    def make(**options) -> Rig:
        made.append(Rig(tmp_path, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.funnel.close(Deadline.after(5))


def test_bytes_arrive_unchanged_and_in_order(rigs, tmp_path: Path) -> None:
    """What streams send stands in the files they name, each stream in its order."""
    rig = rigs()
    sources = [rig.source(node=str(i)) for i in range(4)]
    for number in range(200):
        for i, source in enumerate(sources):
            rig.offer(source, f"a/b/{i % 2}.log", b"%d %d\n" % (i, number))
    for source in sources:
        assert rig.settle(source)
    for i in range(4):
        mine = [
            int(x.split()[1]) for x in rig.read(f"a/b/{i % 2}.log").splitlines() if x[0] == 48 + i
        ]
        assert mine == list(range(200))
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "a/b/0.log").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../../x",
        "",
        "/",
        ".",
        "a/.",
        "with\nnewline",
        "with\0null",
        "tab\t",
        ".x.nvrx-acks",
    ],
)
def test_bad_names_are_refused_and_nothing_is_made(rigs, tmp_path: Path, name: str) -> None:
    """A name that no log may have is an invalid argument before anything is created."""
    rig = rigs()
    path = f"{tmp_path}/{name}" if name else ""
    with pytest.raises(Refusal) as caught:
        rig.funnel.offer(rig.source(), Chunk("0", memoryview(b"x\n"), path), 2)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["y" * 300, "/".join(["d" * 200] * 30)])
def test_long_names_are_refused(rigs, tmp_path: Path, name: str) -> None:
    """Names longer than a file system or the ledger beside the log allows are refused."""
    rig = rigs()
    with pytest.raises(Refusal) as caught:
        rig.offer(rig.source(), name, b"x\n")
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["symlink", "dangling", "parent symlink", "fifo", "directory",
                                  "hard link", "device"])  # fmt: skip
def test_what_is_no_log_is_refused(tmp_path: Path, kind: str) -> None:
    """Links, pipes, devices and directories are refused, nothing is made, others go on."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    (outside / "victim").write_bytes(b"keep\n")
    name = "x.log"
    if kind == "symlink":
        (root / name).symlink_to(outside / "victim")
    elif kind == "dangling":
        (root / name).symlink_to(outside / "new")
    elif kind == "parent symlink":
        (root / "d").symlink_to(outside)
        name = "d/e/x.log"
    elif kind == "fifo":
        os.mkfifo(root / name)
    elif kind == "directory":
        (root / name).mkdir()
    elif kind == "hard link":
        os.link(outside / "victim", root / name)
    else:
        try:
            os.mknod(root / name, 0o20600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("making a device needs root")
    rig = Rig(root)
    bad, good = rig.source(), rig.source()
    rig.offer(bad, name, b"PWNED\n")
    rig.offer(good, "good.log", b"fine\n")
    assert rig.settle(bad)
    assert rig.settle(good)
    assert bad.refusal is not None
    assert bad.refusal.code == "INVALID_ARGUMENT"
    rig.assert_log("good.log", b"fine\n")
    assert sorted(path.name for path in outside.rglob("*")) == ["victim"]
    assert (outside / "victim").read_bytes() == b"keep\n"
    rig.funnel.close(Deadline.after(5))


def test_directory_swapped_for_a_link_after_the_check_does_not_lead_out(tmp_path: Path) -> None:
    """Whoever can write below the root cannot lead a log outside at any moment."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "d").mkdir(parents=True)
    outside.mkdir()
    roots = Roots([str(root)])
    place = roots.locate(str(root / "d/x.log"))
    (root / "d").rmdir()
    (root / "d").symlink_to(outside)
    with pytest.raises(UnsafePathError):
        roots.open(place)
    assert list(outside.iterdir()) == []


def test_root_may_be_named_through_a_link(tmp_path: Path) -> None:
    """Senders may know a root by the name it was given or by its real one."""
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    roots = Roots([str(tmp_path / "alias")])
    expected = roots.locate(str(tmp_path / "real/x"))
    assert roots.locate(str(tmp_path / "alias/x")) == expected
    with pytest.raises(Refusal):
        roots.locate(str(tmp_path / "aliasx/x"))


def test_missing_root_is_a_wrong_setting(tmp_path: Path) -> None:
    """A root that is not there is told with its name."""
    with pytest.raises(ConfigError, match="nowhere"):
        Roots([str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError):
        Roots([])


# --- lines


def test_unfinished_line_is_ended_before_another_stream_writes(rigs) -> None:
    """The line of the next node is never glued to one without a newline."""
    rig = rigs()
    first, second = rig.source(), rig.source()
    rig.offer(first, "x.log", b"half")
    assert rig.settle(first)
    rig.offer(second, "x.log", b"whole\n")
    assert rig.settle(second)
    rig.offer(first, "x.log", b"end")
    rig.funnel.finish(first, is_clean=True)
    assert rig.settle(first)
    rig.assert_log("x.log", b"half\nwhole\nend\n")


def test_one_stream_may_send_a_line_in_parts(rigs) -> None:
    """Nothing is put between the chunks of one stream, and a newline comes at its end only."""
    rig = rigs()
    source = rig.source()
    for part in (b"a", b"b", b"c"):
        rig.offer(source, "x.log", part)
        assert rig.settle(source)
    rig.funnel.finish(source, is_clean=True)
    assert rig.settle(source)
    rig.assert_log("x.log", b"abc\n")


def test_line_of_an_earlier_server_is_ended(rigs, tmp_path: Path) -> None:
    """What a crash left unfinished is not glued to the next line."""
    (tmp_path / "x.log").write_bytes(b"torn")
    rig = rigs()
    source = rig.source()
    rig.offer(source, "x.log", b"new\n")
    assert rig.settle(source)
    rig.assert_log("x.log", b"torn\nnew\n")


def test_named_stream_goes_on_in_the_middle_of_its_line(rigs) -> None:
    """A stream that broke off may come back, to this server or the next, and finish its line."""
    rig = rigs()
    source = rig.source("s")
    rig.offer(source, "x.log", b"ha", 1)
    assert rig.settle(source)
    rig.funnel.finish(source, is_clean=False)
    rig.funnel.close(Deadline.after(5))
    rig = rigs()
    source = rig.source("s")
    rig.offer(source, "x.log", b"lf\n", 2)
    assert rig.settle(source)
    rig.assert_log("x.log", b"half\n")


# --- exactly once


def test_chunks_that_come_again_are_dropped(rigs) -> None:
    """Within one server and over a restart, each number of a stream is written once per file."""
    for _ in range(2):
        rig = rigs()
        for _ in range(2):
            source = rig.source("s")
            for seq in range(1, 6):
                rig.offer(source, "x.log" if seq < 4 else "y.log", b"%d\n" % seq, seq)
            assert rig.settle(source)
            assert source.committed_seq == 5
            rig.funnel.finish(source, is_clean=True)
        rig.funnel.close(Deadline.after(5))
    rig.assert_log("x.log", b"1\n2\n3\n")
    rig.assert_log("y.log", b"4\n5\n")


@pytest.mark.parametrize("written", range(0, 41, 5))
def test_crash_at_any_byte_of_a_batch_is_repaired(rigs, tmp_path: Path, written: int) -> None:
    """Wherever a server dies in a write, the next one neither loses nor doubles a line."""
    rig = rigs()
    source = rig.source("s")
    rig.offer(source, "x.log", b"first....\n", 1)
    assert rig.settle(source)
    rig.funnel.close(Deadline.after(5))
    batch = b"".join(b"line %04d\n" % i for i in range(4))
    # As the server does it: the record first, then the bytes, as far as it came.
    from nvidia_resiliency_ext.shared_utils._funnel.server.files import encode

    with (tmp_path / ledger_name("x.log")).open("ab") as beside:
        beside.write(encode(10, 50, {"s": 5}))
    with (tmp_path / "x.log").open("ab") as log:
        log.write(batch[:written])
    rig = rigs()
    source = rig.source("s")
    for i in range(4):
        rig.offer(source, "x.log", b"line %04d\n" % i, i + 2)
    assert rig.settle(source)
    rig.assert_log("x.log", b"first....\n" + batch)


def test_large_batch_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A batch goes out in several writes; where a later one fails, nothing of it stays."""
    make_large(tmp_path / "x.log")
    roots = Roots((str(tmp_path),))
    log = files.LogFile(roots, roots.locate(str(tmp_path / "x.log")))
    pieces: list[files.Piece] = [b"a" * 60_000, memoryview(b"b" * 300_000), b"\n", b"c" * 90_000]
    with largest_file(PREFIX_BYTES + 400_000), pytest.raises(OSError, match="File too large"):
        log.append(pieces, {}, sync=False)
    assert (tmp_path / "x.log").stat().st_size == PREFIX_BYTES
    log.append(pieces, {}, sync=False)
    log.close()
    assert (tmp_path / "x.log").read_bytes()[PREFIX_BYTES:] == b"".join(pieces)


def test_void_batch_stays_void_after_two_restarts(rigs, tmp_path: Path) -> None:
    """A record that was taken back is not believed later, when the log has grown past its end."""
    (tmp_path / "x.log").write_bytes(b"")
    from nvidia_resiliency_ext.shared_utils._funnel.server.files import encode

    (tmp_path / ledger_name("x.log")).write_bytes(encode(0, 6, {"a": 1}))
    for stream in ("b", "c"):
        rig = rigs()
        source = rig.source(stream)
        rig.offer(source, "x.log", b"%s other\n" % stream.encode(), 1)
        assert rig.settle(source)
        rig.funnel.close(Deadline.after(5))
    rig = rigs()
    source = rig.source("a")
    rig.offer(source, "x.log", b"mine!\n", 1)
    assert rig.settle(source)
    with no_second_try():
        assert b"mine!\n" in rig.read("x.log")


def test_ledger_is_compacted(rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger stays small over any number of batches and still knows every stream."""
    monkeypatch.setattr(files, "_COMPACT_ABOVE_BYTES", 500)
    rig = rigs(flush_interval_s=0.0)
    sources = [rig.source(f"s{i}") for i in range(3)]
    for seq in range(1, 60):
        for source in sources:
            rig.offer(source, "x.log", b"%d\n" % seq, seq)
            assert rig.settle(source)
    assert (tmp_path / ledger_name("x.log")).stat().st_size < 2000
    rig.funnel.close(Deadline.after(5))
    rig = rigs()
    for i in range(3):
        source = rig.source(f"s{i}")
        rig.offer(source, "x.log", b"again\n", 59)
        assert rig.settle(source)
    with no_second_try():
        assert b"again" not in rig.read("x.log")
    left = [p.name for p in tmp_path.iterdir()]
    assert sorted(left) == [ledger_name("x.log"), "x.log"]


def test_senders_without_numbers_leave_no_ledger(rigs, tmp_path: Path) -> None:
    """Only acknowledged delivery needs a file beside the log."""
    rig = rigs()
    source = rig.source()
    rig.offer(source, "x.log", b"1\n")
    assert rig.settle(source)
    assert [path.name for path in tmp_path.iterdir()] == ["x.log"]


def test_removed_log_is_made_again(rigs, tmp_path: Path) -> None:
    """A log that somebody removes is written anew, not into the void."""
    rig = rigs()
    source = rig.source("s")
    rig.offer(source, "x.log", b"1\n", 1)
    assert rig.settle(source)
    (tmp_path / "x.log").unlink()
    rig.offer(source, "x.log", b"2\n", 2)
    assert rig.settle(source)
    rig.assert_log("x.log", b"2\n")


# --- trouble


class HungLogs:
    """Logs `hung*.log` whose writing hangs in the kernel until `release`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fifos: dict[str, Hung] = {}

    def open(self, name: str) -> int:
        self._fifos[name] = Hung(self._directory / name)
        return self._fifos[name].writer

    def release(self) -> None:
        for fifo in self._fifos.values():
            fifo.release()

    def close(self) -> dict[str, bytes]:
        """Return what was written to each, once nobody has them open."""
        found = {name: fifo.close() for name, fifo in self._fifos.items()}
        self._fifos.clear()
        return found


@pytest.fixture
def hung(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HungLogs]:
    """Put full FIFOs in the place of files `hung*.log`, as on a dead network file system."""
    logs = HungLogs(tmp_path_factory.mktemp("hung"))
    original = Roots.open

    def opened(roots: Roots, place: LogPath) -> tuple[int, int]:
        if not place.names[-1].startswith("hung"):
            return original(roots, place)
        return os.open(place.root, os.O_RDONLY | os.O_DIRECTORY), logs.open(place.names[-1])

    monkeypatch.setattr(Roots, "open", opened)
    yield logs
    logs.close()


def test_hanging_files_hold_up_no_other(hung: HungLogs, rigs) -> None:
    """With more hanging writes than usual threads, a healthy file is written, then they are too."""
    rig = rigs(stall_s=0.1)
    sick = [rig.source() for _ in range(5)]
    for number, source in enumerate(sick):
        rig.offer(source, f"hung{number}.log", b"x\n")
    good = rig.source()
    for number in range(50):
        rig.offer(good, "good.log", b"%d\n" % number)
        assert rig.settle(good)
    assert not any(source.is_settled for source in sick)
    hung.release()
    for source in sick:
        assert rig.settle(source)


def test_small_chunks_without_numbers_wait_as_one(hung: HungLogs, rigs) -> None:
    """What one stream sends in small chunks is one piece; streams and large chunks keep order."""
    rig = rigs()
    rig.offer(rig.source(), "hung.log", b"first\n")
    target = rig.funnel.queue.targets[str(rig.root / "hung.log")]
    rig.until_writing(target)
    one, other = rig.source(), rig.source()
    large = b"z" * 9999 + b"\n"
    expected = [b"first\n"]
    for source, data in [(one, b"a\n")] * 100 + [(other, b"b\n"), (one, large), (one, b"c\n")]:
        rig.offer(source, "hung.log", data)
        expected.append(data)
    assert len(target.waiting) == 1 + 4
    numbered = rig.source("s")
    for seq in (1, 2):
        rig.offer(numbered, "hung.log", b"%d\n" % seq, seq)
        expected.append(b"%d\n" % seq)
    assert len(target.waiting) == 1 + 4 + 2
    hung.release()
    for source in (one, other, numbered):
        assert rig.settle(source)
    assert one.written_bytes == 200 + len(large) + 2
    assert numbered.committed_seq == 2
    assert rig.funnel.queue.stats()["buffered_bytes"] == 0
    assert rig.funnel.queue.stats()["chunks_received"] == 106
    rig.funnel.close(Deadline.after(WAIT_S))
    assert hung.close() == {"hung.log": b"".join(expected)}


def test_memory_stays_within_the_budget(hung: HungLogs, rigs) -> None:
    """However much comes for a file that hangs, its sender waits, and others have space."""
    rig = rigs(max_buffered_bytes=1 << 20, stall_s=0.1)
    source, data = rig.source("s"), b"z" * 9999 + b"\n"
    seq = 1
    while rig.offer(source, "hung.log", data, seq):
        seq += 1
        assert seq < 200
    assert rig.funnel.queue.stats()["buffered_bytes"] <= (1 << 20) // 8
    good = rig.source()
    assert rig.offer(good, "good.log", data)
    assert rig.settle(good)
    # One that carries the streams of many does not wait for a file that hangs.
    shared = rig.source("t", is_patient=False)
    try:
        assert not rig.offer(shared, "hung.log", data, 1)
        rig.told.until(lambda: shared.refusal)
    except Refusal:
        pass
    assert shared.refusal is not None
    assert shared.refusal.code == "UNAVAILABLE"
    hung.release()
    rig.told.until(lambda: source.waiting is None)
    assert rig.settle(source)
    assert source.committed_seq == seq
    assert rig.funnel.queue.stats()["buffered_bytes_peak"] <= 1 << 20
    rig.funnel.close(Deadline.after(WAIT_S))
    assert hung.close() == {"hung.log": data * seq}


def test_file_with_little_room_is_written_before_anybody_waits_for_it(rigs) -> None:
    """What one file may hold can be less than what makes it be written at once."""
    rig = rigs(max_buffered_bytes=1 << 20, flush_interval_s=3600.0)
    source, data = rig.source("s"), b"z" * 9999 + b"\n"
    for seq in range(1, 100):
        if not rig.offer(source, "small.log", data, seq):
            rig.told.until(lambda: source.waiting is None)
    assert rig.funnel.queue.stats()["bytes_written"] > 80 * len(data)


def test_sender_that_ends_is_not_kept_for_more(hung: HungLogs, rigs) -> None:
    """Its last chunks are written at once, also when a write of the same file is under way."""
    rig = rigs(flush_interval_s=1e8)  # longer than any machine has been up
    for name in ("idle.log", "hung.log"):
        first, last, other = rig.source(), rig.source(), rig.source()
        rig.offer(first, name, b"first\n")
        if name == "idle.log":
            assert rig.settle(first)
        else:
            rig.until_writing(rig.funnel.queue.targets[str(rig.root / name)])
        rig.offer(last, name, b"last\n")
        rig.funnel.finish(last, is_clean=True)
        hung.release()
        assert rig.settle(last)
        # What others send is kept for more as before.
        rig.offer(other, name, b"other\n")
        assert not rig.settle(other, 0.05)


@pytest.mark.parametrize("stream", ["", "s"])
def test_file_that_fails_is_tried_again(
    rigs, tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: str
) -> None:
    """Others go on, the data waits, and once writing works it is there whole and once."""
    caplog.set_level(logging.INFO)
    make_large(tmp_path / "bad.log")
    rig = rigs()
    bad, good = rig.source(stream), rig.source()
    # Room for two lines and a half.
    with largest_file(PREFIX_BYTES + 17):
        for seq in range(1, 11):
            rig.offer(bad, "bad.log", b"line %d\n" % seq, seq)
        rig.offer(good, "good.log", b"fine\n")
        assert rig.settle(good)
        # It says so a moment after it knows.
        rig.until(lambda: "cannot be written" in caplog.text)
        assert not rig.settle(bad, 0.3)
        assert rig.funnel.trouble_of(bad) == "EFBIG"
    assert rig.settle(bad)
    written = rig.read("bad.log")[PREFIX_BYTES:]
    assert written == b"".join(b"line %d\n" % i for i in range(1, 11))
    assert rig.funnel.trouble_of(bad) == ""
    rig.funnel.close(Deadline.after(5))
    said = [r.message for r in caplog.records if "bad.log" in r.message]
    assert [("cannot be written" in line, "again" in line) for line in said] == [
        (True, False),
        (False, True),
    ]


def test_sender_is_told_when_a_failing_file_has_no_more_room(rigs, tmp_path: Path) -> None:
    """Data for a file that fails is kept up to its share; then its sender gets an error."""
    make_large(tmp_path / "bad.log")
    rig = rigs(max_buffered_bytes=1 << 20)
    source, data = rig.source("s"), b"z" * 9999 + b"\n"
    with largest_file(PREFIX_BYTES):
        rig.offer(source, "bad.log", data, 1)
        rig.until(lambda: rig.funnel.queue.stats()["failing_files"])
        with pytest.raises(Refusal, match="File too large") as caught:
            _offer_all(rig, source, [("bad.log", data)] * 100)
    assert caught.value.code == "RESOURCE_EXHAUSTED"


def test_log_of_another_server_is_not_touched(rigs, tmp_path: Path) -> None:
    """While another server has a log, data for it waits; both writing would repair wrongly."""
    path = tmp_path / "x.log"
    path.touch()
    rig = rigs()
    source = rig.source("s")
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        rig.offer(source, "x.log", b"1\n", 1)
        assert not rig.settle(source, 0.2)
        assert path.read_bytes() == b""
    assert rig.settle(source)
    assert path.read_bytes() == b"1\n"


# --- limits


def test_number_of_files(rigs) -> None:
    """Idle files are forgotten for new ones; when all are in use a new one is refused."""
    rig = rigs(max_files=4, max_open_files=2)
    for number in range(20):
        source = rig.source("s")
        rig.offer(source, f"{number}.log", b"x\n", number + 1)
        rig.funnel.finish(source, is_clean=True)
        assert rig.settle(source)
    users = [rig.source() for _ in range(4)]
    for number, source in enumerate(users):
        rig.offer(source, f"{number}.log", b"y\n")
        assert rig.settle(source)
    with pytest.raises(Refusal) as caught:
        rig.offer(rig.source(), "one-more.log", b"x\n")
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    rig.assert_log("0.log", b"x\ny\n")
    # Files over the number are closed by writers, soon.
    rig.until(lambda: rig.funnel.queue.stats()["open_files"] <= 2)


def test_files_and_bytes_of_a_stream(rigs) -> None:
    """A stream over its limit is refused; another stream is not."""
    rig = rigs(max_stream_files=2, max_stream_bytes=10)
    for names, sizes in ((["a", "b", "c"], [1, 1, 1]), (["a", "a"], [8, 8])):
        source = rig.source()
        items = [(name, b"x" * (n - 1) + b"\n") for name, n in zip(names, sizes, strict=True)]
        with pytest.raises(Refusal) as caught:
            _offer_all(rig, source, items)
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        rig.funnel.finish(source, is_clean=True)
    good = rig.source()
    rig.offer(good, "a", b"fine\n")
    assert rig.settle(good)


def test_lines_with_another_nodes_prefix_are_refused(rigs) -> None:
    """With the check on, a node cannot write lines that look like another node's."""
    rig = rigs(verify_node_prefix=True)
    rig.offer(rig.source(node="n1"), "x.log", b"7: real\n")
    with pytest.raises(Refusal) as caught:
        rig.offer(rig.source(node="n2"), "x.log", b"7: forged\n")
    assert caught.value.code == "PERMISSION_DENIED"


# --- cycles and the end


def test_completion_lines(rigs, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A replaced cycle is announced once idle, a late chunk is warned of, the end says all."""
    caplog.set_level(logging.INFO, "LogAggregationServer")
    rig = rigs(completion_idle_s=0.05)
    source = rig.source()
    rig.offer(source, "job_cycle0.log", b"x\n")
    assert rig.settle(source)
    rig.offer(source, "job_cycle1.log", b"x\n")

    def said() -> list[str]:
        return [r.getMessage() for r in caplog.records if "ycle log complete" in r.getMessage()]

    rig.until(said)
    first = f"Heuristic cycle log complete: file_path={tmp_path}/job_cycle0.log last_flush_time="
    assert said()[0].startswith(first)
    assert said()[0].endswith("Z")
    assert len(said()) == 1
    rig.offer(source, "job_cycle0.log", b"late\n")
    assert (
        said()[1]
        == f"Late chunk after heuristic cycle log complete: file_path={tmp_path}/job_cycle0.log"
    )
    rig.funnel.close(Deadline.after(5))
    assert sorted(line.split("file_path=")[1].split()[0] for line in said()[2:]) == [
        f"{tmp_path}/job_cycle0.log",
        f"{tmp_path}/job_cycle1.log",
    ]


def test_close_writes_everything(rigs) -> None:
    """What was taken is in its file when the funnel has closed, however long it could wait."""
    rig = rigs(flush_interval_s=1000.0)
    source = rig.source()
    for number in range(500):
        rig.offer(source, f"{number % 7}.log", b"%d\n" % number)
    assert rig.funnel.close(Deadline.after(WAIT_S)) == 0
    with no_second_try():
        assert sum(len(rig.read(f"{i}.log").splitlines()) for i in range(7)) == 500
    with pytest.raises(Refusal):
        rig.offer(rig.source(), "x.log", b"x\n")


def test_close_tells_what_could_not_be_written(rigs, tmp_path: Path) -> None:
    """A disk that stays full does not keep the server from ending, and the loss is counted."""
    make_large(tmp_path / "bad.log")
    rig = rigs()
    with largest_file(PREFIX_BYTES):
        rig.offer(rig.source(), "bad.log", b"x\n")
        assert rig.funnel.close(Deadline.after(0.3)) > 0


@pytest.mark.parametrize("policy", ["never", "interval", "commit"])
def test_fsync_policies(rigs, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """The disk is waited for never, after a while, or before anything is settled."""
    synced = threading.Event()
    original = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        original(descriptor)
        synced.set()

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    rig = rigs(fsync=policy)
    source = rig.source("s")
    rig.offer(source, "x.log", b"x\n", 1)
    assert rig.settle(source)
    if policy == "interval":
        assert synced.wait(WAIT_S)
    assert synced.is_set() == (policy != "never")


def test_file_closed_for_another_is_synced(rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `interval`, a file that is closed early has been synced: nobody does so later."""
    monkeypatch.setattr(queue, "_SYNC_S", 1000.0)
    synced = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _descriptor: synced.set())
    rig = rigs(fsync="interval", max_open_files=1)
    for number in range(2):
        source = rig.source()
        rig.offer(source, f"{number}.log", b"x\n")
        assert rig.settle(source)  # a file that is being written is not closed
    assert synced.wait(WAIT_S)


def test_bug_in_writing_one_file_is_survived(rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose writing fails in an unforeseen way is tried again, as after an error."""
    failures = iter([ValueError("unforeseen")])
    original = LogFile.append

    def append(log: LogFile, *args: Any, **options: Any) -> None:
        for failure in failures:
            raise failure
        original(log, *args, **options)

    monkeypatch.setattr(LogFile, "append", append)
    rig = rigs()
    source = rig.source()
    rig.offer(source, "x.log", b"x\n")
    assert rig.settle(source)
    rig.assert_log("x.log", b"x\n")


def test_clock_that_jumps_changes_nothing(rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wall time that leaps back or ahead by years neither delays nor loses a line."""
    walls = iter([0.0, 4e9, 1.0, 2e9] * 100)
    monkeypatch.setattr("time.time", lambda: next(walls))
    rig = rigs(completion_idle_s=0.0)
    source = rig.source("s")
    for seq in range(1, 20):
        rig.offer(source, f"a_cycle{seq}.log", b"x\n", seq)
        assert rig.settle(source, 5)
