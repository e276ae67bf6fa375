# SPDX-License-Identifier: Apache-2.0
"""The files about cycles: what they say, when they change, and a dead file system."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvidia_resiliency_ext.fault_tolerance import cycle_info_writer as info
from nvidia_resiliency_ext.fault_tolerance._report import cycle_files as writers

SHUTDOWN_S = writers.SHUTDOWN_S
START, END = "2026-01-02T03:04:05Z", "2026-01-02T04:00:00Z"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written in the end has all the time that a busy machine may need."""
    monkeypatch.setattr(writers, "SHUTDOWN_S", 30.0)


def content(path: Path) -> dict[str, object]:
    """Return what a file says."""
    found: dict[str, object] = json.loads(path.read_text())
    return found


def test_a_writer_without_a_directory_is_refused() -> None:
    """An empty name would mean the directory that the launcher happens to be in."""
    with pytest.raises(ValueError, match="cycle_info_dir is empty"):
        info.CycleInfoWriter("")


def test_a_cycle_from_its_start_to_its_end(tmp_path: Path) -> None:
    """The file has all fields of the message from the first moment; an end is a new generation."""
    writer = info.CycleInfoWriter(str(tmp_path / "new"))
    writer.write_cycle_start("77", 2, 5, START, "/l/job_cycle5.log", "n[1-2]", "n3", "0-1")
    writer.update_cycle_end("77", 2, 5, END)
    writer.shutdown()
    file = tmp_path / "new" / "cycle_info.77.2.5"
    assert content(file) == {
        "job_id": "77",
        "attempt_index": 2,
        "cycle_number": 5,
        "cycle_start_time": START,
        "cycle_end_time": END,
        "cycle_log_file": "/l/job_cycle5.log",
        "active_nodes": "n[1-2]",
        "standby_nodes": "n3",
        "generation": "1",
        "active_ranks": "0-1",
    }
    link = Path(writer.get_current_cycle_info_path("77"))
    assert os.readlink(link) == file.name
    assert writer.get_cycle_info_dir() == str(tmp_path / "new")
    assert sorted(os.listdir(tmp_path / "new")) == [file.name, "cycle_info.77.current"]


def test_protobuf_reads_the_file(tmp_path: Path) -> None:
    """The text is the JSON form of the message, and protobuf makes the same of it."""
    json_format = pytest.importorskip("google.protobuf.json_format")
    from nvidia_resiliency_ext.shared_utils.proto import nvrx_interface_pb2

    writer = info.CycleInfoWriter(str(tmp_path))
    writer.write_cycle_start("a", 0, 0, START, "", "n1")
    writer.shutdown()
    text = (tmp_path / "cycle_info.a.0.0").read_text()
    message = json_format.Parse(text, nvrx_interface_pb2.NVRxCycleInfo())
    assert message.generation == 1
    with_all = {}
    for option in ("including_default_value_fields", "always_print_fields_with_no_presence"):
        with contextlib.suppress(TypeError):
            with_all = json_format.MessageToDict(
                message, preserving_proto_field_name=True, **{option: True}
            )
    assert with_all == json.loads(text)


def test_a_cycle_that_is_open_ends_with_the_next_or_with_the_writer(tmp_path: Path) -> None:
    """No file is left without an end by an orderly shutdown."""
    writer = info.CycleInfoWriter(str(tmp_path))
    writer.write_cycle_start("a", 0, 0, START, "", "n1")
    writer.write_cycle_start("a", 0, 1, END, "", "n1")
    writer.shutdown()
    assert content(tmp_path / "cycle_info.a.0.0")["cycle_end_time"] == END
    assert str(content(tmp_path / "cycle_info.a.0.1")["cycle_end_time"]).endswith("Z")
    assert os.readlink(tmp_path / "cycle_info.a.current") == "cycle_info.a.0.1"
    assert not writer.write_cycle_start("a", 0, 2, START, "", "n1")


def test_the_end_of_a_cycle_that_another_process_began(tmp_path: Path) -> None:
    """A writer that was started anew ends what its predecessor began."""
    first = info.CycleInfoWriter(str(tmp_path))
    first.write_cycle_start("a", 0, 0, START, "/log", "n1")
    second = info.CycleInfoWriter(str(tmp_path))
    deadline = time.monotonic() + 60
    while not (tmp_path / "cycle_info.a.0.0").exists():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    second.update_cycle_end("a", 0, 0, END)
    second.shutdown()
    found = content(tmp_path / "cycle_info.a.0.0")
    assert (found["cycle_end_time"], found["generation"], found["cycle_log_file"]) == (
        END,
        "1",
        "/log",
    )
    first.shutdown()


def test_readers_never_see_a_part_of_a_file(tmp_path: Path) -> None:
    """While a file is written over and over, whoever follows the link reads whole JSON."""
    writer = info.CycleInfoWriter(str(tmp_path))
    writer.write_cycle_start("a", 0, 0, START, "x" * 5000, "n1")
    link = tmp_path / "cycle_info.a.current"
    is_read, done = threading.Event(), threading.Event()
    reads = 0

    def write() -> None:
        for cycle in range(1, 60):
            writer.write_cycle_start("a", 0, cycle, START, "x" * 5000, "n1")
            if cycle == 30:  # Whoever reads has begun before the last ones are written.
                is_read.wait(10)
        writer.shutdown()
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        with contextlib.suppress(FileNotFoundError):
            assert content(link)["job_id"] == "a"
            reads += 1
            is_read.set()
    thread.join()
    assert reads


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let writing hang until the event is set."""
    may_go_on = threading.Event()
    monkeypatch.setattr(writers, "atomic_write", lambda *_, **__: may_go_on.wait(30))
    monkeypatch.setattr(writers, "_replace_link", lambda *_: None)
    yield may_go_on
    may_go_on.set()


def test_a_dead_file_system_costs_two_seconds_at_most(
    hung: threading.Event,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No call waits for the file system; the end waits 2 s and says so."""
    monkeypatch.setattr(writers, "SHUTDOWN_S", SHUTDOWN_S)
    writer = info.CycleInfoWriter(str(tmp_path))
    started = time.monotonic()
    taken = [writer.write_cycle_start("a", 0, cycle, START, "", "n") for cycle in range(1000)]
    assert (taken[0], taken[-1]) == (True, False)
    assert time.monotonic() - started < 10.0, "it hangs for 30 s"
    started = time.monotonic()
    writer.shutdown()
    assert SHUTDOWN_S - 0.1 < time.monotonic() - started < 10.0, "it hangs for 30 s"
    assert "does not answer" in caplog.text
    hung.set()
    writer._thread.join(10)


def test_what_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory that cannot be made costs one warning, not the job."""
    (tmp_path / "file").write_text("")
    writer = info.CycleInfoWriter(str(tmp_path / "file" / "below"))
    for cycle in range(5):
        writer.write_cycle_start("a", 0, cycle, START, "", "n")
    writer.shutdown()
    assert caplog.text.count("cannot be written") == 1


class Disk:
    """A disk that may be full: nothing can be written then, and no link be made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        self.refused = threading.Semaphore(0)
        for name in ("atomic_write", "_replace_link"):
            monkeypatch.setattr(writers, name, self._unless_full(getattr(writers, name)))

    def _unless_full(self, write: Callable[..., None]) -> Callable[..., None]:
        def or_refuse(*args: object, **kwargs: object) -> None:
            if self.is_full:
                self.refused.release()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(*args, **kwargs)

        return or_refuse

    def wait_until_it_refused(self) -> None:
        """Wait for the next refusal."""
        assert self.refused.acquire(timeout=60)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk that is full until the test says otherwise."""
    return Disk(monkeypatch)


def test_a_write_that_succeeds_repairs_what_a_full_disk_left_out(
    tmp_path: Path, disk: Disk
) -> None:
    """The first cycle's start could not be written: its end is, and the link leads to it."""
    writer = info.CycleInfoWriter(str(tmp_path))
    writer.write_cycle_start("a", 0, 0, START, "/log", "n1")
    disk.wait_until_it_refused()
    disk.is_full = False
    writer.update_cycle_end("a", 0, 0, END)
    writer.shutdown()
    assert os.readlink(tmp_path / "cycle_info.a.current") == "cycle_info.a.0.0"
    found = content(tmp_path / "cycle_info.a.0.0")
    assert (found["cycle_start_time"], found["cycle_end_time"]) == (START, END)


def test_an_end_that_could_not_be_written_holds_nothing_up(tmp_path: Path, disk: Disk) -> None:
    """A cycle meets a full disk: it is written with the next one; what is older is left out."""
    disk.is_full = False
    writer = info.CycleInfoWriter(str(tmp_path))
    writer.write_cycle_start("a", 0, 0, START, "", "n1")
    done = threading.Event()
    writer._hand_over(done.set)
    assert done.wait(60)
    disk.is_full = True
    writer.write_cycle_start("a", 0, 1, END, "", "n1")
    disk.wait_until_it_refused()
    writer.update_cycle_end("a", 0, 1, END)
    disk.wait_until_it_refused()
    writer._hand_over(lambda: setattr(disk, "is_full", False))
    writer.write_cycle_start("a", 0, 2, END, "", "n1")
    writer.shutdown(ends_cycle=False)
    ends = [content(tmp_path / f"cycle_info.a.0.{n}")["cycle_end_time"] for n in range(1, 3)]
    assert ends == [END, ""]
    assert os.readlink(tmp_path / "cycle_info.a.current") == "cycle_info.a.0.2"


def test_a_full_disk_is_logged_once_and_so_is_its_end(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """What could not be written is written with the next file; one line tells of each change."""
    caplog.set_level("INFO", logger="nvrx")
    writer = info.CycleInfoWriter(str(tmp_path))
    writer.write_cycle_start("a", 0, 0, START, "", "n1")
    disk.wait_until_it_refused()
    writer.update_cycle_end("a", 0, 0, END)
    disk.wait_until_it_refused()
    writer._hand_over(lambda: setattr(disk, "is_full", False))
    writer.write_cycle_start("a", 0, 1, END, "", "n1")
    writer.shutdown()
    assert (tmp_path / "cycle_info.a.0.0").exists()
    assert caplog.text.count("cannot be written") == 1
    assert caplog.text.count("is written again") == 1


def test_one_file_that_can_never_be_written_holds_up_no_other(tmp_path: Path) -> None:
    """The next cycle's file is written, whatever becomes of the last one's."""
    (tmp_path / "cycle_info.a.0.1").mkdir()
    writer = info.CycleInfoWriter(str(tmp_path))
    for cycle in range(3):
        writer.write_cycle_start("a", 0, cycle, START, "", "n1")
    writer.shutdown()
    assert content(tmp_path / "cycle_info.a.0.0")["cycle_end_time"] == START
    assert content(tmp_path / "cycle_info.a.0.2")["cycle_end_time"]
    assert os.readlink(tmp_path / "cycle_info.a.current") == "cycle_info.a.0.2"


def test_an_open_cycle_ends_though_its_file_is_damaged(tmp_path: Path) -> None:
    """What this writer began it knows; it needs no file to end it."""
    writer = info.CycleInfoWriter(str(tmp_path))
    writer.write_cycle_start("a", 0, 0, START, "", "n1")
    writer._hand_over(lambda: (tmp_path / "cycle_info.a.0.0").write_text("{") and None)
    writer.update_cycle_end("a", 0, 0, END, once=True)
    writer.shutdown()
    assert content(tmp_path / "cycle_info.a.0.0")["cycle_end_time"] == END


def test_a_full_queue_still_ends_the_open_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orderly shutdown during a hang of the file system leaves no cycle open behind it."""
    monkeypatch.setattr(writers, "_MOST_WAITING", 3)
    may_go_on = threading.Event()
    writer = info.CycleInfoWriter(str(tmp_path))
    writer.write_cycle_start("a", 0, 0, START, "", "n1")
    writer._hand_over(lambda: may_go_on.wait(60) and None)
    while writer._hand_over(lambda: None):
        pass
    monkeypatch.setattr(writers, "SHUTDOWN_S", 0.0)
    writer.shutdown()
    may_go_on.set()
    writer._thread.join(60)
    assert content(tmp_path / "cycle_info.a.0.0")["cycle_end_time"]


def test_a_job_that_was_taken_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shutdown by another thread in the middle of a call ends the thread behind its job."""
    writer = info.CycleInfoWriter(str(tmp_path))
    monkeypatch.setattr(writers, "SHUTDOWN_S", 0.0)
    other = threading.Thread(target=writer.shutdown)

    class Jobs:
        put, get = writer._jobs.put, writer._jobs.get

        def qsize(self) -> int:
            other.start()
            other.join(0.5)  # it waits for the lock
            return 0

    done = threading.Event()
    monkeypatch.setattr(writer, "_jobs", Jobs())
    assert writer._hand_over(done.set)
    assert done.wait(60)
    other.join(60)


def test_a_job_id_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    """The name of a file is not a way out of the directory."""
    writer = info.CycleInfoWriter(str(tmp_path / "in"))
    with pytest.raises(ValueError, match="job id"):
        writer.write_cycle_start("../x", 0, 0, START, "", "n")
    with pytest.raises(ValueError, match="job id"):
        info.CycleInfoReporter.current_cycle_info_path(str(tmp_path), "a/b")
    writer.shutdown()


def test_the_reporter_asks_the_scheduler(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    """Job and attempt are Slurm's, nodes are in its order and form, each rank at its node."""
    clean_environment.setenv("SLURM_JOB_ID", "12")
    clean_environment.setenv("SLURM_ARRAY_JOB_ID", "11")
    clean_environment.setenv("SLURM_RESTART_COUNT", "3")
    reporter = info.CycleInfoReporter(str(tmp_path), "/logs/job.log")
    assert not reporter.report_cycle_end()
    nodes = ["node010.cluster.example", "node008.cluster.example", "node009.cluster.example"]
    assert reporter.report_cycle_start(
        info.CycleInfoRoundSnapshot(4, nodes, ["node012", "node011"], [6, 0, 1])
    )
    assert reporter.report_cycle_end()
    reporter.shutdown()
    found = content(tmp_path / "cycle_info.11.3.4")
    assert found["active_nodes"] == "node[008-010]"
    assert found["active_ranks"] == "0-1,6"
    assert found["standby_nodes"] == "node[011-012]"
    assert found["cycle_log_file"] == "/logs/job_cycle4.log"
    assert found["cycle_end_time"]
    assert reporter.current_cycle_info_path(str(tmp_path), "11").endswith("cycle_info.11.current")


@pytest.mark.parametrize("count", ["-1", "x", "99999999999999", ""])
def test_a_restart_count_that_is_none_counts_as_the_first(
    count: str, tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    """A wrong number of attempts is 0, and no job id is an empty one."""
    clean_environment.setenv("SLURM_RESTART_COUNT", count)
    reporter = info.CycleInfoReporter(str(tmp_path))
    reporter.report_cycle_start(info.CycleInfoRoundSnapshot(0, ["10.0.0.7"], None, [0]))
    reporter.shutdown()
    assert content(tmp_path / "cycle_info..0.0")["active_nodes"] == "10.0.0.7"


def test_it_needs_no_protobuf(tmp_path: Path, clean_environment: pytest.MonkeyPatch) -> None:
    """Importing and using it loads neither protobuf nor grpc nor torch."""
    code = (
        "import sys; from nvidia_resiliency_ext.fault_tolerance import cycle_info_writer as m;"
        "r = m.CycleInfoReporter(sys.argv[1]); r.report_cycle_start(m.CycleInfoRoundSnapshot(0));"
        "r.shutdown(); assert not {'google.protobuf', 'grpc', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert (tmp_path / "cycle_info..current").exists()
