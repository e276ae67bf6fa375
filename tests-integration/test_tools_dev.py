# SPDX-License-Identifier: Apache-2.0
"""`tools/dev.py`: which tasks a command stands for, and its command line."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
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


def test_a_hostile_run_covers_the_same(dev: ModuleType) -> None:
    """With --hostile every stage has that option, also beside paths."""
    tasks = dev.tasks_of("test", ["--hostile"])
    assert [task[0] for task in tasks] == ["test", "serial", "scenarios"]
    assert all("--hostile" in task for task in tasks)
    tasks = dev.tasks_of("test", ["--hostile", "/a"])
    assert [(task[0], *task[-2:]) for task in tasks] == [
        ("test", "--hostile", "/a"), ("serial", "--hostile", "/a"),
    ]  # fmt: skip


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
        timeout=150,
        check=False,
    )
    assert result.returncode == 2
    assert "usage: dev.py" in result.stderr


HATCH_STANDS_IN = """\
#!/bin/sh
# What `hatch -q env create` and `hatch run <task> ...` do, without an environment of its own.
[ "$1" = run ] || exit 0
task=$2
shift 2
[ "$task" != test ] || set -- -p xdist.plugin -n 1 "$@"
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
options="-c {root}/pyproject.toml --rootdir . -p no:cacheprovider -p pytest_timeout"
exec {python} -m pytest $options "$@"
"""

TESTS = """
import leftovers, os, pathlib, pytest, results

def first_time(name):
    mark = pathlib.Path(__file__).parent / name
    here = mark.exists()
    mark.touch()
    return not here

def test_good():
    pass

@pytest.mark.serial
def test_serial_race():
    assert not first_time("serial"), "lost the race"
"""

RACE = """
@pytest.mark.parametrize("value", ["a b[$HOME]"])
def test_race(value):
    print("what the test printed")
    assert not first_time("race"), "lost the race"
"""

DEFECTS = """
def test_defect():
    assert False

@pytest.mark.no_second_try
def test_weights():
    assert not first_time("weights"), "the weights differ"

def test_result():
    assert True
    with results.no_second_try():
        assert not first_time("result"), "lines are lost"

@results.no_second_try()
def assert_same(left, right):
    assert left == right

@pytest.mark.parametrize("fails", ["waiting", "comparing"])
def test_waits_and_compares(fails):
    assert fails != "waiting" or not first_time(fails), "it did not happen"
    assert_same(fails == "comparing" and first_time(fails), False)

_guard = leftovers.guard(leftovers.children, grace_s=0.1)

def test_left_behind():
    if first_time("left"):
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1")

def test_crash():
    if first_time("crash"):
        os._exit(7)
"""


@pytest.fixture
def run_tests(
    dev: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, list[str]]]:
    """Give a function that runs `test` on files with the given texts: exit code, lines."""

    def call(*texts: str) -> tuple[int, list[str]]:
        hatch = tmp_path / "hatch"
        hatch.write_text(HATCH_STANDS_IN.format(python=sys.executable, root=ROOT))
        hatch.chmod(0o700)
        packages = tmp_path / "packages"
        packages.mkdir()
        (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
        for number, text in enumerate(texts):
            (packages / f"test_{number}.py").write_text(text)
        monkeypatch.setattr(dev, "HATCH", hatch)
        monkeypatch.setattr(dev, "HATCH_FOLDER", tmp_path)
        monkeypatch.setattr(dev, "ROOT", tmp_path)
        code = dev.run(dev.tasks_of("test", [])[:2], second_try=True)
        return code, capfd.readouterr().out.splitlines()

    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    return call


@pytest.mark.timeout(300)
def test_a_lost_race_does_not_make_the_run_red(
    run_tests: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    """What fails once and passes alone is listed last, with its first failure in a file."""
    code, lines = run_tests(TESTS + RACE)
    assert code == 0, lines
    assert lines[-1] == "3 passed, 0 failed, 0 skipped"
    listed = lines[-3:-1]
    assert [line.split(" (first:")[0] for line in listed] == [
        "passed alone, second try: packages/test_0.py::test_race[a b[$HOME]]",
        "passed alone, second try: packages/test_0.py::test_serial_race",
    ]
    kept = Path(listed[0].split("(first: ")[1].rstrip(")")).read_text()
    assert "lost the race" in kept
    assert "what the test printed" in kept


@pytest.mark.timeout(300)
def test_what_fails_twice_or_may_not_be_tried_again_is_red(
    run_tests: Callable[..., tuple[int, list[str]]],
) -> None:
    """A defect, a wrong result, a process left behind, a dead worker: each is named, and red.

    A test that compares a result is tried again if it failed before that.
    """
    code, lines = run_tests(TESTS + DEFECTS)
    assert code == 1
    found = {line.split(" (")[0] for line in lines if line.startswith(("failed, ", "passed alone"))}
    assert found == {
        "failed, twice: packages/test_0.py::test_defect",
        "failed, no second try: packages/test_0.py::test_weights",
        "failed, no second try: packages/test_0.py::test_result",
        "failed, no second try: packages/test_0.py::test_waits_and_compares[comparing]",
        "passed alone, second try: packages/test_0.py::test_waits_and_compares[waiting]",
        "failed, no second try: packages/test_0.py::test_left_behind",
        "failed, no second try: packages/test_0.py::test_crash",
        "passed alone, second try: packages/test_0.py::test_serial_race",
    }
    assert lines[-1] == "3 passed, 6 failed, 0 skipped"


@pytest.mark.timeout(300)
def test_a_file_that_cannot_be_imported_is_red(
    run_tests: Callable[..., tuple[int, list[str]]],
) -> None:
    """An error of collection is not tried again, and the rest of its stage was run."""
    code, lines = run_tests(TESTS, "import no_such_module_anywhere")
    assert code != 0
    assert any(line.startswith("failed, no second try: packages/test_1.py") for line in lines)
    assert not lines[-1].startswith("0 passed")


@pytest.mark.parametrize(
    ("passed_alone", "word"), [(True, "passed alone, second"), (False, "failed, ")]
)
def test_the_stage_alone_reaches_the_closing_list(
    dev: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    passed_alone: bool,
    word: str,
) -> None:
    """Its second tries, made in its own environment, are listed last, with the first failures."""
    test = "alone: packages/nvrx-a/tests/test_a.py::test_race"

    def hatch_run(task: tuple[str, ...], _env: dict[str, str]) -> int:
        (target,) = (Path(arg.partition("=")[2]) for arg in task if arg.startswith("--outcomes="))
        failure = {"id": test, "again": True, "passed_alone": passed_alone, "text": "lost the race"}
        target.write_text(json.dumps({"passed": 3, "skipped": 0, "failed": [failure]}))
        return 0 if passed_alone else dev.TESTS_FAILED

    monkeypatch.setattr(dev, "hatch_run", hatch_run)
    stages = dev.TestStages(tmp_path / "failures", {})
    assert stages.run(("alone",)) == (0 if passed_alone else dev.TESTS_FAILED)
    assert stages.close() == passed_alone
    listed, total = capsys.readouterr().out.splitlines()
    assert listed.startswith(word), listed
    assert test in listed
    kept = Path(listed.split("first: " if passed_alone else " (")[-1].rstrip(")"))
    assert kept.read_text() == "lost the race"
    assert total == (
        "4 passed, 0 failed, 0 skipped" if passed_alone else "3 passed, 1 failed, 0 skipped"
    )


def test_what_is_not_covered_is_named(dev: ModuleType) -> None:
    """Jobs of the pipeline that `ci` leaves out are named with their commands."""
    assert any("test --hostile" in line for line in dev.not_covered())
