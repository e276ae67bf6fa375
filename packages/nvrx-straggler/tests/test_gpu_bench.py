# SPDX-License-Identifier: Apache-2.0
"""The benchmark for a GPU runs, and says what is missing where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# What another installation answers.
OF_ANOTHER = {"plain_ms": 2.5, "measured_ms": 3.5, "slowdown_percent": 40.0}
PROGRAM = Path(__file__).resolve().parents[1] / "bench" / "gpu_step.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*arguments):
    # Several threads of torch wait for each other by spinning: minutes on a busy machine.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, PROGRAM, *arguments],
        capture_output=True, text=True, timeout=280, check=False, env=env,
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_what_is_missing_is_said():
    """Without a GPU nothing is measured, the reason is on stderr, and the status is 2."""
    result = run()
    assert (result.returncode, result.stdout) == (2, "")
    assert "nothing was measured: torch" in result.stderr


def test_every_way_runs_without_a_gpu(tmp_path):
    """On the CPU all ways take their turns, and each gives a line with its slowdown."""
    other = tmp_path / "python"
    other.write_text(f"#!/bin/sh\necho '{json.dumps(OF_ANOTHER)}'\n")
    other.chmod(0o700)
    result = run("--device", "cpu", "--steps", "1", "--blocks", "1", "--rounds", "1",
                 "--other", str(other))  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["way"] for line in lines] == [
        "nothing", "detector", "torch.profiler", "detector of --other",
    ]  # fmt: skip
    assert all(line["plain_ms"] > 0 and line["measured_ms"] > 0 for line in lines)
    assert lines[1]["kernels"] == 0
    assert OF_ANOTHER.items() <= lines[3].items()
