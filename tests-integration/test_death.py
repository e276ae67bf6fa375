# SPDX-License-Identifier: Apache-2.0
"""Scenarios: ranks die in many ways, and the node restarts, succeeds or fails as it should."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from fault_jobs import WATCHED_SECTIONS, is_running, wait_until

if TYPE_CHECKING:
    from fault_jobs import Job


def test_a_killed_rank_restarts_all_and_costs_one_restart(job: Job) -> None:
    """After kill -9 of one of four, all four start again with cycle 1, and one restart is spent."""
    job.start("--last-cycle", "1", "--client", nproc=4, max_restarts=1)
    job.wait_for(0, range(4), "stepped")
    old = [job.rank_pid(0, rank) for rank in range(4)]
    os.kill(old[2], signal.SIGKILL)
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1]
    assert all(job.has(1, rank, "done") for rank in range(4))
    assert not any(is_running(pid) for pid in old)
    [failure] = job.failures()[:1]
    assert "SIGKILL" in str(failure), failure
    assert "rank 2" in job.log()


def test_a_second_death_ends_a_job_with_one_restart(job: Job) -> None:
    """When the budget is spent the next death ends the job with exit code 1."""
    job.start("--last-cycle", "9", "0:1:die", "1:0:leave=7", max_restarts=1)
    assert job.wait() == 1
    assert job.cycles() == [0, 1]
    assert "7" in job.log()


def test_without_restarts_an_exception_ends_the_job(job: Job) -> None:
    """A rank that raises ends a job without restarts with exit code 1, and its words are shown."""
    job.start("--last-cycle", "9", "0:1:fall=over_the_edge", max_restarts=0)
    assert job.wait() == 1
    assert "over_the_edge" in job.log()


def test_a_rank_may_leave_early_with_0(job: Job) -> None:
    """A rank that exits 0 while the others go on is no fault; the job ends when all have left."""
    job.start("--client", "0:0:leave", "0:1:leave-after=go")
    job.wait_for(0, [0], "leaving")
    job.wait_for(0, [1], "waiting")
    gone = job.rank_pid(0, 0)
    while is_running(gone):
        time.sleep(0.01)
    assert job.process is not None
    assert job.process.poll() is None
    (job.out / "go").touch()
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0]


def test_death_before_the_monitor_is_known(job: Job) -> None:
    """A rank that dies before it connects to its monitor is a death like any other."""
    job.start("--last-cycle", "1", "--client", "0:1:die-early", flags=WATCHED_SECTIONS)
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1]


def test_two_deaths_in_one_millisecond_are_one_restart(job: Job) -> None:
    """Two ranks that die at the same moment cost one restart."""
    job.start(
        *("--last-cycle", "1", "0:0:die-together=moment", "0:1:die-together=moment"),
        nproc=3,
        max_restarts=1,
    )
    job.wait_for(0, [0, 1], "waiting")
    part = job.out / "moment.part"
    part.write_text(str(time.monotonic() + 0.5))
    part.rename(job.out / "moment")
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1]


def test_a_rank_that_dies_during_the_restart(job: Job) -> None:
    """A rank of the new cycle that dies at once is the next restart, not the end."""
    job.start("--last-cycle", "2", "0:0:die", "1:1:die-early", max_restarts=2)
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1, 2]


def test_a_survivor_that_ignores_sigterm_is_killed_in_time(job: Job) -> None:
    """A survivor that ignores SIGTERM is killed after its own time, and the restart goes on."""
    job.start(
        *("--last-cycle", "1", "0:1:ignore-term"), flags=("--workers-stop-timeout", "1"), nproc=3
    )
    job.wait_for(0, [1], "deaf")
    job.wait_for(0, [0, 2], "stepped")
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    survivor = job.rank_pid(0, 1)
    wait_until(lambda: not is_running(survivor), "the survivor's end", 12)
    assert job.wait() == 0, job.log()


def test_a_stopped_survivor_costs_no_stop_timeout(job: Job) -> None:
    """A survivor that is stopped is woken to be ended; the restart does not wait for it."""
    job.start("--last-cycle", "1", flags=("--workers-stop-timeout", "30"))
    job.wait_for(0, range(2), "stepped")
    survivor = job.rank_pid(0, 1)
    os.kill(survivor, signal.SIGSTOP)
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    wait_until(lambda: not is_running(survivor), "its end before the timeout", 25)
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1]


@pytest.mark.no_second_try
def test_children_of_ranks_that_ignore_signals_are_gone(job: Job) -> None:
    """Children that ignore signals end with their rank's cycle, those in other sessions too."""
    job.start("--last-cycle", "1", "0:1:deaf-children", flags=("--workers-stop-timeout", "1"))
    job.wait_for(0, range(2), "working")
    children = [int(line[1]) for line in job.lines(0, 1) if line[0] == "child"]
    assert len(children) == 2
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    assert job.wait() == 0, job.log()
    job.assert_nothing_left()
    assert not any(is_running(child) for child in children)


@pytest.mark.parametrize("last", [20, pytest.param(50, marks=pytest.mark.slow)])
def test_restarts_in_a_row_leave_the_launcher_as_it_was(job: Job, last: int) -> None:
    """Over many restarts the launcher's memory, files, threads and children stay the same."""
    job.start("--last-cycle", str(last), max_restarts=last)
    seen = {}
    for cycle in range(last):
        job.wait_for(cycle, range(2), "stepped")
        if cycle in (3, last - 1):
            seen[cycle] = settled_resources(job.pid)
        os.kill(job.rank_pid(cycle, cycle % 2), signal.SIGKILL)
    assert job.wait() == 0, job.log()
    first, final = seen.values()
    assert final["rss_kib"] - first["rss_kib"] < 2048, seen
    assert {**first, "rss_kib": 0} == {**final, "rss_kib": 0}


def settled_resources(pid: int) -> dict[str, int]:
    """Return what a process holds once two looks find the same: the restart is over then."""
    looks = [resources(pid)]

    def same() -> bool:
        time.sleep(0.1)  # between the looks
        looks.append(resources(pid))
        return {**looks[-1], "rss_kib": 0} == {**looks[-2], "rss_kib": 0}

    wait_until(same, lambda: f"the restart is over: {looks[-5:]}")
    return looks[-1]


def resources(pid: int) -> dict[str, int]:
    """Return what a process holds."""
    with open(f"/proc/{pid}/status") as status:
        rss = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    tasks = os.listdir(f"/proc/{pid}/task")
    children = 0
    for task in tasks:
        # A thread may end meanwhile; the children of one that ends become another one's.
        with suppress(FileNotFoundError), open(f"/proc/{pid}/task/{task}/children") as listed:
            children += len(listed.read().split())
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return {"rss_kib": rss, "fds": descriptors, "threads": len(tasks), "children": children}
