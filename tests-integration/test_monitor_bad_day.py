# SPDX-License-Identifier: Apache-2.0
"""Scenarios: what ranks and accidents do to the monitor, and that the others do not suffer."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from fault_jobs import GONE_WITHIN_S, WATCHED_SECTIONS, is_running, wait_until

if TYPE_CHECKING:
    from fault_jobs import Job


@pytest.mark.parametrize("what", ["garbage", "pickle", "silence"])
def test_foreign_bytes_hurt_nobody(job: Job, what: str) -> None:
    """Bytes that are no message, a pickle among them, run nothing; hangs are still found."""
    job.start(
        *("--last-cycle", "1", "--client", f"0:0:send={what}", "0:1:hang"), flags=WATCHED_SECTIONS
    )
    job.wait_for(0, [0], "sent")
    monitor = job.monitor_pid()
    job.wait_for(0, [1], "hanging")
    job.wait_for(1, range(2), "done")
    assert job.wait() == 0, job.log()
    assert not (job.out / "evil").exists()
    assert not is_running(monitor)
    assert any(event["rank"] == 1 for event in job.events("fault"))


def test_a_rank_that_closes_its_socket(job: Job) -> None:
    """A rank that loses its connection trains on, and the other's hang is still found."""
    job.start(
        *("--last-cycle", "1", "--client", "0:0:close-socket", "0:1:hang"), flags=WATCHED_SECTIONS
    )
    job.wait_for(0, [0], "working")
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1]


def test_a_killed_monitor_does_not_stop_the_training(job: Job) -> None:
    """When the monitor is killed ranks train on; a later death still restarts the job."""
    job.start("--last-cycle", "1", "--client", flags=WATCHED_SECTIONS)
    job.wait_for(0, range(2), "stepped")
    monitor = job.monitor_pid()
    os.kill(monitor, signal.SIGKILL)
    wait_until(lambda: not is_running(monitor), "the monitor's death")
    pids = [job.rank_pid(0, rank) for rank in range(2)]
    assert all(is_running(pid) for pid in pids)
    os.kill(pids[0], signal.SIGKILL)
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1]


def test_a_new_monitor_finds_hangs_after_the_old_one_was_killed(job: Job) -> None:
    """After the monitor was killed, a hang of the next cycle is still found."""
    job.start("--last-cycle", "2", "--client", "1:1:hang", flags=WATCHED_SECTIONS)
    job.wait_for(0, range(2), "stepped")
    os.kill(job.monitor_pid(), signal.SIGKILL)
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    job.wait_for(1, [1], "hanging")
    job.wait_for(2, range(2), "done")
    assert job.wait() == 0, job.log()


def test_a_frozen_monitor_is_replaced(job: Job) -> None:
    """A monitor that is stopped when a rank dies costs no cycle; a later hang is still found."""
    job.start(
        *("--last-cycle", "2", "--client", "1:1:hang"), flags=WATCHED_SECTIONS, max_restarts=2
    )
    job.wait_for(0, range(2), "stepped")
    monitor = job.monitor_pid()
    os.kill(monitor, signal.SIGSTOP)
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    job.wait_for(1, [1], "hanging")
    assert not is_running(monitor)
    job.wait_for(2, range(2), "done")
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1, 2]
    assert any(event["rank"] == 1 for event in job.events("fault"))


@pytest.mark.no_second_try
def test_nothing_is_left_when_monitor_and_launcher_are_killed(job: Job) -> None:
    """Ranks do not outlive a launcher that is killed together with its monitor."""
    job.start("--last-cycle", "1", "--client", flags=WATCHED_SECTIONS)
    job.wait_for(0, range(2), "stepped")
    monitor = job.monitor_pid()
    os.kill(monitor, signal.SIGKILL)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    wait_until(lambda: not job.processes(), lambda: str(job.leftovers()), GONE_WITHIN_S)
    for path in sorted(job.temporary.rglob("*"), reverse=True):  # the next start would remove it
        path.rmdir() if path.is_dir() else path.unlink()
