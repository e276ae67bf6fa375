# SPDX-License-Identifier: Apache-2.0
"""Scenarios: the launcher is asked to leave, is interrupted, or is killed."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from fault_jobs import WATCHED_SECTIONS, is_running, state_of, wait_until

if TYPE_CHECKING:
    from fault_jobs import Job


def test_sigterm_with_ranks_that_end_cleanly(job: Job) -> None:
    """SIGTERM is passed on; when all ranks leave with 0 so does the launcher."""
    job.start("--last-cycle", "9", "--client", "*:*:leave-on-term")
    job.wait_for(0, range(2), "ready")
    job.wait_for(0, range(2), "stepped")
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == 0, job.log()
    assert all(job.has(0, rank, "told") for rank in range(2))
    assert job.cycles() == [0]


def test_sigterm_with_ranks_that_do_not(job: Job) -> None:
    """SIGTERM ends the launcher with 1 when a rank leaves with an error or has to be killed."""
    job.start(
        *("--last-cycle", "9", "0:0:leave-on-term=3", "0:1:ignore-term"),
        flags=("--term-timeout", "1"),
    )
    job.wait_for(0, range(2), "stepped")
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(15) == 1
    assert job.cycles() == [0]


def test_one_ctrl_c_is_orderly(job: Job) -> None:
    """SIGINT once lets the ranks end in their own time."""
    job.start("--last-cycle", "9", "*:*:leave-on-term")
    job.wait_for(0, range(2), "stepped")
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(20) == 0, job.log()
    assert all(job.has(0, rank, "told") for rank in range(2))


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_two_ctrl_c_end_at_once(job: Job, first: signal.Signals) -> None:
    """SIGINT after a signal does not wait for ranks that ignore that one, and the log says so."""
    job.start("--last-cycle", "9", "*:*:ignore-term", flags=("--term-timeout", "600"))
    job.wait_for(0, range(2), "stepped")
    os.kill(job.pid, first)
    said = f"workers get {first.name}, and SIGKILL after 600 s; SIGINT (Ctrl-C) now kills"
    wait_until(lambda: said in job.log(), job.log, 10)
    if first is not signal.SIGINT:
        os.kill(job.pid, first)  # Some schedulers send it twice.
        wait_until(lambda: job.log().count(f"received {first.name}") == 2, job.log, 10)
        assert "are killed now" not in job.log()
    began = time.monotonic()
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(15) == 1
    assert time.monotonic() - began < 10


def test_sigterm_while_a_restart_is_under_way(job: Job) -> None:
    """SIGTERM during the stop of a restart ends the job; no new ranks start."""
    job.start(
        *("--last-cycle", "9", "0:1:ignore-term"),
        flags=("--workers-stop-timeout", "5", "--term-timeout", "1"),
    )
    job.wait_for(0, range(2), "stepped")
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    wait_until(lambda: not is_running(job.rank_pid(0, 0)), "the death of rank 0")
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(20) == 1
    assert job.cycles() == [0]


@pytest.mark.no_second_try
def test_nothing_outlives_a_killed_launcher(job: Job) -> None:
    """Five seconds after a launcher's SIGKILL no process, socket or file of the job is left."""
    job.start("--last-cycle", "9", "--client", "0:1:deaf-children", nproc=4, flags=WATCHED_SECTIONS)
    job.wait_for(0, range(4), "stepped")
    assert len(job.processes()) > 4
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    job.assert_nothing_left()


@pytest.mark.no_second_try
def test_nothing_outlives_a_launcher_killed_beside_a_frozen_monitor(job: Job) -> None:
    """The same holds when the monitor is stopped: the launcher's death wakes it."""
    job.start("--last-cycle", "9", "--client", flags=WATCHED_SECTIONS)
    job.wait_for(0, range(2), "stepped")
    monitor = job.monitor_pid()
    os.kill(monitor, signal.SIGSTOP)
    wait_until(lambda: state_of(monitor) == "T", "the monitor's stop")
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    job.assert_nothing_left()


WAIT_WHILE_PLANNING = """
import os, signal, sys, time

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.endswith("_plan.plan"):
            # Of a test run in the background it would be ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            open(os.environ["REACHED"], "w").close()
            while True:  # not pause(): the signal may come right before it
                time.sleep(0.01)

sys.meta_path.insert(0, Finder())
"""


def test_ctrl_c_before_the_job_began(job: Job) -> None:
    """A launcher that is interrupted before it has started anything ends by SIGINT, in silence."""
    reached = job.folder / "reached"
    (job.folder / "sitecustomize.py").write_text(WAIT_WHILE_PLANNING)
    job.start(environment={"PYTHONPATH": str(job.folder), "REACHED": str(reached)})
    wait_until(reached.exists, "the launcher's plan")
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(10) == -signal.SIGINT
    assert job.log() == ""


@pytest.mark.no_second_try
def test_nothing_outlives_a_launcher_killed_during_a_restart(job: Job) -> None:
    """The same holds when the launcher is killed while it stops the ranks of a cycle."""
    job.start(
        *("--last-cycle", "9", "--client", "0:1:ignore-term"),
        flags=("--workers-stop-timeout", "30"),
    )
    job.wait_for(0, range(2), "stepped")
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    wait_until(lambda: not is_running(job.rank_pid(0, 0)), "the death of rank 0")
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    job.assert_nothing_left()
