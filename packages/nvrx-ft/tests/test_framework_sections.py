# SPDX-License-Identifier: Apache-2.0
"""A training framework's own integration works unchanged under the launcher."""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).with_name("programs")
SOURCE_VARIABLE = "NVRX_TEST_MEGATRON_FT_INTEGRATION"
# Read here, because tests run without the variables of this project.
NAMED_SOURCE = os.environ.get(SOURCE_VARIABLE)


def framework_source():
    """Megatron-LM's module: a file named by the environment, or the installed one."""
    path = NAMED_SOURCE
    if not path:
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec("megatron.training.ft_integration")
            path = spec and spec.origin
    if not path:
        pytest.skip(f"Megatron-LM is not installed and {SOURCE_VARIABLE} names no source file")
    return path


@pytest.mark.timeout(180)
@pytest.mark.parametrize("integration", ["our program, same calls", "Megatron-LM's own"])
def test_sections_of_a_framework(tmp_path, clean_environment, integration):
    """A hang is found by the calculated timeouts; they outlive the restart and become complete."""
    source = PROGRAMS / "section_integration.py" if "our" in integration else framework_source()
    flags = [
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--ft-prewarm=off",
        "--ft-param-rank_section_timeouts=setup:600,step:600,checkpointing:600",
        "--ft-param-rank_out_of_section_timeout=600",
        # The limits become 100 times what was measured: seconds, not the 600 given.
        "--ft-safety-factor=100",
    ]
    launcher = [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
    result = subprocess.run(
        [*launcher, *flags, str(PROGRAMS / "section_training.py"), str(source), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    said = {(report["cycle"], report["what"], report["rank"]): report for report in reports}
    assert said.keys() == {
        (cycle, what, rank)
        for cycle, what in ((0, "set up"), (1, "set up"), (1, "done"))
        for rank in (0, 1)
    }
    for report in reports:
        del report["rank"]
    assert said[0, "set up", 0]["calculated_sections"] == []
    # What was calculated before the hang is there again in the next cycle, on both ranks.
    loaded = said[1, "set up", 0]
    assert loaded["calculated_sections"] == ["checkpointing", "step"]
    assert loaded["section"]["setup"] == 600
    assert loaded["section"]["step"] < 600
    # At the end everything is calculated, the same on both ranks, and stored.
    final = said[1, "done", 0]
    assert final["calculated_sections"] == ["checkpointing", "setup", "step"]
    assert final["is_out_of_section_calculated"]
    for what in ("set up", "done"):
        assert said[1, what, 0] == said[1, what, 1]
    stored = json.loads((tmp_path / "ft_state.json").read_text())["current_timeouts"]["section"]
    assert stored.items() <= final.items()
    # The launcher says which rule ended the hung rank.
    assert re.search(r"section.*step", result.stderr)
