# SPDX-License-Identifier: Apache-2.0
"""Profiling events keep their line format and their order, and never hurt the caller."""

import contextlib
import json
import logging
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils import profiling
from nvidia_resiliency_ext.shared_utils.profiling import (
    FaultToleranceProfiler,
    ProfilingEvent,
    ProfilingRecord,
)

_LINE = re.compile(
    r"  - Cycle: (\d+) Event: (\w+) Node: (\S+) Rank: (\S+) "
    r"Time: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} UTC"
)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Catch what goes to the logger "nvrx", which does not hand records on."""
    nvrx = logging.getLogger("nvrx")
    level, hands_on = nvrx.level, nvrx.propagate
    nvrx.setLevel(logging.INFO)
    nvrx.propagate = True
    yield caplog
    nvrx.setLevel(level)
    nvrx.propagate = hands_on


def test_names() -> None:
    """The nine events have their names in lower case as values."""
    assert [each.value for each in ProfilingEvent] == [
        "failure_detected", "worker_terminated", "rendezvous_started", "health_check_completed",
        "rendezvous_completed", "worker_start_started", "worker_start_completed",
        "attribution_get_started", "attribution_get_completed",
    ]  # fmt: skip
    assert all(each.name.lower() == each.value for each in ProfilingEvent)


def test_line_and_id(log: pytest.LogCaptureFixture) -> None:
    """The log line and the id name cycle, event, node and rank; rank 0 is a rank."""
    profiler = FaultToleranceProfiler()
    first = profiler.record_event(ProfilingEvent.FAILURE_DETECTED, "node7", 0)
    second = profiler.record_event(ProfilingEvent.WORKER_TERMINATED)
    assert re.fullmatch(r"failure_detected_\d+\.\d+_node7_0", first)
    assert re.fullmatch(r"worker_terminated_\d+\.\d+_unknown_unknown", second)
    found = [_LINE.fullmatch(each.getMessage()) for each in log.records]
    assert [each and each.groups() for each in found] == [
        ("1", "failure_detected", "node7", "0"),
        ("1", "worker_terminated", "unknown", "None"),
    ]


def test_cycle_goes_forward_only(log: pytest.LogCaptureFixture) -> None:
    """A failure begins a cycle before it is logged; going back is ignored with a warning."""
    profiler = FaultToleranceProfiler()
    profiler.set_cycle(4)
    profiler.set_cycle(4)
    assert not log.records
    profiler.set_cycle(3)
    assert [each.levelno for each in log.records] == [logging.WARNING]
    records: list[ProfilingRecord] = []
    profiler.subscribe(records.append)
    profiler.record_event(ProfilingEvent.RENDEZVOUS_STARTED)
    profiler.record_event(ProfilingEvent.FAILURE_DETECTED)
    assert [each.cycle for each in records] == [4, 5]
    assert records[0].m <= records[1].m


def test_threads_count_right() -> None:
    """Failures that several threads record at once are all counted."""
    profiler = FaultToleranceProfiler()

    def record() -> None:
        for _ in range(200):
            profiler.record_event(ProfilingEvent.FAILURE_DETECTED)

    threads = [threading.Thread(target=record) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert profiler.cycle == 1600


def test_subscriber_that_fails(log: pytest.LogCaptureFixture) -> None:
    """A subscriber that raises is logged; others and the caller do not notice."""
    profiler = FaultToleranceProfiler()
    records: list[ProfilingRecord] = []
    profiler.subscribe(lambda _: 1 / 0)
    end = profiler.subscribe(records.append)
    identity = profiler.record_event(ProfilingEvent.RENDEZVOUS_COMPLETED, rank=3)
    end()
    end()
    profiler.record_event(ProfilingEvent.RENDEZVOUS_COMPLETED)
    assert [each.id for each in records] == [identity]
    assert "subscriber" in log.text


def test_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NVRX_PROFILING_FILE each event is a line of JSON in a private file."""
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv("NVRX_PROFILING_FILE", str(path))
    profiler = FaultToleranceProfiler()
    ids = [profiler.record_event(each, node_id=17, rank=1) for each in ProfilingEvent]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == ids
    assert lines[0] == {
        **lines[0],
        "event": "failure_detected",
        "cycle": 1,
        "node": "17",
        "rank": 1,
    }
    assert [line["m"] for line in lines] == sorted(line["m"] for line in lines)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", "missing/file", "link", "fifo", "nul\0"])
def test_file_that_cannot_be_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """A file that cannot be written costs one warning, waits for nobody and raises nothing."""
    import os

    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "fifo")
    if "\0" in name:
        monkeypatch.setattr(profiling, "_FILE_VARIABLE", "PATH")
        monkeypatch.setattr(os, "environ", {"PATH": name})
    else:
        monkeypatch.setenv("NVRX_PROFILING_FILE", str(tmp_path / name))
    profiler = FaultToleranceProfiler()
    for _ in range(3):
        profiler.record_event(ProfilingEvent.FAILURE_DETECTED)
    assert not (tmp_path / "target").exists()
    assert len([each for each in log.records if each.levelno == logging.WARNING]) == 1


def test_pipe_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """What does not fit into a pipe that nobody empties is lost with a warning."""
    import os

    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDWR | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(reader, b"x" * 4096)
        monkeypatch.setenv("NVRX_PROFILING_FILE", str(tmp_path / "fifo"))
        FaultToleranceProfiler().record_event(ProfilingEvent.FAILURE_DETECTED)
    finally:
        os.close(reader)
    (warning,) = [each for each in log.records if each.levelno == logging.WARNING]
    assert "events are not written" in warning.getMessage()


def test_shared_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of the module use one profiler, that of the process."""
    monkeypatch.setattr(profiling, "_profiler", FaultToleranceProfiler())
    assert profiling.get_profiling_cycle() == 0
    profiling.set_profiling_cycle(2)
    records: list[ProfilingRecord] = []
    end = profiling.subscribe(records.append)
    identity = profiling.record_profiling_event(ProfilingEvent.FAILURE_DETECTED, node_id="a")
    end()
    assert profiling.get_profiling_cycle() == 3
    assert [each.id for each in records] == [identity]


class _Index:
    def __index__(self) -> int:
        return 3


class _Angry:
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __index__ = __deepcopy__ = __str__  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("node", "rank", "ends"),
    [
        ("n1", _Index(), "_n1_3"),
        (_Angry(), _Angry(), "_<_Angry>_unknown"),
        ("a\nb\udcff", "x", "_a?b?_unknown"),
    ],
)
def test_foreign_values_do_no_harm(
    node: object, rank: object, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of an array library is a number, and no object can break log, file or caller."""
    monkeypatch.setenv("NVRX_PROFILING_FILE", str(tmp_path / "p.jsonl"))
    profiler = FaultToleranceProfiler()
    found = profiler.record_event(ProfilingEvent.WORKER_TERMINATED, node, rank)  # type: ignore[arg-type]
    assert found.endswith(ends)
    assert json.loads((tmp_path / "p.jsonl").read_text())["id"] == found
