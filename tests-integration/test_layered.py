# SPDX-License-Identifier: Apache-2.0
"""Restarts on two layers: ranks that restart in their processes, with ft_launcher around them.

Every scenario trains for real, and ends with the weights of an undisturbed training.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from many_nodes import read_record
from results import no_second_try

if TYPE_CHECKING:
    from collections.abc import Callable

    from fault_jobs import Job
    from many_nodes import NodesJob

RANK = Path(__file__).resolve().parent / "programs" / "layered_rank.py"
NESTED = re.compile(r"\[NestedRestarter\] (name=\[In.*)")
BEATS = ("--ft-rank-heartbeat-timeout", "20", "--ft-initial-rank-heartbeat-timeout", "60")


class Layered:
    """A job on one host whose ranks are restarted on both layers."""

    def __init__(self, job: Job, store_port: int) -> None:
        """Take a job that has not started, and a port for the wrapper's store."""
        self.job = job
        self.environment = {"WRAPPER_STORE_PORT": str(store_port)}
        self.shared = job.folder / "shared"
        self.shared.mkdir()

    def run(self, *arguments: str, limit_s: float = 90.0, **more: Any) -> int:
        """Run the job and return the launcher's exit code."""
        more["environment"] = self.environment
        self.job.start(str(self.shared), *arguments, program=RANK, **more)
        return self.job.wait(limit_s)

    def entries(self, what: str, cycle: int | None = None) -> list[dict[str, Any]]:
        """Return what ranks have recorded of a kind."""
        found = read_record(self.shared)
        return [e for e in found if e["what"] == what and cycle in (None, e["cycle"])]

    def iterations(self, cycle: int) -> dict[int, list[int]]:
        """Return the iterations that each rank has entered in a cycle."""
        found: dict[int, list[int]] = {}
        for entry in self.entries("enter", cycle):
            found.setdefault(entry["rank"], []).append(entry["iteration"])
        return found

    def cycles(self) -> list[int]:
        """Return the cycles that the launcher has started."""
        return [event["cycle"] for event in self.job.events("cycle_start")]

    def lines(self) -> list[str]:
        """Return what both layers have said for tools, in order."""
        return NESTED.findall(self.job.log())

    def assert_weights(self) -> None:
        """Check that the weights are those of the training in peace."""
        assert_weights(self.shared, self.job.log()[-6000:])


@no_second_try()
def assert_weights(shared: Path, log: str) -> None:
    """Check that the weights are those of the training in peace."""
    paths = (shared / "peace" / "result.json", shared / "result.json")
    assert all(path.exists() for path in paths), log
    in_peace, disturbed = (json.loads(path.read_text()) for path in paths)
    assert disturbed == in_peace, log


@pytest.fixture
def layered(job: Job, port: int) -> Layered:
    """Give a job on one host that has not started."""
    return Layered(job, port)


@pytest.mark.timeout(120)
@pytest.mark.no_second_try
def test_in_process_first_then_by_the_launcher(layered: Layered) -> None:
    """An exception restarts the function in its processes, a death the processes.

    Lines, record of events and report tell both layers; heartbeats go on through a restart.
    """
    deeds = ("0:0:1:7:fail", "0:1:1:12:die")
    code = layered.run("--peace", "--client", "--steps", "30", *deeds, flags=BEATS)
    assert code == 0, layered.job.log()
    assert layered.cycles() == [0, 1]
    assert first_two(layered.iterations(0)) == {0: [0, 1], 1: [0, 1]}
    assert layered.iterations(1) == {0: [0], 1: [0]}
    assert len({entry["pid"] for entry in layered.entries("enter", 0)}) == 2
    layered.assert_weights()
    in_process = [line for line in layered.lines() if "[InProcess]" in line]
    in_cycle_0 = [
        f"name=[InProcess] state={state}"
        for state in (
            "initialize",  # in peace
            "finalized",
            "initialize",
            "handling stage=starting",
            "handling stage=completed",
        )
    ]
    in_cycle_1 = [f"name=[InProcess] state={state}" for state in ("initialize", "finalized")]
    assert in_process[:5] == in_cycle_0, in_process
    assert in_process[-2:] == in_cycle_1, in_process
    # Of the survivor, which may be at work on the death when the launcher ends it.
    assert all("handling" in line for line in in_process[5:-2]), in_process
    in_job = [line for line in layered.lines() if "[InJob]" in line]
    assert in_job[:3] == [
        f"name=[InJob] state={state}"
        for state in ("initialize", "handling stage=starting", "handling stage=completed")
    ]
    restarts = layered.job.events("inproc_restart")
    assert [(each["cycle"], each["iteration"]) for each in restarts][:1] == [(0, 0)]
    assert "EXCEPTION" in restarts[0]["cause"]
    assert [fault["cause"] for fault in layered.job.events("fault")] == ["killed"]
    report = report_of(layered.job.record)
    assert f"1 in-job, {len(restarts)} in-process" in report, report


@pytest.mark.netns
@pytest.mark.timeout(120)
@pytest.mark.no_second_try
def test_min_healthy_leaves_it_to_the_reserve_of_another_host(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """The active rank is killed: the reserve on the other host goes on, no launcher restarts."""
    job = nodes_job(2)
    deed = "0:0:0:12:die"
    start(job, "--peace", "--active", "1", "--steps", "30", deed, nproc=1, nnodes="1:2")
    assert job.wait(90) == {"node1": 0, "node2": 0}, job.tails()
    assert job.cycles() == [0], job.tails()
    assert entered(job, 0) == {0: [0], 1: [1]}
    assert_weights(job.shared, job.tails())
    assert [fault["what"] for fault in job.events("fault")] == [
        "rank 0 on host node1 died by SIGKILL"
    ]
    restarts = job.events("inproc_restart")
    assert [(each["ranks"], each["kept_ranks"]) for each in restarts] == [([0], [1])]
    assert "0 in-job, 1 in-process" in report_of(job.events_folder)


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(200)
@pytest.mark.no_second_try
def test_min_healthy_restarts_all_when_too_few_are_left(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """Rank by rank dies until RetryController gives up: then the launchers start all anew."""
    job = nodes_job(2)
    deeds = ("0:0:1:12:die", "0:1:2:17:die")
    options = ("--peace", "--active", "3", "--min", "3", "--steps", "30")
    start(job, *options, *deeds, nproc=2, nnodes="1:2")
    assert job.wait(150) == {"node1": 0, "node2": 0}, job.tails()
    assert job.cycles() == [0, 1]
    assert entered(job, 0) == {0: [0, 1], 1: [0], 2: [0, 1], 3: [1]}
    assert entered(job, 1) == {0: [0], 1: [0], 2: [0]}
    assert_weights(job.shared, job.tails())


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(300)
@pytest.mark.no_second_try
def test_cycles_share_the_launchers_store_and_no_key(nodes_job: Callable[..., NodesJob]) -> None:
    """Three restarts by the launcher: each cycle has keys of its own, as many as the last one."""
    job = nodes_job(1)
    deeds = [f"{cycle}:{iteration}:1:{9 + 5 * cycle + iteration}:{what}" for cycle in range(3)
             for iteration, what in enumerate(("fail", "die"))]  # fmt: skip
    start(job, "--peace", "--steps", "40", *deeds, nproc=2, nnodes="1:2", last_call_s=1)
    assert job.wait(250) == {"node1": 0}, job.tails()
    assert job.cycles() == [0, 1, 2, 3]
    for cycle in range(3):
        assert first_two(entered(job, cycle)) == {0: [0, 1], 1: [0, 1]}, job.tails()
    assert entered(job, 3) == {0: [0], 1: [0]}
    assert_weights(job.shared, job.tails())
    firsts = [
        next(set(e["keys"]) for e in job.entries("enter", cycle) if e["iteration"] == 0)
        for cycle in range(4)
    ]
    grown = [len(late - early) for early, late in itertools.pairwise(firsts)]
    assert max(grown) < 60, grown
    for cycle, keys in enumerate(firsts):
        ours = [key for key in keys if f"/{job.id}/0.{cycle}/" in key]
        # What a fresh call has put there; nothing was there before it.
        assert 0 < len(ours) < 20, ours


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.no_second_try
def test_any_failed_restarts_all_though_there_is_a_reserve(layered: Layered) -> None:
    """Without min-healthy a death is the launcher's: it starts all anew, once."""
    options = ("--peace", "--active", "2", "--steps", "40", "--step-ms", "50")
    code = layered.run(*options, "0:0:1:12:die", nproc=3, limit_s=150)
    assert code == 0, layered.job.log()
    assert layered.cycles() == [0, 1]
    assert layered.iterations(1) == {0: [0], 1: [0]}
    layered.assert_weights()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.no_second_try
def test_the_monitor_with_the_shorter_timeout_ends_a_hung_rank(layered: Layered) -> None:
    """A hang is first ended in process; a stopped rank is killed by the wrapper's monitor.

    The launcher's monitor takes no restart for a hang, and finds a dead rank, not a hung one.
    """
    deeds = ("0:0:1:7:sleep", "0:1:0:12:stop")
    options = ("--peace", "--client", "--steps", "30", "--soft", "4")
    assert layered.run(*options, *deeds, flags=BEATS, limit_s=150) == 0, layered.job.log()
    assert layered.cycles() == [0, 1]
    assert first_two(layered.iterations(0)) == {0: [0, 1], 1: [0, 1]}
    layered.assert_weights()
    (restart, *others) = layered.job.events("inproc_restart")
    assert "SOFT_TIMEOUT" in restart["cause"]
    assert not any("TIMEOUT" in other["cause"] for other in others), others
    (fault,) = layered.job.events("fault")
    assert (fault["cause"], fault["detected_by"], fault["rank"]) == ("killed", "launcher", 0)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.no_second_try
def test_the_launchers_monitor_ends_a_hung_rank_when_its_timeout_is_shorter(
    layered: Layered,
) -> None:
    """The wrong way round: the launcher's monitor kills what the wrapper would have saved."""
    flags = ("--ft-rank-heartbeat-timeout", "2", "--ft-initial-rank-heartbeat-timeout", "60")
    options = ("--peace", "--client", "--steps", "30", "--soft", "30")
    code = layered.run(*options, "0:0:1:7:sleep", flags=flags, limit_s=150)
    assert code == 0, layered.job.log()
    assert layered.cycles() == [0, 1]
    layered.assert_weights()
    assert {fault["cause"] for fault in layered.job.events("fault")} == {"hang_heartbeat"}


def start(job: NodesJob, *arguments: str, last_call_s: int = 30, **more: Any) -> None:
    """Start launchers that leave a rank's death to the ranks; all hosts are waited for."""
    last_call = f"last_call_timeout={last_call_s}"
    flags = ("--ft-restart-policy", "min-healthy", "--rdzv-conf", last_call)
    job.start(*arguments, program=RANK, flags=["--ft-prewarm", "off", *flags], **more)


def entered(job: NodesJob, cycle: int) -> dict[int, list[int]]:
    """Return the iterations that each rank has entered in a cycle."""
    found: dict[int, list[int]] = {}
    for entry in job.entries("enter", cycle):
        found.setdefault(entry["rank"], []).append(entry["iteration"])
    return found


def first_two(found: dict[int, list[int]]) -> dict[int, list[int]]:
    """Return the first two iterations of each rank.

    A survivor may have begun a third one: it restarts by itself until the launcher ends it.
    """
    return {rank: iterations[:2] for rank, iterations in found.items()}


def report_of(folder: Path, *more: str) -> str:
    """Return what nvrx-report says of a record."""
    module = "nvidia_resiliency_ext.shared_utils.report"
    command = [sys.executable, "-m", module, str(folder), *more]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
