# SPDX-License-Identifier: Apache-2.0
"""Rules of `nvidia_resiliency_ext.attribution`, the package that two distributions share.

Each test imports from a copy of nvrx-common's two files, in an interpreter that sees no installed
package, so the result does not depend on which distributions this environment has.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nvidia_resiliency_ext

ROOT_PACKAGE = Path(nvidia_resiliency_ext.__file__).parent


@pytest.fixture
def common(tmp_path: Path) -> Path:
    """Lay out what nvrx-common alone installs for the two shared packages."""
    folder = tmp_path / "common" / "nvidia_resiliency_ext"
    (folder / "attribution").mkdir(parents=True)
    shutil.copy(ROOT_PACKAGE / "__init__.py", folder)
    shutil.copy(ROOT_PACKAGE / "attribution" / "__init__.py", folder / "attribution")
    return folder.parent


def add_distribution(tmp_path: Path, name: str, files: dict[str, str]) -> Path:
    """Lay out another distribution's modules below `nvidia_resiliency_ext/attribution`."""
    root = tmp_path / name
    for path, text in files.items():
        target = root / "nvidia_resiliency_ext" / "attribution" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root


def run(program: str, *folders: Path) -> str:
    """Run the program with these folders alone on the path and return what it printed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    result = subprocess.run(
        [sys.executable, "-S", "-W", "error", "-c", program],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


CATCH = """
import nvidia_resiliency_ext.attribution as attribution
try:
    attribution.{name}
except Exception as error:
    print(type(error).__name__, getattr(error, "name", None), error)
"""


def test_missing_distribution_is_an_attribute_error_that_names_it(common: Path) -> None:
    """Without nvrx-attribution a public name fails with AttributeError saying what to install."""
    said = run(CATCH.format(name="Analyzer"), common)
    assert said.startswith("AttributeError Analyzer")
    assert "pip install nvrx-attribution" in said


def test_private_names_never_import_the_other_distribution(common: Path, tmp_path: Path) -> None:
    """A name with a leading underscore fails at once, without importing `_api`."""
    other = add_distribution(
        tmp_path, "attribution", {"_api.py": "raise RuntimeError('imported')\n"}
    )
    said = run(CATCH.format(name="_private"), common, other)
    assert said.startswith("AttributeError _private")


def test_failure_inside_the_other_distribution_is_not_hidden(common: Path, tmp_path: Path) -> None:
    """When `_api` itself lacks a module, that error comes through and names the module."""
    other = add_distribution(tmp_path, "attribution", {"_api.py": "import not_installed_here\n"})
    said = run(CATCH.format(name="Analyzer"), common, other)
    assert said.startswith("ModuleNotFoundError not_installed_here")


def test_public_names_come_from_the_other_distribution(common: Path, tmp_path: Path) -> None:
    """Names in `_api.__all__` are forwarded, and no other name of that module is."""
    other = add_distribution(
        tmp_path, "attribution", {"_api.py": "__all__ = ['Analyzer']\nAnalyzer = 7\nother = 8\n"}
    )
    program = "from nvidia_resiliency_ext.attribution import Analyzer; print(Analyzer)"
    assert run(program, common, other) == "7\n"
    said = run(CATCH.format(name="other"), common, other)
    assert said.startswith("AttributeError other")


@pytest.mark.parametrize("with_attribution", [False, True])
def test_submodules_of_another_distribution_import(
    common: Path, tmp_path: Path, with_attribution: bool
) -> None:
    """`from ...attribution import straggler` works with and without nvrx-attribution."""
    folders = [
        common,
        add_distribution(tmp_path, "straggler", {"straggler/__init__.py": "answer = 42\n"}),
    ]
    if with_attribution:
        folders.append(add_distribution(tmp_path, "attribution", {"_api.py": "__all__ = []\n"}))
    program = "from nvidia_resiliency_ext.attribution import straggler; print(straggler.answer)"
    assert run(program, *folders) == "42\n"
