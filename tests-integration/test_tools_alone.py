# SPDX-License-Identifier: Apache-2.0
"""`tools/check_alone.py` with two small wheels: what a package's tests may and may not see."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "check_alone.py"
NAMESPACE = "nvidia_resiliency_ext"


def make_wheel(folder: Path, name: str, files: dict[str, str], *requires: str) -> None:
    """Write a wheel by hand."""
    stem = f"{name.replace('-', '_')}-1.0"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    meta += "".join(f"Requires-Dist: {item}\n" for item in requires)
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members = {f"{NAMESPACE}/{path}": text for path, text in files.items()}
    members |= {f"{stem}.dist-info/METADATA": meta, f"{stem}.dist-info/WHEEL": wheel}
    record = "".join(f"{path},,\n" for path in members) + f"{stem}.dist-info/RECORD,,\n"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in {**members, f"{stem}.dist-info/RECORD": record}.items():
            archive.writestr(path, text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Write a repository with wheels of nvrx-common, nvrx-a (needs it) and nvrx-b."""
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest]\ntimeout = '30'\nmarkers = ['serial: s', 'slow: l']\n"
        "filterwarnings = ['error']\n"
    )
    wheels = tmp_path / "dist"
    make_wheel(wheels, "nvrx-common", {"__init__.py": "", "shared.py": ""})
    make_wheel(wheels, "nvrx-a", {"a.py": ""}, "nvrx-common>=0.7", "nvrx-b; extra == 'b'")
    make_wheel(wheels, "nvrx-b", {"b.py": ""}, "nvrx-common")
    helpers = tmp_path / "packages" / "nvrx-a" / "tests" / "helpers"
    helpers.mkdir(parents=True)
    (helpers / "a_workers.py").write_text("")
    (tmp_path / "tests-support").symlink_to(TOOL.parents[1] / "tests-support")
    return tmp_path


def run(tree: Path, test: str, what: str = "nvrx-a") -> tuple[int, str]:
    """Give nvrx-a this test module, run the tool and return its exit code and output.

    The outcomes are in `outcomes.json` of the tree.
    """
    (tree / "packages" / "nvrx-a" / "tests" / "test_a.py").write_text(test)
    options = ["--root", str(tree), "--outcomes", str(tree / "outcomes.json")]
    result = subprocess.run(
        [sys.executable, str(TOOL), str(tree / "dist"), what, *options],
        env=os.environ | {"NVRX_TEST_WORKERS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


def test_package_sees_what_it_declares_and_nothing_else(tree: Path) -> None:
    """Own module, required sibling, helpers and third parties import; another sibling does not."""
    code, said = run(
        tree,
        "import importlib.util, pytest, a_workers\n"
        f"import {NAMESPACE}.a, {NAMESPACE}.shared\n"
        f"def test_sees(): assert importlib.util.find_spec('{NAMESPACE}.b') is None\n"
        "def test_path():\n"
        f"    import {NAMESPACE} as package\n"
        "    assert 'nvrx-alone-' in package.__path__[0]\n"
        "@pytest.mark.slow\ndef test_slow(): assert False\n"
        "@pytest.mark.serial\ndef test_serial(): assert False\n",
    )
    assert code == 0, said
    assert "alone: nvrx-a: ok" in said


def test_failures_are_named(tree: Path) -> None:
    """A failing test, a warning and an undeclared sibling all fail."""
    code, said = run(
        tree,
        "import warnings\n"
        "def test_fails(): assert False\n"
        "def test_warns(): warnings.warn('old')\n"
        f"def test_b(): import {NAMESPACE}.b\n",
    )
    assert code == 1
    assert "alone: nvrx-a: tests failed" in said
    failed = {line.rpartition("::")[2] for line in said.splitlines() if line.startswith("FAILED ")}
    assert {name.split()[0] for name in failed} == {"test_fails", "test_warns", "test_b"}, said


def test_a_race_is_no_failure_and_its_first_failure_is_kept(tree: Path) -> None:
    """What fails once and passes alone is told with its output, for the list of `tools/dev.py`."""
    first = "import pathlib\nmark = pathlib.Path(__file__).with_name('ran')\n"
    race = "def test_race():\n    ran = mark.exists()\n    mark.touch()\n    assert ran, 'lost'\n"
    code, said = run(tree, first + race + "def test_good(): pass\n")
    assert code == 0, said
    assert "slowest 10 durations" in said
    outcomes = json.loads((tree / "outcomes.json").read_text())
    (failure,) = outcomes["failed"]
    assert failure["id"] == "alone: packages/nvrx-a/tests/test_a.py::test_race"
    assert failure["passed_alone"]
    assert "lost" in failure["text"]
    assert outcomes["passed"] == 1
    code, said = run(tree, first + race + "def test_bad(): assert not mark.exists()\n")
    assert code == 1
    ended = json.loads((tree / "outcomes.json").read_text())["failed"]
    assert [failure["passed_alone"] for failure in ended] == [False], said


def test_a_package_without_tests_fails(tree: Path) -> None:
    """A package of whose tests none runs alone is named."""
    code, said = run(tree, "")
    assert code == 1
    assert "alone: nvrx-a: has no test that runs alone" in said


def test_all_together_is_a_task_of_its_own(tree: Path) -> None:
    """The pipeline tests packages one by one, and what only shows with all of them once."""
    make_wheel(tree / "dist", "nvrx-b", {"a.py": ""}, "nvrx-common")
    code, said = run(tree, "def test_a(): assert False\n", "together")
    assert code == 1
    assert f"together: {NAMESPACE}/a.py is in nvrx_a-1.0" in said
    assert "alone:" not in said


def test_two_versions_of_one_wheel_are_refused(tree: Path) -> None:
    """A wheel left over from an earlier version is an error, not a silent choice."""
    wheel = tree / "dist" / "nvrx_a-1.0-py3-none-any.whl"
    wheel.with_name("nvrx_a-2.0-py3-none-any.whl").write_bytes(wheel.read_bytes())
    code, said = run(tree, "def test_a(): pass\n")
    assert code == 1
    assert "two wheels of nvrx-a" in said
