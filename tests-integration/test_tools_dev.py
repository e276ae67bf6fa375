# SPDX-License-Identifier: Apache-2.0
"""`tools/dev.py`: which tasks a command stands for, and its command line."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "dev.py"


@pytest.fixture(scope="module")
def dev() -> ModuleType:
    """Load the program as a module, which runs nothing."""
    spec = importlib.util.spec_from_file_location("nvrx_tools_dev", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_test_runs_parallel_then_serial_then_scenarios(dev: ModuleType) -> None:
    """`test` covers every package in parallel, then serial tests, then bounded scenarios."""
    tasks = dev.tasks_of("test", [])
    assert [task[0] for task in tasks] == ["test", "serial", "scenarios"]
    assert tasks[0][1:3] == ("-m", "not serial")
    assert tasks[1][1:3] == ("-m", "serial")
    assert tasks[2][1:3] == ("-m", "not gpu and not slurm and not slow")


def test_test_of_one_package_runs_no_scenarios(dev: ModuleType) -> None:
    """A path limits both test runs to it."""
    tasks = dev.tasks_of("test", ["/somewhere/packages/nvrx-ft"])
    assert [task[0] for task in tasks] == ["test", "serial"]
    assert all(task[-1] == "/somewhere/packages/nvrx-ft" for task in tasks)


def test_pipeline_ends_with_the_tests(dev: ModuleType) -> None:
    """`ci` is check, docs, alone and test, in this order, so the tests' summary comes last."""
    names = [task[0] for task in dev.tasks_of("ci", [])]
    expected = [
        task[0] for part in ("check", "docs", "alone", "test") for task in dev.tasks_of(part, [])
    ]
    assert names == expected
    assert names[-3:] == ["test", "serial", "scenarios"]


def test_every_command_has_tasks_that_hatch_knows(dev: ModuleType) -> None:
    """Each task that a command names is a script in hatch.toml."""
    text = (ROOT / "hatch.toml").read_text()
    for command in dev.COMMANDS:
        for task in dev.tasks_of(command, []):
            script = task[0].rpartition(":")[2]
            assert any(line.startswith(f"{script} ") for line in text.splitlines()), task


@pytest.mark.parametrize("args", [[], ["nonsense"]])
def test_wrong_command_shows_usage(args: list[str], tmp_path: Path) -> None:
    """Without a known command nothing is installed and the exit code is 2, from any folder."""
    result = subprocess.run(
        [sys.executable, str(TOOL), *args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 2
    assert "usage: dev.py" in result.stderr
