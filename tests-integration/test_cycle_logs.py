# SPDX-License-Identifier: Apache-2.0
"""Scenarios: the workers' output goes into one log per cycle, and other programs follow cycles."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import ports
import pytest
from fault_jobs import GONE_WITHIN_S, is_running, state_of, wait_until

if TYPE_CHECKING:
    from fault_jobs import Job

LIGHT = ("--ft-prewarm-import", "decimal,difflib")
MEGABYTE_LINES = [b"w" * 63] * (1 << 14)


def log_of(job: Job, cycle: int) -> Path:
    """Return the path of a cycle's log."""
    return job.folder / "logs" / f"job_cycle{cycle}.log"


def lines_of(job: Job, cycle: int, rank: int) -> list[bytes]:
    """Return what a rank has in a cycle's log, without its prefix."""
    prefix = b"%d: " % rank
    found = log_of(job, cycle).read_bytes().split(b"\n")
    return [line.removeprefix(prefix) for line in found if line.startswith(prefix)]


def flags(job: Job, *more: str) -> tuple[str, ...]:
    """Return the flags of cycle logs below the job's folder."""
    return ("--ft-per-cycle-applog-prefix", str(job.folder / "logs" / "job.log"), *more)


def server_flags(job: Job, port: int) -> tuple[str, ...]:
    """Return the flags of cycle logs and the launcher's own log through a log server."""
    own = str(job.folder / "logs" / "nvrx.log")
    return flags(job, "--ft-nvrx-logfile", own, "--ft-log-server-port", str(port))


@pytest.mark.parametrize("end", ["exit", "kill"])
@pytest.mark.no_second_try
def test_last_words_of_a_cold_rank(job: Job, end: str) -> None:
    """A fresh rank writes 1 MiB and is dead: all of it is in its cycle's log, and nothing else."""
    job.start("--last-cycle", "1", f"0:1:last-words={end}", flags=flags(job))
    assert job.wait() == 0, job.log()
    assert lines_of(job, 0, 1) == [*MEGABYTE_LINES, b"the last word"]
    assert lines_of(job, 1, 1) == []


@pytest.mark.parametrize("end", ["exit", "kill"])
@pytest.mark.no_second_try
def test_last_words_of_a_warm_rank(job: Job, end: str) -> None:
    """The same for a rank that came from a standby, whose streams were others until then."""
    job.start(
        *("--last-cycle", "2", "--client", "--like-torch", f"1:1:last-words={end}"),
        flags=flags(job, *LIGHT),
        prewarm="on",
    )
    job.wait_for(0, range(2), "stepped")
    job.wait_for_standbys(2)
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    assert job.wait() == 0, job.log()
    began = [event for event in job.events("worker_start") if event["cycle"] == 1]
    assert [event["warm"] for event in began] == [True, True]
    assert lines_of(job, 1, 1) == [*MEGABYTE_LINES, b"the last word"]


def test_a_daemon_that_keeps_the_pipe_delays_no_restart(job: Job) -> None:
    """A process that escaped its worker's group holds the pipe: the next cycle does not wait."""
    job.start("--last-cycle", "1", "0:0:leave-a-daemon", flags=flags(job))
    assert job.wait() == 0, job.log()
    started = [event for event in job.events("worker_start") if event["cycle"] == 1]
    # A pipe that is held open is read for 2 s; then the half line is written.
    assert max(event["t"] for event in started) < log_of(job, 0).stat().st_mtime
    assert lines_of(job, 0, 0) == [b"no newline"]


def test_ranks_go_on_while_the_launcher_is_stopped(job: Job) -> None:
    """Less than a pipe holds (64 KiB at least) stops no rank; the lines are there afterwards."""
    job.start("0:*:talk=60000", flags=flags(job))
    job.wait_for(0, range(2), "waiting")
    os.kill(job.pid, signal.SIGSTOP)
    wait_until(lambda: state_of(job.pid) == "T", "the launcher's stop")
    (job.out / "talk").touch()
    job.wait_for(0, range(2), "done")
    os.kill(job.pid, signal.SIGCONT)
    assert job.wait() == 0, job.log()
    assert [len(lines_of(job, 0, rank)) for rank in range(2)] == [60000 // 64] * 2


def test_a_log_server_writes_the_logs_of_workers_and_launcher(job: Job, port: int) -> None:
    """Through the server both logs are complete, and the console stays empty."""
    job.start("--last-cycle", "1", "0:1:last-words=kill", flags=server_flags(job, port))
    assert job.wait() == 0, job.log()
    assert lines_of(job, 0, 1) == [*MEGABYTE_LINES, b"the last word"]
    own = (job.folder / "logs" / "nvrx.log").read_text()
    assert "restarting because rank 1" in own
    assert "job ended with exit code 0" in own
    assert "cycle 0" not in job.log()


def test_a_failed_job_is_explained_in_the_launchers_log(job: Job, port: int) -> None:
    """The report of failures is where the launcher's lines are."""
    job.start("0:1:leave=3", max_restarts=0, flags=server_flags(job, port))
    assert job.wait() == 1
    assert "exitcode" in (job.folder / "logs" / "nvrx.log").read_text()


@pytest.mark.no_second_try
def test_a_killed_launcher_leaves_no_log_server(job: Job, port: int) -> None:
    """Log servers are gone with the launcher, like everything else."""
    job.start("--last-cycle", "9", flags=server_flags(job, port))
    job.wait_for(0, range(2), "stepped")
    before = job.processes()
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := [pid for pid in before if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_other_programs_follow_the_cycles(job: Job) -> None:
    """Each cycle has a file, complete in the end; workers know the link to the present one."""
    directory = job.folder / "info"
    job.start(
        *("--last-cycle", "1", "*:1:print-variable=NVRX_CURRENT_CYCLE_INFO"),
        flags=flags(job, "--ft-cycle-info-dir", str(directory)),
        environment={"SLURM_JOB_ID": "31", "SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "2"},
    )
    job.wait_for(0, range(2), "working")
    link = Path(job.value(0, 1, "variable"))
    assert link == directory / "cycle_info.31.current"
    # It is written beside the start of the workers, which waits for no file.
    present = json.loads(wait_until(lambda: link.exists() and link.read_text(), job.log))
    assert (present["cycle_number"], present["cycle_end_time"]) == (0, "")
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    assert job.wait() == 0, job.log()
    for cycle in range(2):
        said = json.loads((directory / f"cycle_info.31.2.{cycle}").read_text())
        assert said["cycle_end_time"] >= said["cycle_start_time"] > ""
        assert said["cycle_log_file"] == str(log_of(job, cycle))
        assert (said["active_nodes"], said["standby_nodes"]) == (socket.gethostname(), "")
    assert os.readlink(link) == "cycle_info.31.2.1"


@pytest.mark.no_second_try
def test_two_nodes_write_one_log_and_one_description(job: Job, port: int) -> None:
    """Both launchers send to the store host's server, with the token that it made."""
    second = type(job)(job.folder / "second")
    directory = job.folder / "info"
    several = {"NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "1"}
    deed = ("--last-cycle", "1", "0:1:last-words=kill")
    with contextlib.closing(second), ports.claimed() as rendezvous:
        both = (
            *(*server_flags(job, port), "--nnodes", "2", "--ft-cycle-info-dir", str(directory)),
            *("--rdzv-endpoint", f"127.0.0.1:{rendezvous}"),
        )
        job.start(*deed, nproc=1, flags=both, environment=several)
        second.out = job.out
        second.start(*deed, nproc=1, flags=both, environment=several)
        assert job.wait() == 0, job.log()
        assert second.wait() == 0, second.log()
        second.assert_nothing_left()
    assert lines_of(job, 0, 1) == [*MEGABYTE_LINES, b"the last word"]
    own = (job.folder / "logs" / "nvrx.log").read_text()
    assert own.count("job ended with exit code 0") == 2
    for cycle in range(2):
        said = json.loads((directory / f"cycle_info..0.{cycle}").read_text())
        assert (said["active_ranks"], said["generation"]) == ("0-1", "1")
