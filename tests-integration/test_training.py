# SPDX-License-Identifier: Apache-2.0
"""Scenarios with real training: the result after faults is that of an undisturbed run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_jobs import wait_until
from results import no_second_try

if TYPE_CHECKING:
    from types import ModuleType

    from fault_jobs import Job

EXAMPLES = Path(__file__).resolve().parents[1] / "packages" / "nvrx-ft" / "examples"
TRAIN = EXAMPLES / "demo" / "train.py"
STEPS = 160
SECTIONS = ("--ft-rank-section-timeouts", "setup:60,step:4,checkpoint:30")


def train(job: Job, name: str, *extra: str) -> Path:
    """Start the demo's training of three ranks and return its folder."""
    folder = job.folder / name
    folder.mkdir()
    job.start(
        *("--output", str(folder), "--steps", str(STEPS), *extra),
        program=TRAIN,
        nproc=3,
        prewarm="auto",
        flags=SECTIONS,
    )
    return folder


@pytest.mark.slow  # The demo below does both, too.
@pytest.mark.timeout(180)
@pytest.mark.no_second_try
def test_weights_after_a_kill_and_a_hang(job: Job) -> None:
    """After a SIGKILL and a SIGSTOP the weights are those of an undisturbed run, bit for bit."""
    peaceful = train(job, "peaceful")
    assert job.wait(90) == 0, job.log()
    assert sum(event["steps"] for event in job.events("progress")) == STEPS
    pipe = job.folder / "progress"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    disturbed = train(job, "disturbed", "--progress", str(pipe), "--device-ms", "10")
    plan = [(1, 45, signal.SIGKILL), (2, 95, signal.SIGSTOP)]
    with os.fdopen(descriptor, "rb", buffering=0) as lines:
        rest = b""

        def disturb() -> bool:
            nonlocal rest
            *whole, rest = (rest + (lines.read(65536) or b"")).split(b"\n")
            for line in whole:
                cycle, rank, step, pid = (int(word) for word in line.split())
                if plan and cycle == 2 - len(plan) and rank == plan[0][0] and step >= plan[0][1]:
                    os.kill(pid, plan.pop(0)[2])
            assert job.process is not None
            return job.process.poll() is not None

        wait_until(disturb, job.log, 120)
    assert job.wait() == 0, job.log()
    assert not plan
    results = [json.loads((f / "result.json").read_text()) for f in (peaceful, disturbed)]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["step"] == results[1]["step"] == STEPS
    assert max(event["cycle"] for event in job.events("cycle_start")) == 2
    # Steps before a fault count too, also those that a later cycle did again.
    assert sum(event["steps"] for event in job.events("progress")) >= 2 * STEPS


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("minimal", marks=pytest.mark.slow),
        pytest.param("heartbeats", marks=pytest.mark.slow),
        pytest.param("sections", marks=pytest.mark.slow),
    ],
)
def test_an_example_recovers_from_a_kill(job: Job, name: str) -> None:
    """Each example goes on from its checkpoint after a rank was killed."""
    place = "--output" if name == "sections" else "--checkpoint"
    target = job.folder / ("sections" if name == "sections" else "checkpoint.pt")
    flags = {
        "minimal": (),
        "heartbeats": (
            *("--ft-initial-rank-heartbeat-timeout", "60", "--ft-rank-heartbeat-timeout", "30"),
            *("--ft-safety-factor", "200"),
        ),
        "sections": ("--ft-cfg-path", str(EXAMPLES / "sections.yaml")),
    }[name]
    job.start(
        *(place, str(target), "--steps", "600"),
        program=EXAMPLES / f"{name}.py",
        prewarm="auto",
        flags=flags,
    )
    wait_until(lambda: "step 150:" in job.log(), job.log, 60)
    found = re.search(r"rank 1 \(pid (\d+)\) starts at step 0", job.log())
    assert found, job.log()
    os.kill(int(found[1]), signal.SIGKILL)
    assert job.wait() == 0, job.log()
    starts = [int(step) for step in re.findall(r"starts at step (\d+)", job.log())]
    assert len(starts) == 4, job.log()
    assert min(starts[2:]) >= 150
    assert "step 600:" in job.log()


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Give the demo with fewer ranks and steps, and a limit of a step for a loaded machine."""
    monkeypatch.syspath_prepend(EXAMPLES / "demo")
    demo = importlib.import_module("run_demo")
    killed, stopped = demo.DISTURBANCES
    sooner = (
        dataclasses.replace(killed, rank=1, from_step=30, to_step=50),
        dataclasses.replace(stopped, rank=0, from_step=70, to_step=90),
    )
    smaller = {"RANKS": 2, "STEPS": 120, "READY": b"all 2 standbys are ready", "STEP_TIMEOUT_S": 4}
    for name, value in {**smaller, "DISTURBANCES": sooner}.items():
        assert hasattr(demo, name)
        monkeypatch.setattr(demo, name, value)
    return demo


@pytest.mark.timeout(480)
def test_the_demo(
    small_demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The demo shows both recoveries, finds equal weights and writes its page."""
    monkeypatch.setattr(sys, "argv", ["run_demo.py", "--output", str(tmp_path)])
    code = small_demo.main()
    shown = capfd.readouterr()
    with no_second_try():
        assert "the weights differ" not in shown.out + shown.err
    assert code == 0, shown.out + shown.err
    assert "the same, bit for bit" in shown.out, shown.out
    # A restart is as fast as it can be only when the standbys were ready before the fault.
    # Only the two first may be cold; they are warm where the launcher is slower than the imports.
    started = re.search(r"workers started: (\d+) warm, (\d+) cold", shown.out)
    assert started is not None, shown.out
    assert int(started[1]) >= 4, shown.out
    assert int(started[2]) <= 2, shown.out
    assert (tmp_path / "disturbed" / "report.html").stat().st_size > 1000
