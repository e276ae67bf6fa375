# SPDX-License-Identifier: Apache-2.0
"""Deadlines of torch's file timer: what is a request, who is signalled, and a whole job."""

import json
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvidia_resiliency_ext.fault_tolerance._plan.plan import timer_file
from nvidia_resiliency_ext.fault_tolerance._workers.file_timers import (
    LONGEST_LINE,
    FileTimers,
    TimerRequest,
    parse_request,
)
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

DEADLINE_S = 60.0
GOOD = {"version": 1, "pid": 77, "scope_id": "step", "expiration_time": 5.5, "signal": 9}
PROGRAM = """
import os, time
if os.environ["RANK"] == "1":
    from torch.distributed.elastic import timer
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=2.0):
        pass
    if os.environ["NVRX_CYCLE"] == "0":
        with timer.expires(after=0.5):
            time.sleep(600)
    time.sleep(2.2)  # longer than the deadline that was withdrawn
elif os.environ["NVRX_CYCLE"] == "0":
    time.sleep(600)  # the restart ends it
"""


def line(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def test_a_request_is_read() -> None:
    """What torch's client writes is understood."""
    assert parse_request(line()) == TimerRequest(77, "step", 5.5, 9)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{}", b"[]", b"\xff", b"[" * 100_000, line(pid="77"), line(pid=1), line(pid=-1),
        line(pid=True), line(pid=2**40), line(signal=-9), line(signal=1000), line(signal=9.0),
        line(scope_id=None), line(expiration_time=float("nan")), line(expiration_time="x"),
        line(expiration_time=float("inf")), line(expiration_time=10**400),
    ],
    ids=lambda raw: repr(raw[:90]),
)  # fmt: skip
def test_what_is_no_request_is_refused(raw: bytes) -> None:
    """Foreign or damaged lines mean nothing, and raise nothing."""
    assert parse_request(raw) is None


def test_damaged_requests_raise_nothing() -> None:
    """Whatever bytes change in a request, it is read or refused."""
    chance = random.Random(7)
    for _ in range(2000):
        damaged = bytearray(line())
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        parse_request(bytes(damaged))


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({}, None),
        ({"TORCHELASTIC_TIMER_FILE": "/t"}, None),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}, None),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}, "/run/timers.pipe"),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": "/t"}, "/t"),
        (
            {
                "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
                "TORCHELASTIC_TIMER_FILE": "/outer",
                "NVRX_RUN_ID": "outer",
            },
            "/run/timers.pipe",
        ),
    ],
)
def test_where_requests_go(environ: dict[str, str], path: str | None) -> None:
    """Only where it is switched on, the user's path first, and never an outer launcher's."""
    assert timer_file(environ, "/run") == path


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Give two processes that lead sessions of their own."""
    started = [
        subprocess.Popen(["sleep", "600"], start_new_session=True),
        subprocess.Popen(["sleep", "600"], start_new_session=True),
    ]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_only_workers_that_miss_a_deadline_are_signalled(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    """A worker gets its signal at the deadline; nobody else does, and a withdrawn one never."""
    worker, foreign = sleepers
    clock = SystemClock()
    loop = EventLoop(clock)
    path = tmp_path / "pipe"
    os.mkfifo(path)  # left by an earlier launch
    timers = FileTimers(str(path), loop, clock, lambda: [worker.pid])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    now = clock.wall()
    soon = {"expiration_time": now + 0.2, "signal": int(signal.SIGTERM)}
    lines = [
        line(pid=foreign.pid, **soon),
        b"x" * (LONGEST_LINE + 10),
        line(pid=worker.pid, scope_id="kept", expiration_time=now + 0.01),
        line(pid=worker.pid, scope_id="kept", expiration_time=-1, signal=0),
        line(pid=worker.pid, scope_id="spared", expiration_time=now - 1, signal=0),
        line(pid=worker.pid, **soon),
    ]
    with path.open("wb", buffering=0) as pipe:
        for words in lines:
            pipe.write(words + b"\n")
    end = clock.monotonic() + DEADLINE_S
    while worker.poll() is None and clock.monotonic() < end:
        loop.run_once(until=clock.monotonic() + 0.05)
    assert worker.returncode == -signal.SIGTERM
    assert foreign.poll() is None
    assert "is no request for a timer" in caplog.text
    timers.close()
    loop.close()
    assert not path.exists()


def test_a_file_that_is_no_pipe_is_left_alone(tmp_path: Path) -> None:
    """A path with something else at it is an error, not a loss."""
    path = tmp_path / "data"
    path.write_text("kept")
    loop = EventLoop(SystemClock())
    with pytest.raises(FileExistsError):
        FileTimers(str(path), loop, SystemClock(), list)
    loop.close()
    assert path.read_text() == "kept"


@pytest.mark.slow
def test_a_missed_deadline_restarts_the_job(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    """Torch's own client, in a whole job: the rank that misses its deadline costs a restart."""
    del clean_environment
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM)
    pipe = tmp_path / "pipe"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"),
            *("--nproc-per-node=2", "--max-restarts=1", "--ft-prewarm=off", str(program)),
        ],
        env={
            **os.environ,
            "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
            "TORCHELASTIC_TIMER_FILE": str(pipe),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "expired; it gets signal 9" in run.stderr
    assert "rank 1 on host" in run.stderr
    assert "(1 restart)" in run.stderr
    assert not pipe.exists()
