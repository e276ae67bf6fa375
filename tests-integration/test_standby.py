# SPDX-License-Identifier: Apache-2.0
"""Scenarios: standbys are ready, are killed, fail or are still warming when they are needed."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from fault_jobs import SCRIPTED_RANK, command_of, is_running, wait_until

if TYPE_CHECKING:
    from fault_jobs import Job

# The ranks pose as users of torch, or no standby would be kept; what is imported is light.
RANK = ("--client", "--like-torch")
LIGHT = ("--ft-prewarm-import", "decimal,difflib")
SLOW_MODULE = "nvrx_test_slow_import"


def standbys(job: Job) -> set[int]:
    """Return the pids of the processes that run the ranks' program but are no ranks yet."""
    ranks = {
        int(line.split()[1])
        for path in job.out.glob("progress_*")
        for line in path.read_text().splitlines()
        if line.startswith("started ")
    }
    running = job.processes() - ranks - {job.pid}
    return {pid for pid in running if str(SCRIPTED_RANK) in command_of(pid)}


def warm(job: Job, cycle: int) -> list[bool]:
    """Return, by rank, whether a cycle's ranks came from standbys."""
    started = [event for event in job.events("worker_start") if event["cycle"] == cycle]
    return [event["warm"] for event in sorted(started, key=lambda event: event["rank"])]


def test_ready_standbys_become_the_next_cycle(job: Job) -> None:
    """When all standbys are ready a death is followed by a cycle of warm ranks."""
    job.start("--last-cycle", "1", *RANK, prewarm="on", flags=LIGHT)
    job.wait_for(0, range(2), "stepped")
    job.wait_for_standbys(2)
    waiting = standbys(job)
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    assert job.wait() == 0, job.log()
    assert warm(job, 1) == [True, True]
    assert "cycle 1: 2 workers started (2 from ready standbys)" in job.log()
    # Once per cycle; the last one may end before its standbys are ready.
    assert job.log().count("all 2 standbys are ready") in {1, 2}
    assert {job.rank_pid(1, rank) for rank in range(2)} == waiting


def test_a_killed_standby_is_replaced(job: Job) -> None:
    """A standby that is killed does no harm, and another one takes its place."""
    job.start("--last-cycle", "1", *RANK, prewarm="on", flags=LIGHT)
    job.wait_for(0, range(2), "stepped")
    job.wait_for_standbys(2)
    victim = min(standbys(job))
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not is_running(victim), "the standby's death")
    assert job.cycles() == [0]
    wait_until(lambda: len(standbys(job) - {victim}) == 2, lambda: f"a new one\n{job.log()}")
    job.wait_for_standbys(2)
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1], job.log()


def test_a_standby_killed_together_with_a_rank(job: Job) -> None:
    """When a rank and its standby die together the job restarts once, cold where it must."""
    job.start("--last-cycle", "1", *RANK, prewarm="auto", flags=LIGHT, max_restarts=1)
    job.wait_for(0, range(2), "stepped")
    job.wait_for_standbys(2)
    for pid in [*standbys(job), job.rank_pid(0, 0)]:
        os.kill(pid, signal.SIGKILL)
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1], job.log()


def test_imports_that_fail_mean_a_cold_start(job: Job) -> None:
    """With `auto`, standbys whose imports fail are given up; the job runs and restarts cold."""
    job.start(
        *("--last-cycle", "1", *RANK),
        prewarm="auto",
        flags=("--ft-prewarm-import", "no_such_module_anywhere"),
    )
    job.wait_for(0, range(2), "stepped")
    wait_until(lambda: "start cold from now on" in job.log(), job.log)
    os.kill(job.rank_pid(0, 1), signal.SIGKILL)
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1], job.log()
    assert "no_such_module_anywhere" in job.log()
    assert warm(job, 1) == [False, False]


def test_a_fault_while_standbys_are_warming(job: Job) -> None:
    """A death while the standbys still import is followed by a correct cycle, not a warm one."""
    go = job.folder / "go"
    (job.folder / f"{SLOW_MODULE}.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
    )
    job.start(
        *("--last-cycle", "1", *RANK),
        prewarm="auto",
        flags=("--ft-prewarm-import", SLOW_MODULE),
        environment={"PYTHONPATH": str(job.folder)},
    )
    job.wait_for(0, range(2), "stepped")
    wait_until(lambda: standbys(job), lambda: f"a warming standby\n{job.log()}")
    os.kill(job.rank_pid(0, 1), signal.SIGKILL)
    wait_until(lambda: [e for e in job.events("worker_start") if e["cycle"] == 1], job.log)
    go.touch()
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1], job.log()
    early = [event for event in job.events("worker_start") if event["cycle"] == 1]
    reasons = [event.get("cold_reason") for event in early]
    assert "its standby was still importing" in reasons, early
    assert all(event["warm"] == (event.get("cold_reason") is None) for event in early)
    importing = reasons.count("its standby was still importing")
    assert f"{importing} from standbys still importing" in job.log()


@pytest.mark.no_second_try
def test_no_standby_outlives_a_killed_launcher(job: Job) -> None:
    """Ready standbys are gone when the launcher is killed."""
    job.start("--last-cycle", "9", *RANK, prewarm="on", flags=LIGHT)
    job.wait_for(0, range(2), "stepped")
    job.wait_for_standbys(2)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    job.assert_nothing_left()


def test_a_job_that_ends_while_standbys_warm(job: Job) -> None:
    """The end of the job does not wait for standbys that are still importing."""
    (job.folder / f"{SLOW_MODULE}.py").write_text("import time\ntime.sleep(60)\n")
    job.start(
        *(*RANK, "0:0:leave-after=go", "0:1:leave-after=go"),
        prewarm="auto",
        flags=("--ft-prewarm-import", f"decimal,{SLOW_MODULE}"),
        environment={"PYTHONPATH": str(job.folder)},
    )
    job.wait_for(0, range(2), "waiting")
    wait_until(lambda: standbys(job), lambda: f"a warming standby\n{job.log()}")
    (job.out / "go").touch()
    assert job.wait(20) == 0, job.log()
