# SPDX-License-Identifier: Apache-2.0
"""Scenarios: ranks hang in many ways; the monitor finds them, says why, and the job goes on."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from fault_jobs import WATCHED_SECTIONS, is_running, state_of, wait_until

if TYPE_CHECKING:
    from typing import Any

    from fault_jobs import Job

HEARTBEATS = ("--ft-initial-rank-heartbeat-timeout", "20", "--ft-rank-heartbeat-timeout", "1")


def hangs(job: Job, cycle: int = 0) -> list[dict[str, Any]]:
    """Return the recorded hangs of a cycle."""
    faults = [event for event in job.events("fault") if event["cycle"] == cycle]
    return [fault for fault in faults if str(fault["cause"]).startswith("hang")]


def test_a_stopped_rank_is_found_by_its_section(job: Job) -> None:
    """A rank stopped in a section is killed at the timeout; survivors are not waited for."""
    job.start(
        *("--last-cycle", "1", "--client", "0:2:stop"),
        nproc=4,
        flags=(*WATCHED_SECTIONS, "--workers-stop-timeout", "30"),
    )
    job.wait_for(0, [2], "stopping")
    stopped_at = float(job.value(0, 2, "stopping"))
    pid = job.rank_pid(0, 2)
    wait_until(lambda: not is_running(pid), "the death of the stopped rank", 12)
    elapsed = time.monotonic() - stopped_at
    assert 0.9 < elapsed < 10, elapsed
    survivors = [job.rank_pid(0, rank) for rank in (0, 1, 3)]
    wait_until(lambda: not any(map(is_running, survivors)), "their end before the timeout", 25)
    assert job.wait() == 0, job.log()
    [hang] = hangs(job)
    assert (hang["rank"], hang["cause"]) == (2, "hang_section")
    assert "stuck" in str(hang)
    assert "hang" in str(job.failures()[0]) or "section" in str(job.failures()[0])
    assert job.cycles() == [0, 1]


def test_a_sleeping_rank_leaves_its_stacks(job: Job) -> None:
    """A rank that sleeps in a section is killed, and its stacks are kept."""
    job.start("--last-cycle", "1", "--client", "0:1:hang", flags=WATCHED_SECTIONS)
    assert job.wait() == 0, job.log()
    [stacks] = list(job.record.glob("stacks-*-r1.txt"))
    assert "scripted_rank.py" in stacks.read_text()
    assert "in hang" in stacks.read_text()


def test_an_outer_section_hangs_while_an_inner_one_goes_on(job: Job) -> None:
    """An outer section past its timeout is found, though an inner one opens and closes."""
    job.start("--last-cycle", "1", "--client", "0:0:hang-outside", flags=WATCHED_SECTIONS)
    assert job.wait() == 0, job.log()
    assert "outer" in str(hangs(job)), hangs(job)


def test_missing_heartbeats_are_a_hang(job: Job) -> None:
    """A rank whose heartbeats cease is killed after the heartbeat timeout."""
    # Whoever has sent no heartbeat has the time of the first one: nobody else can be late.
    deeds = ("0:0:fall-silent=0", "0:1:fall-silent", "1:*:leave")
    job.start("--last-cycle", "1", "--client", *deeds, flags=HEARTBEATS)
    assert job.wait() == 0, job.log()
    [hang] = hangs(job)
    assert (hang["rank"], hang["cause"]) == (1, "hang_heartbeat")
    assert job.cycles() == [0, 1]


def test_a_hang_without_restarts_fails_and_says_so(job: Job) -> None:
    """With no restarts left a hang ends the job with exit code 1 and a record of the reason."""
    job.start("--last-cycle", "1", "--client", "0:1:hang", flags=WATCHED_SECTIONS, max_restarts=0)
    assert job.wait() == 1
    assert "stuck" in str(job.failures()), job.failures()


def test_the_monitor_acts_alone_when_the_launcher_is_stopped(job: Job) -> None:
    """While the launcher is stopped the monitor kills a hung rank; awake again, it restarts all."""
    job.start("--last-cycle", "1", "--client", "0:1:hang=now", flags=WATCHED_SECTIONS)
    job.wait_for(0, [1], "waiting")
    os.kill(job.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: state_of(job.pid) == "T", "the launcher's stop")
        (job.out / "now").touch()
        pid = job.rank_pid(0, 1)
        wait_until(lambda: not is_running(pid), "the death of the hung rank", 15)
        assert state_of(job.pid) == "T"
        assert job.cycles() == [0]
    finally:
        os.kill(job.pid, signal.SIGCONT)
    assert job.wait() == 0, job.log()
    assert hangs(job)
    assert job.cycles() == [0, 1]


def test_two_ranks_stopped_together_are_one_restart(job: Job) -> None:
    """Two ranks that hang at once are both ended, in one restart."""
    job.start(
        *("--last-cycle", "1", "--client", "0:0:stop", "0:1:stop"),
        flags=WATCHED_SECTIONS,
        max_restarts=1,
    )
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1]
