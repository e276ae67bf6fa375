# SPDX-License-Identifier: Apache-2.0
"""One file out of the files of a node's processes: nothing lost, nothing twice, whatever ends."""

import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from results import no_second_try

from nvidia_resiliency_ext.shared_utils import log_aggregator
from nvidia_resiliency_ext.shared_utils._logging import aggregator as aggregator_module
from nvidia_resiliency_ext.shared_utils._logging.aggregator import Aggregation, Job
from nvidia_resiliency_ext.shared_utils._logging.journal import STATE_NAME, read_position
from nvidia_resiliency_ext.shared_utils.errors import DirectoryBusyError, UnsafePathError
from nvidia_resiliency_ext.shared_utils.log_node_local_tmp import (
    DynamicLogFormatter,
    NodeLocalTmpLogHandler,
    NodeLogAggregator,
)

pytestmark = pytest.mark.slow

_HEAD = "2026-01-02 03:04:05,678 [INFO] [n1] [workload:{}(0) infra:?(?)] a.py:1 "
_FORMAT = (
    "%(asctime)s [%(levelname)s] [n1] [workload:%(workload_rank)s(?) infra:?(?)] a.py:1 %(message)s"
)
_DEADLINE_S = 60.0


class Place:
    """A directory of logs, a directory for the merged one, and what is done with them."""

    def __init__(self, root: Path) -> None:
        self.temp = root / "temp"
        self.temp.mkdir(mode=0o700)
        self.log = root / "log"
        self.log.mkdir(mode=0o755)
        self.output = self.log / "all.log"

    def job(self, *, size: int = 10_000, is_ordered: bool = False) -> Job:
        return Job(str(self.temp), str(self.log), "all.log", size, is_ordered)

    def open(self, *, size: int = 10_000, is_ordered: bool = False) -> Aggregation:
        return Aggregation(self.job(size=size, is_ordered=is_ordered))

    def drain(self, *, size: int = 10_000, is_ordered: bool = False) -> str:
        """Run an aggregation to its end and return the merged file."""
        aggregation = self.open(size=size, is_ordered=is_ordered)
        try:
            aggregator_module._drain(aggregation)
        finally:
            aggregation.close()
        return self.output.read_text()

    @no_second_try()
    def assert_drained(self, merged: str) -> None:
        """Run an aggregation to its end and check what is in the merged file then."""
        assert self.drain() == merged

    def aggregator(self, *, size: int = 10_000, is_ordered: bool = False) -> NodeLogAggregator:
        return NodeLogAggregator(str(self.log), str(self.temp), "all.log", size, is_ordered)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.temp.glob("rank_*"))

    def add(self, name: str, text: str | bytes) -> Path:
        path = self.temp / name
        with path.open("ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)
        return path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return empty directories."""
    return Place(tmp_path)


@pytest.fixture(params=["inotify", "no inotify"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the kernel's notices and again without."""
    if request.param == "no inotify":
        monkeypatch.setenv("NVRX_FORCE_NO_INOTIFY", "1")
    return str(request.param)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.01)


def _line(text: object, rank: int | str = 0) -> str:
    return f"{_HEAD.format(rank)}{text}\n"


def test_lines_arrive_soon(place: Place, each_way: str) -> None:
    """What a process logs is in the merged file soon, from files that are there and new ones."""
    place.add("rank_0_a.msg.1", _line("before"))
    aggregator = place.aggregator()
    aggregator.start_aggregator()
    aggregator.start_aggregator()
    try:
        _until(lambda: place.output.exists() and "before" in place.output.read_text())
        place.add("rank_0_a.msg.1", _line("later"))
        place.add("rank_1_a.msg.1", _line("other", 1) + "half")
        _until(lambda: place.output.read_text().count("\n") == 3)
        place.add("rank_1_a.msg.1", " line\n")
        _until(lambda: place.output.read_text().endswith("\thalf line\n"))
    finally:
        aggregator.shutdown()
        aggregator.shutdown()
    assert place.output.stat().st_mode & 0o777 == 0o600


def test_restart_goes_on(place: Place) -> None:
    """Each start adds only what is new, also to a file that was renamed or replaced meanwhile."""
    first = place.add("rank_0_a.msg.1", _line("one"))
    place.assert_drained(_line("one"))
    place.assert_drained(_line("one"))
    place.add("rank_0_a.msg.1", _line("two"))
    first.rename(place.temp / "rank_0_a.msg.0")
    place.assert_drained(_line("one") + _line("two"))
    # A new file under an old inode number is a new file.
    old = place.temp / "rank_0_a.msg.0"
    inode = old.stat().st_ino
    with old.open("r+") as file:
        file.truncate(0)
        file.write(_line("x" * 500))
    assert old.stat().st_ino == inode
    place.assert_drained(_line("one") + _line("two") + _line("x" * 500))


@pytest.mark.parametrize("damage", [b"", b"\0" * 200_000, b"\x07" * 5000])
def test_damaged_position_is_told(
    place: Place, damage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position that cannot be read loses nothing: all is merged again, which is said."""
    said: list[str] = []
    monkeypatch.setattr(aggregator_module._log, "warning", said.append)
    place.add("rank_0_a.msg.1", _line("one"))
    place.drain()
    assert said == []
    (place.temp / STATE_NAME).write_bytes(damage)
    place.add("rank_0_a.msg.1", _line("two"))
    place.assert_drained(_line("one") + _line("one") + _line("two"))
    assert len(said) == 1
    assert "position is damaged" in said[0]


def test_first_start_with_little_room(place: Place) -> None:
    """Little space is enough to begin; none at all is one line that names the file."""
    place.add("rank_0_a.msg.1", _line("one"))
    script = (
        "import resource, sys; from nvidia_resiliency_ext.shared_utils.log_aggregator import main\n"
        "limit = int(sys.argv.pop(1)); resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        "try: main()\nexcept OSError as error: sys.exit(f'refused: {error}')"
    )
    env = {**os.environ, "NVRX_NODE_LOCAL_TMPDIR": str(place.temp)}
    stop = place.log / "stop"
    stop.touch()
    for limit, code, says in ((16 * 1024, 0, ""), (4096, 1, STATE_NAME)):
        (place.temp / STATE_NAME).unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-B", "-c", script, str(limit), "--log-dir", str(place.log),
             "--wait-file", str(stop)],
            env=env, capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
        assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert _line("one") in "".join(path.read_text() for path in place.log.glob("*.log"))


def test_order_of_a_writer(place: Place) -> None:
    """The files of one writer follow each other by age, however their names sort as text."""
    for number in (10, 9, 100):
        place.add(f"rank_0_a.msg.{number}", _line(number) * 3)
    assert re.findall(r"1 (\d+)$", place.drain(), re.MULTILINE) == [
        "9", "9", "9", "10", "10", "10", "100", "100", "100",
    ]  # fmt: skip


def test_long_files(place: Place) -> None:
    """Files of many times what is read at once, and an endless line, are merged in full."""
    texts = [f"{number} " + "y" * 200 for number in range(20_000)]
    place.add("rank_0_a.msg.1", "".join(_line(text) for text in texts[:10_000]))
    place.add("rank_0_a.msg.2", "".join(_line(text) for text in texts[10_000:]))
    place.add("rank_1_a.msg.1", _line("é" * (3 << 20), 1))
    merged = place.drain(size=1 << 30)
    with no_second_try():
        assert re.findall(r"workload:0.* a.py:1 (.*)$", merged, re.MULTILINE) == texts
        assert merged.count("é") == 3 << 20
    assert "\ufffd" not in merged


def test_read_files_are_deleted(place: Place) -> None:
    """A file goes when it is read, has reached its size, and its writer has gone on."""
    place.add("rank_0_a.msg.1", _line("x" * 200))
    place.add("rank_0_a.msg.2", _line("small"))
    place.add("rank_0_a.msg.3", _line("x" * 200))
    place.add("rank_1_a.msg.1", _line("x" * 200))
    place.drain(size=200)
    assert place.files() == ["rank_0_a.msg.2", "rank_0_a.msg.3", "rank_1_a.msg.1"]


def test_half_line_of_a_dead_writer(place: Place) -> None:
    """A last line without an end waits, until its writer has gone on to another file."""
    place.add("rank_0_a.msg.1", _line("one") + "half")
    place.assert_drained(_line("one"))
    place.add("rank_0_a.msg.2", _line("two"))
    place.assert_drained(_line("one") + "\thalf\n" + _line("two"))


def test_bytes_that_are_no_text(place: Place) -> None:
    """Invalid UTF-8 and null bytes end nothing."""
    place.add("rank_0_a.msg.1", _line("a").encode() + b"\xff\xfe\x00\n" + _line("b").encode())
    place.assert_drained(_line("a") + "\t\ufffd\ufffd\0\n" + _line("b"))


def test_only_regular_files_are_read(place: Place, tmp_path: Path) -> None:
    """Links, pipes and directories among the files are passed over."""
    secret = tmp_path / "secret"
    secret.write_text(_line("secret"))
    (place.temp / "rank_0_link.msg.1").symlink_to(secret)
    os.mkfifo(place.temp / "rank_0_pipe.msg.1")
    (place.temp / "rank_0_dir.msg.1").mkdir()
    place.add("other_file", _line("other"))
    place.add("rank_1_a.msg.1", _line("good"))
    place.assert_drained(_line("good"))


def test_unusable_places_are_refused(place: Place, tmp_path: Path) -> None:
    """A linked directory, one that anybody may write to, and a linked output are refused."""
    (tmp_path / "link").symlink_to(place.temp)
    with pytest.raises(UnsafePathError):
        Aggregation(Job(str(tmp_path / "link"), str(place.log), "a", 1, False))
    place.output.symlink_to("/dev/null")
    with pytest.raises(UnsafePathError):
        place.open()
    place.temp.chmod(0o777)
    with pytest.raises(UnsafePathError):
        place.aggregator().start_aggregator()


def test_one_aggregator_in_a_directory(place: Place) -> None:
    """A second one is refused, in this process and in another, and may follow the first."""
    code = (
        "import sys\n"
        "from nvidia_resiliency_ext.shared_utils.log_node_local_tmp import NodeLogAggregator\n"
        "NodeLogAggregator(sys.argv[1], sys.argv[2], 'all.log', 1, False).start_aggregator()\n"
    )
    other = [sys.executable, "-c", code, str(place.log), str(place.temp)]
    first = place.aggregator()
    first.start_aggregator()
    with pytest.raises(DirectoryBusyError):
        place.aggregator().start_aggregator()
    done = subprocess.run(other, capture_output=True, text=True, timeout=150, check=False)
    assert "DirectoryBusyError" in done.stderr
    first.shutdown()
    done = subprocess.run(other, capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_moved_directory_is_followed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the directory is removed and made again, what it had and what comes are merged."""
    monkeypatch.setattr(aggregator_module, "_LOOK_S", 0.1)
    aggregator = place.aggregator()
    aggregator.start_aggregator()
    try:
        place.add("rank_0_a.msg.1", _line("one"))
        place.temp.rename(place.temp.with_name("gone"))
        # The aggregator itself may have been faster.
        place.temp.mkdir(mode=0o700, exist_ok=True)
        place.add("rank_0_a.msg.2", _line("two"))
        _until(lambda: place.output.read_text().count("\n") == 2)
    finally:
        aggregator.shutdown()


def test_renamed_output_is_made_again(place: Place) -> None:
    """A merged file that is renamed or removed while we work gets a successor."""
    aggregation = place.open()
    try:
        for number in range(3):
            place.add("rank_0_a.msg.1", _line(number))
            aggregation.step(None)
            assert place.output.read_text() == _line(number)
            place.output.rename(place.log / f"old{number}")
    finally:
        aggregation.close()


def test_records_by_time(place: Place) -> None:
    """With ordering, records of many processes come by their times while they go on writing."""
    aggregator = place.aggregator(size=2000, is_ordered=True)
    aggregator.start_aggregator()
    handlers = [NodeLocalTmpLogHandler(rank, str(place.temp), 2000, 4, "p") for rank in range(4)]
    logger = logging.Logger("test")  # noqa: LOG001 - one of its own, without a parent
    for rank, handler in enumerate(handlers):
        handler.setFormatter(DynamicLogFormatter(rank, fmt=_FORMAT))
    try:
        for number in range(400):
            logger.handlers = [handlers[number % 4]]
            logger.info("m%d", number)
            if number % 50 == 0:
                threading.Event().wait(0.02)
    finally:
        aggregator.shutdown()
        for handler in handlers:
            handler.close()
    lines = place.output.read_text().splitlines()
    times = [line[:23] for line in lines]
    assert times == sorted(times)
    assert sorted(int(line.rpartition("m")[2]) for line in lines) == list(range(400))


def test_writer_keeps_what_is_not_read(place: Place) -> None:
    """While an aggregator is there, what it has not read stays, up to 16 times as many files."""
    aggregation = place.open(size=100)
    handler = NodeLocalTmpLogHandler(0, str(place.temp), 100, 2, "p")
    handler.setFormatter(DynamicLogFormatter(0, fmt=_FORMAT))
    logger = logging.Logger("test")  # noqa: LOG001 - one of its own, without a parent
    logger.addHandler(handler)
    try:
        for number in range(20):
            logger.info("m%d%s", number, "x" * 50)
        assert len(place.files()) == 20
        aggregation.step(None)
        assert "log records dropped" not in place.output.read_text()
        for number in range(20, 100):
            logger.info("m%d%s", number, "x" * 50)
        assert len(place.files()) == 33
        aggregation.step(None)
        aggregation.step(None)
    finally:
        handler.close()
        aggregation.close()
    merged = place.output.read_text()
    kept = re.findall(r"1 m(\d+)x", merged)
    assert kept[:20] == [str(number) for number in range(20)]
    assert int(re.findall(r"(\d+) log records dropped", merged)[-1]) == 100 - len(kept)


def test_position_of_a_dead_aggregator_grows_old(place: Place) -> None:
    """The position that an aggregator leaves is fresh for a minute."""
    place.add("rank_0_a.msg.1", _line("x"))
    place.drain()
    directory = os.open(place.temp, os.O_RDONLY)
    position = read_position(directory)
    os.close(directory)
    assert position is not None
    assert position.is_fresh(time.monotonic())
    assert not position.is_fresh(time.monotonic() + 61)


class _Crash(BaseException):
    """Stands for SIGKILL between two system calls, or in the middle of a write."""


class _Crasher:
    """Counts what is done to files and ends the process at a given one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.left = at
        for name in ("write", "pwrite", "unlink", "rename"):
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self.left -= 1
            if self.left > 0:
                return real(*args, **kwargs)
            if name.endswith("write") and isinstance(args[1], bytes):
                # The kernel may stop a write in the middle when the process is killed.
                real(args[0], args[1][: len(args[1]) // 2], *args[2:], **kwargs)
            raise _Crash

        return call


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.no_second_try
def test_death_at_every_step(tmp_path: Path, is_ordered: bool) -> None:
    """Wherever an aggregator dies, also again and again, its successor completes the file."""
    step = deaths = 0
    while True:
        step += 1
        root = tmp_path / f"{step}"
        root.mkdir(mode=0o755)
        place = Place(root)
        expected = []
        for rank in range(3):
            for number in range(3):
                texts = [f"{rank}-{number}-{each}" for each in range(5)]
                place.add(
                    f"rank_{rank}_a.msg.{number}",
                    "".join(_line(text, rank) + f"\tmore {text}\n" for text in texts),
                )
                expected.extend(texts)
        died_here = 0
        while not _survives(place, step, is_ordered=is_ordered):
            died_here += 1
            place.add("rank_5_a.msg.1", _line(f"d-{died_here}", 5))
            expected.append(f"d-{died_here}")
            # One who dies at the same early step each time never comes further.
            if died_here > 5:
                place.drain(size=200, is_ordered=is_ordered)
                break
        deaths += died_here
        merged = place.output.read_text()
        found = re.findall(r"^2026.*? a.py:1 (.*)$", merged, re.MULTILINE)
        assert sorted(found) == sorted(expected), step
        assert merged.count("\tmore") == 45
        assert place.files() == [
            "rank_0_a.msg.2", "rank_1_a.msg.2", "rank_2_a.msg.2",
            *(["rank_5_a.msg.1"] if died_here else []),
        ]  # fmt: skip
        if not died_here:
            break
    assert step > 8
    assert deaths > step


def _survives(place: Place, step: int, *, is_ordered: bool) -> bool:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _Crasher(monkeypatch, step)
        try:
            place.drain(size=200, is_ordered=is_ordered)
        except _Crash:
            return False
    return True


def _command(place: Place, *arguments: str) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-B", "-m", "nvidia_resiliency_ext.shared_utils.log_aggregator"]
    env = {
        **os.environ,
        "NVRX_NODE_LOCAL_TMPDIR": str(place.temp),
        "NVRX_LOG_MAX_FILE_SIZE_KB": "20",
    }
    return [*command, "--log-dir", str(place.log), *arguments], env


@pytest.fixture
def start(place: Place) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start programs that are ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> "subprocess.Popen[str]":
        command, env = _command(place, *arguments)
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[..., "subprocess.Popen[str]"]


def _merged(place: Place) -> str:
    (path,) = place.log.glob("nvrx_log_*.log")
    return path.read_text()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "file"])
def test_program_ends_in_order(place: Place, start: Start, how: object, tmp_path: Path) -> None:
    """SIGTERM, SIGINT and the wait file end the program with everything merged and exit code 0."""
    wait_file = tmp_path / "stop"
    process = start("--wait-file", str(wait_file), "--check-interval", "0.1")
    place.add("rank_0_a.msg.1", _line("one"))
    _until(lambda: any(place.log.iterdir()))
    place.add("rank_0_a.msg.1", _line("two"))
    if isinstance(how, signal.Signals):
        process.send_signal(how)
    else:
        wait_file.touch()
    assert process.wait(_DEADLINE_S) == 0
    assert _merged(place) == _line("one") + _line("two")


def test_wrong_settings(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing directory is a RuntimeError for callers, one line and exit code 2 for people."""
    monkeypatch.delenv("NVRX_NODE_LOCAL_TMPDIR", raising=False)
    monkeypatch.setattr(sys, "argv", ["log_aggregator", "--log-dir", str(place.log)])
    with pytest.raises(RuntimeError, match="NVRX_NODE_LOCAL_TMPDIR"):
        log_aggregator.main()
    monkeypatch.setattr(sys, "argv", ["log_aggregator"])
    with pytest.raises(RuntimeError, match="--log-dir"):
        log_aggregator.main()
    place.temp.chmod(0o777)
    command, env = _command(place)
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("log_aggregator: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.no_second_try
def test_full_disk(place: Place, start: Start) -> None:
    """While the merged file cannot grow nothing is lost, and merging goes on when it can again."""
    process = start()
    _until((place.temp / STATE_NAME).exists)
    limit = 300_000  # beyond the position file, which has its space
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for number in range(40):
        place.add(f"rank_0_a.msg.{number}", "".join(_line(f"{number}-{n}") for n in range(200)))
    assert process.stderr is not None
    # The file is full one write before that is known.
    said = next(line for line in process.stderr if "merging of logs waits" in line)
    assert len(_merged(place)) == limit
    resource.prlimit(
        process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    _until(lambda: _merged(place).count("\n") == 8000)
    process.terminate()
    assert process.wait(_DEADLINE_S) == 0
    said += process.stderr.read()
    assert said.count("merging of logs waits") == 1
    assert re.findall(r"1 (\d+-\d+)$", _merged(place), re.MULTILINE) == [
        f"{number}-{n}" for number in range(40) for n in range(200)
    ]


_WRITER = """
import logging, sys, time
from nvidia_resiliency_ext.shared_utils.log_node_local_tmp import (
    DynamicLogFormatter, NodeLocalTmpLogHandler)
rank, directory, until = int(sys.argv[1]), sys.argv[2], time.monotonic() + float(sys.argv[3])
handler = NodeLocalTmpLogHandler(rank, directory, 20_000, 4, "w")
handler.setFormatter(DynamicLogFormatter(rank, fmt=sys.argv[4]))
logger = logging.getLogger("x"); logger.setLevel(logging.INFO); logger.addHandler(handler)
number, pause = 0, logging.threading.Event()
while time.monotonic() < until:
    for _ in range(10):
        logger.info("%d %s", number, "x" * 100 + ("\\nmore" if number % 5 == 0 else ""))
        number += 1
    pause.wait(0.01)
print(number)
"""


def _started(place: Place, start: Start, *arguments: str) -> "subprocess.Popen[str]":
    """Return an aggregator that has begun to work."""
    state = place.temp / STATE_NAME
    before = state.stat().st_mtime_ns if state.exists() else 0
    process = start(*arguments)
    _until(lambda: state.exists() and state.stat().st_mtime_ns != before)
    return process


@pytest.mark.no_second_try
def test_killed_again_and_again(place: Place, start: Start) -> None:
    """Of what two processes log while aggregators are killed, each line is there once, in order."""
    # Before there was any aggregator, writers keep only the newest files.
    first = _started(place, start)
    first.kill()
    first.communicate()
    arguments = [str(place.temp), "4.0", _FORMAT]
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(rank), *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    kills = 0
    try:
        while kills < 4 or any(writer.poll() is None for writer in writers):
            process = _started(place, start, *["--en-chronological-ordering"][kills % 2 :])
            threading.Event().wait((kills * 37 % 100) / 400)
            process.kill()
            process.communicate()
            kills += 1
        counts = [int(writer.communicate()[0]) for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    last = _started(place, start)
    last.terminate()
    assert last.wait(_DEADLINE_S) == 0
    merged = _merged(place)
    assert "log records dropped" not in merged
    for rank, count in enumerate(counts):
        found = re.findall(rf"workload:{rank}\\(.* a.py:1 (\\d+) x".replace("\\\\", "\\"), merged)
        assert [int(number) for number in found] == list(range(count))
    assert merged.count("\n\tmore\n") == sum(-(-count // 5) for count in counts)


@pytest.mark.serial
def test_idle_costs_nothing(place: Place, each_way: str, start: Start) -> None:
    """With 64 files to which nobody writes, an aggregator uses next to no processor time."""
    for rank in range(64):
        place.add(f"rank_{rank}_a.msg.1", _line("x", rank))
    process = start()
    _until(lambda: any(place.log.iterdir()) and _merged(place).count("\n") == 64)
    ticks = os.sysconf("SC_CLK_TCK")

    def used_s() -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / ticks

    begin = used_s()
    threading.Event().wait(3.0)
    assert used_s() - begin <= 0.3
