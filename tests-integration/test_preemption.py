# SPDX-License-Identifier: Apache-2.0
"""Scenarios: a node is told to go; all ranks save at one step and leave, or go on without it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_jobs import LAUNCHER, Job, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(__file__).parent / "programs" / "saving_rank.py"
NEVER_DONE = "1000000"
ANNOUNCED = ("--ft-preempt-signal", "SIGUSR1", "--ft-preempt-grace", "25")


def start(job: Job, *arguments: str, flags: tuple[str, ...] = ANNOUNCED, nproc: int = 3) -> None:
    """Start a job of ranks in lock-step and wait until all of them work."""
    job.start(str(job.out), *arguments, flags=flags, nproc=nproc, program=PROGRAM)
    wait_until(lambda: len(list(job.out.glob("works_0_*"))) == nproc, job.log)


def announce(job: Job, signum: int = signal.SIGUSR1) -> None:
    """Send the launcher the signal of preemption."""
    assert job.process is not None
    job.process.send_signal(signum)


def saved(out: Path, cycle: int = 0) -> list[int]:
    """Return at which step each rank of a cycle saved."""
    return [int(path.read_text()) for path in sorted(out.glob(f"saved_{cycle}_*"))]


def test_all_ranks_save_at_one_step_and_leave(job: Job) -> None:
    """After the signal every rank saves at the same step, and the launcher exits 0."""
    start(job, NEVER_DONE, "--catch")
    announce(job)
    assert job.wait() == 0, job.log()
    steps = saved(job.out)
    assert len(steps) == 3
    assert len(set(steps)) == 1
    assert len(list(job.out.glob("caught_0_*"))) == 3, "the signal is passed to those that catch it"


def test_workers_that_do_not_catch_the_signal_are_not_killed_by_it(job: Job) -> None:
    """SIGUSR1 would end a Python program: it is passed only to workers that handle it."""
    start(job, NEVER_DONE)
    announce(job)
    assert job.wait() == 0, job.log()
    assert len(set(saved(job.out))) == 1


def test_the_job_saves_before_its_time_is_over(job: Job) -> None:
    """With a deadline ranks are asked to save so long before it, without any signal."""
    start(job, NEVER_DONE, flags=("--ft-preempt-deadline", "+23", "--ft-preempt-grace", "20"))
    assert job.wait() == 0, job.log()
    assert len(set(saved(job.out))) == 1
    assert "its time is over" in job.log()


def test_ranks_that_do_not_leave_are_stopped_when_the_time_is_over(job: Job) -> None:
    """A program that never asks is stopped at the end of the grace time; that is no success."""
    flags = ("--ft-preempt-signal", "SIGUSR1", "--ft-preempt-grace", "0.5")
    start(job, NEVER_DONE, "--ask", "never", flags=flags)
    announce(job)
    assert job.wait() == 1, job.log()
    assert "not all ranks ended well" in job.log()


def test_a_signal_that_does_not_stop_coming_keeps_no_rank_from_saving(job: Job) -> None:
    """The signal every few milliseconds until the launcher is gone: all save, and it leaves with 0.

    Without the handler of the first one, the last ones would end the launcher itself. What comes a
    second after the first one says that the time is over: then all is said of the launcher.
    """
    start(job, NEVER_DONE, "--catch", nproc=2)
    assert job.process is not None
    deadline = time.monotonic() + 30
    while job.process.poll() is None:
        assert time.monotonic() < deadline, job.log()
        announce(job)
        time.sleep(0.002)
    if "was received again" in job.log():
        assert job.process.returncode in (0, 1), job.log()
        return
    assert job.process.returncode == 0, job.log()
    assert len(saved(job.out)) == 2
    assert len(set(saved(job.out))) == 1


def test_a_second_signal_later_ends_the_time_to_save(job: Job) -> None:
    """Ranks that go on after the first one are stopped at the second; that is no success."""
    start(job, NEVER_DONE, "--ask", "never", nproc=2)
    announce(job)
    wait_until(lambda: "to save and leave" in job.log(), job.log)
    time.sleep(1.1)  # what comes sooner is the same announcement
    asked_at = time.monotonic()
    announce(job)
    assert job.wait() == 1, job.log()
    assert time.monotonic() - asked_at < 10, "the grace time is 25 s"
    assert "was received again" in job.log()


def test_a_rank_that_has_not_begun_is_not_waited_for(job: Job) -> None:
    """A rank that was never in the loop saves at the same step as the others when it comes."""
    job.start(*(str(job.out), NEVER_DONE, "--late", "1"), flags=ANNOUNCED, nproc=3, program=PROGRAM)
    wait_until(lambda: len(list(job.out.glob("works_0_*"))) == 2, job.log)
    announce(job)
    wait_until(lambda: "save at call" in job.log(), job.log)
    (job.out / "go").touch()
    assert job.wait() == 0, job.log()
    assert saved(job.out) == [1, 1, 1]


def test_a_new_monitor_knows_that_saving_is_asked_for(job: Job) -> None:
    """A monitor that dies while ranks are asked to save does not keep them from it."""
    start(job, NEVER_DONE, "--pause", "2", nproc=2)
    wait_until(lambda: len(list(job.out.glob("pause_*"))) == 2, job.log)
    announce(job)
    wait_until(lambda: "asked to save" in job.log(), job.log)
    (job.out / "go_0").touch()
    os.kill(job.monitor_pid(), signal.SIGKILL)
    wait_until(lambda: "starting another" in job.log(), job.log)
    (job.out / "go_1").touch()
    assert job.wait() == 0, job.log()
    assert len(saved(job.out)) == 2
    assert len(set(saved(job.out))) == 1


# --- many nodes --------------------------------------------------------------------------------


class Nodes:
    """Several launchers of one job on this machine."""

    def __init__(self, job: Job, nodes: str, port: int) -> None:
        self.job = job
        self.flags = ("--nnodes", nodes, "--rdzv-endpoint", f"127.0.0.1:{port}", *ANNOUNCED)
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        """Start a launcher with one worker; node rank 0 comes first and serves the store."""
        command = [
            *(sys.executable, "-m", LAUNCHER, "--max-restarts", "3", "--node-rank", str(rank)),
            *("--ft-prewarm", "off", "--ft-lease", "1", *self.flags),
            *(str(PROGRAM), str(self.job.out), NEVER_DONE),
        ]
        with (self.job.folder / f"log{len(self.launchers)}").open("wb") as log:
            launcher = subprocess.Popen(
                command,
                env=self.job.environment({"NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "1"}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.launchers.append(launcher)
        return launcher

    def log(self) -> str:
        """Return what all launchers have logged."""
        return "\n".join(path.read_text() for path in sorted(self.job.folder.glob("log?")))

    def wait_for(self, pattern: str, count: int) -> None:
        """Wait until so many files are there."""
        wait_until(lambda: len(list(self.job.out.glob(pattern))) >= count, self.log)

    def codes(self) -> list[int]:
        """Wait for all launchers and return their exit codes."""
        return [launcher.wait(60.0) for launcher in self.launchers]


@contextlib.contextmanager
def nodes_of(job: Job, nodes: str, port: int) -> Iterator[Nodes]:
    """Give launchers that are gone in the end."""
    made = Nodes(job, nodes, port)
    try:
        yield made
    finally:
        for launcher in made.launchers:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()


def test_a_preempted_job_of_many_nodes_saves_at_one_step(job: Job, port: int) -> None:
    """When all nodes get the signal, all ranks save at one step, and all launchers exit 0."""
    with nodes_of(job, "2", port) as nodes:
        for rank in range(2):
            nodes.start(rank)
        nodes.wait_for("works_0_*", 2)
        for launcher in nodes.launchers:
            launcher.send_signal(signal.SIGUSR1)
        assert nodes.codes() == [0, 0], nodes.log()
        steps = saved(job.out)
        assert len(steps) == 2
        assert len(set(steps)) == 1


@pytest.mark.no_second_try
def test_a_node_that_drains_is_replaced_and_no_work_is_lost(job: Job, port: int) -> None:
    """One of two nodes must go: all save, and the spare goes on at the very step."""
    with nodes_of(job, "2:3", port) as nodes:
        nodes.start(0)
        # Who is first serves the store, and the job ends with it: it must not be the one to go.
        wait_until(lambda: "needed: 2 nodes" in nodes.log(), nodes.log)
        for rank in (1, 2):
            nodes.start(rank)
        wait_until(lambda: "a spare" in nodes.log(), nodes.log)
        nodes.wait_for("works_0_*", 2)
        at_work = {_parent_of(path.read_text()) for path in job.out.glob("works_0_*")}
        drained = next(one for one in nodes.launchers[1:] if one.pid in at_work)
        drained.send_signal(signal.SIGUSR1)
        assert drained.wait(60.0) == 0, nodes.log()
        nodes.wait_for("works_1_*", 2)
        step = int((job.out / "checkpoint").read_text())
        assert set(saved(job.out)) == {step}
        met = wait_until(lambda: list((job.out / "cycle_1").iterdir()), nodes.log)
        assert min(int(path.name.partition("_")[0]) for path in met) == step + 1
        for launcher in nodes.launchers:
            if launcher is not drained:
                launcher.send_signal(signal.SIGUSR1)
        assert nodes.codes() == [0, 0, 0], nodes.log()
        assert len(set(saved(job.out, 1))) == 1


@pytest.mark.slow
def test_a_spare_that_serves_the_store_lets_the_others_save_before_it_goes(
    job: Job, port: int
) -> None:
    """The job ends with its store: the others' ranks save at one step, and all leave with 0."""
    with nodes_of(job, "2:3", port) as nodes:
        # Last by the scheduler's order, so that it is left out of the round after the next.
        nodes.start(9)
        wait_until(lambda: "needed: 2 nodes" in nodes.log(), nodes.log)
        nodes.start(0)
        nodes.wait_for("works_0_*", 2)
        nodes.start(1)
        wait_until(lambda: "a spare" in nodes.log(), nodes.log)
        os.kill(int(next(job.out.glob("works_0_*")).read_text()), signal.SIGKILL)
        nodes.wait_for("works_1_*", 2)
        host = nodes.launchers[0]
        at_work = {_parent_of(path.read_text()) for path in job.out.glob("works_1_*")}
        assert host.pid not in at_work, nodes.log()
        host.send_signal(signal.SIGUSR1)
        assert nodes.codes() == [0, 0, 0], nodes.log()
        steps = saved(job.out, 1)
        assert len(steps) == 2
        assert len(set(steps)) == 1


def _parent_of(pid: str) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])
