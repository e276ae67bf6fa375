# SPDX-License-Identifier: Apache-2.0
"""Scenarios: a node's devices fail, GPU memory comes back late, workers are bound, crash loops.

The GPU driver is a library of our own in place of libnvidia-ml; everything above it is real.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_jobs import wait_until
from numactl_stub import NumactlStub

from nvidia_resiliency_ext.testing_utils.fake_hardware import (
    FakeDriver,
    NoCompilerError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fault_jobs import Job

RESET_GPU_1 = {"field__1__230": 1}


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """Give a GPU driver with two healthy, empty GPUs."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    with tempfile.TemporaryDirectory(prefix="nvrx-it-nvml-") as folder:
        answers: dict[str, object] = {"count": 2}
        for gpu in range(2):
            answers |= {f"field.{gpu}.230": 0, f"memory.{gpu}.total": 80 << 30}
            answers |= {f"memory.{gpu}.used": 0, f"memory.{gpu}.free": 80 << 30}
        try:
            yield FakeDriver(folder, answers)
        except NoCompilerError as error:
            pytest.skip(str(error))


def health_events(job: Job) -> list[tuple[str, str]]:
    """Return name and result of the health checks in the record."""
    return [(event["check"], event["result"]) for event in job.events("health")]


def test_an_excluded_slurm_job_does_not_start(job: Job) -> None:
    """A plain job that the scheduler excludes ends with 1 and one line that names the file."""
    path = job.folder / "segment_health_check.4711.4711"
    path.write_text("node4 drained")
    flags = ["--ft-segment-health-check-dir", str(job.folder)]
    job.start(flags=flags, environment={"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0"})
    assert job.wait() == 1
    assert job.cycles() == []
    (line,) = [line for line in job.log().splitlines() if "this node leaves the job" in line]
    assert f"the scheduler excludes job 4711 by {path}: node4 drained" in line
    assert ("segment", "fail") in health_events(job)


def test_an_unhealthy_node_does_not_start(job: Job, driver: FakeDriver) -> None:
    """A GPU that needs a reset keeps the node out: exit code 1, one line that says why."""
    driver.set(**RESET_GPU_1)
    job.start(environment=driver.environment())
    assert job.wait() == 1
    assert job.cycles() == []
    (line,) = [line for line in job.log().splitlines() if "this node leaves the job" in line]
    assert "health check gpu: GPU 1: the driver asks to reset the GPU" in line
    assert ("gpu", "fail") in health_events(job)


def test_a_gpu_that_fails_is_found_before_the_next_round(job: Job, driver: FakeDriver) -> None:
    """A node whose GPU failed with a rank does not restart: it leaves as unhealthy."""
    # Else the monitor might look at the GPU before the rank is killed.
    never = ["--ft-node-health-check-interval", "3600"]
    job.start("--client", "--last-cycle", "5", flags=never, environment=driver.environment())
    job.wait_for(0, range(2), "stepped")
    driver.set(**RESET_GPU_1)
    os.kill(job.rank_pid(0, 1), signal.SIGKILL)
    assert job.wait() == 1
    assert job.cycles() == [0]
    assert health_events(job) == [("gpu", "pass"), ("gpu", "fail")]
    assert [failure["cause"] for failure in job.failures()] == ["killed", "unhealthy"]


def test_a_rank_whose_gpu_fails_is_ended_while_it_works(job: Job, driver: FakeDriver) -> None:
    """The monitor ends the rank of a GPU that failed, and the record says that it was the GPU."""
    job.start(
        *("--client", "--last-cycle", "5"),
        flags=["--ft-node-health-check-interval", "0.2"],
        environment=driver.environment(),
    )
    job.wait_for(0, range(2), "stepped")
    driver.set(**RESET_GPU_1)
    assert job.wait() == 1
    first = job.failures()[0]
    assert (first["cause"], first["rank"], first["detected_by"]) == ("unhealthy", 1, "monitor")
    assert "GPU 1: the driver asks to reset the GPU" in first["what"]


def test_new_workers_wait_for_gpu_memory(job: Job, driver: FakeDriver) -> None:
    """Workers start when the memory of those before them is free, and not earlier."""
    job.start(
        "--last-cycle",
        "1",
        flags=["--ft-gpu-memory-poll-interval", "0.05"],
        environment=driver.environment(),
    )
    job.wait_for(0, range(2), "stepped")
    driver.set(memory__1__used=40 << 30)
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    wait_until(lambda: "restarting because" in job.log(), job.log)
    # The driver was asked after the workers were gone, and nobody started.
    before = len(driver.calls())
    wait_until(lambda: len(driver.calls()) > before + 20, job.log)
    assert job.cycles() == [0]
    driver.set(memory__1__used=100 << 20)
    assert job.wait() == 0
    assert job.cycles() == [0, 1]
    assert [event["name"] for event in job.events("phase")].count("reclaim") == 1


def test_gpu_memory_is_not_waited_for_without_end(job: Job, driver: FakeDriver) -> None:
    """Memory that stays in use is an ERROR line, and the restart goes on."""
    driver.set(memory__0__used=40 << 30)
    job.start(
        *("--last-cycle", "1", "0:0:die"),
        flags=["--ft-gpu-memory-reclaim-timeout", "0.3", "--ft-gpu-memory-poll-interval", "0.1"],
        environment=driver.environment(),
    )
    assert job.wait() == 0
    assert "GPU memory is still in use after" in job.log()


@pytest.mark.parametrize("prewarm", ["off", "on"])
def test_workers_run_under_numactl(job: Job, prewarm: str) -> None:
    """Every worker is bound to the NUMA node of its GPU, also one that comes from a standby."""
    numactl = NumactlStub(job.folder)
    job.start(
        *("--last-cycle", "0", "--client", "--like-torch"),
        flags=["--ft-prewarm-import", "decimal", "--ft-numa-bind-strict", "0"],
        prewarm=prewarm,
        environment={
            "NVRX_GPUS_PER_NUMA": "1",
            **numactl.environment(),
        },
    )
    assert job.wait() == 0
    words = numactl.calls()
    assert {f"--cpunodebind {rank} --localalloc" for rank in range(2)} <= set(words)
    # The first cycle does not wait for imports: of two standbys one may be ready already.
    (origins,) = re.findall(r"2 workers started \((.*)\)", job.log())
    assert ("cold" in origins) is (prewarm == "off"), origins


def test_a_crash_loop_waits_before_it_starts_again(job: Job) -> None:
    """The first restart of a program that crashes is immediate, the second one waits a second."""
    job.start("0:0:fall", "1:0:fall", "--last-cycle", "2", max_restarts=2)
    assert job.wait() == 0
    starts = [event["m"] for event in job.events("worker_start") if event["rank"] == 0]
    ends = [event["m"] for event in job.events("fault")]
    assert job.log().count("before it starts") == 1
    assert 0.9 < starts[2] - ends[1] < 5


def test_cycles_that_make_steps_are_no_crash_loop(job: Job) -> None:
    """Ranks that tell of steps restart at once, however short their cycles are."""
    job.start("--client", "--last-cycle", "3", max_restarts=3)
    for cycle in range(3):
        job.wait_for(cycle, range(2), "stepped")
        os.kill(job.rank_pid(cycle, 0), signal.SIGKILL)
    assert job.wait() == 0
    assert "without a step" not in job.log()


LONG_PAUSE = """
from nvidia_resiliency_ext.fault_tolerance._health import admission

admission.FIRST_DELAY_S = 600.0
"""


def test_a_signal_ends_a_job_that_waits_to_start(job: Job) -> None:
    """SIGTERM during the pause of a crash loop ends the launcher long before the pause does."""
    (job.folder / "sitecustomize.py").write_text(LONG_PAUSE)
    job.start(
        *("0:0:fall", "1:0:fall"),
        flags=["--ft-restart-backoff", "600"],
        max_restarts=9,
        environment={"PYTHONPATH": str(job.folder)},
    )
    wait_until(lambda: "waits 600 s" in job.log(), job.log)
    os.kill(job.pid, signal.SIGTERM)
    job.wait()
    assert job.cycles() == [0, 1]


def test_the_hook_is_told_of_a_node_that_leaves(job: Job, driver: FakeDriver) -> None:
    """The site's command gets node, reason and evidence before the launcher is gone."""
    driver.set(**RESET_GPU_1)
    report = job.folder / "report.json"
    job.start(
        flags=["--ft-bad-node-hook", f"sh -c 'cat > {report}'"], environment=driver.environment()
    )
    assert job.wait() == 1
    told = json.loads(Path(report).read_text())
    assert (told["reason"], told["evidence"]["check"]) == ("unhealthy", "gpu")
    assert told["node"] == told["reported_by"]


def test_an_injected_failure_ends_the_node_in_its_cycle(job: Job) -> None:
    """NVRX_INJECT_GPU_FAILURE lets a node restart until its cycle comes."""
    job.start(
        *("0:0:die", "--last-cycle", "2", "1:1:die"),
        environment={"NVRX_INJECT_GPU_FAILURE": "2:0"},
    )
    assert job.wait() == 1
    assert job.cycles() == [0, 1]
    assert "failed on purpose" in job.log()
