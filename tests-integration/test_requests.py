# SPDX-License-Identifier: Apache-2.0
"""Scenarios: ranks ask the launcher for something, and cycles bring the training no further."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from fault_jobs import WATCHED_SECTIONS

if TYPE_CHECKING:
    from fault_jobs import Job


def test_a_rank_asks_to_shut_the_workload_down(job: Job) -> None:
    """After ShutdownWorkload the next rendezvous is closed: no restart, though some are left."""
    job.start("--last-cycle", "9", "--client", "0:1:ask=ShutdownWorkload")
    job.wait()
    assert job.cycles() == [0], job.log()
    assert "asked by a test" in job.log()


def test_a_rank_asks_to_exclude_its_node(job: Job) -> None:
    """After ExcludeThisNode the only node leaves as unhealthy: exit code 1 and no restart."""
    job.start("--last-cycle", "9", "--client", "0:1:ask=ExcludeThisNode")
    assert job.wait() == 1
    assert job.cycles() == [0], job.log()


def test_a_rank_asks_to_continue(job: Job) -> None:
    """Continue changes nothing: the death of the rank that asked is a restart."""
    job.start("--last-cycle", "1", "--client", "0:1:ask=Continue")
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1]


def test_cycles_without_progress_end_the_job_with_93(job: Job) -> None:
    """When several cycles bring the iteration no further, the job ends with exit code 93."""
    iteration = job.out / "latest_iteration"
    iteration.write_text("7")
    flags = ("--ft-max-no-progress-cycles", "2", "--ft-checkpoint-iteration-file", str(iteration))
    job.start("--last-cycle", "20", "*:1:die", flags=(*flags,), max_restarts=20)
    assert job.wait() == 93, job.log()
    assert max(job.cycles()) <= 3


def test_progress_keeps_the_job_alive(job: Job) -> None:
    """Cycles that bring the iteration further are restarted as often as the budget allows."""
    iteration = job.out / "latest_iteration"
    iteration.write_text("0")
    flags = ("--ft-max-no-progress-cycles", "1", "--ft-checkpoint-iteration-file", str(iteration))
    job.start("--last-cycle", "4", "--client", flags=(*WATCHED_SECTIONS, *flags), max_restarts=4)
    for cycle in range(4):
        job.wait_for(cycle, range(2), "stepped")
        iteration.write_text(str(10 * (cycle + 1)))
        os.kill(job.rank_pid(cycle, 0), signal.SIGKILL)
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1, 2, 3, 4]
