# SPDX-License-Identifier: Apache-2.0
"""`tools/check_docstrings.py`: which parameters it misses on a small tree, and on this one."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "check_docstrings.py"

MODULE = '''
from dataclasses import dataclass
from ._inside import Base
__all__ = ["Thing", "Value", "silent", "told"]
def told(first: int, *rest: int, limit_s: float = 1.0, _hidden: int = 0) -> None:
    """Do it with `first`.

    Args:
        rest, limit_s: The others.
    """
def silent(amount: int) -> None:
    """Do it with `another` amount, or ``none``, or `all`."""
class Thing(Base):
    """A thing of a `size`."""
    def __init__(self, size: int) -> None: ...
    def grow(self, factor: float) -> None:
        """Grow.

        Args:
            factor: How much.
        """
@dataclass
class Value:
    """A value.

    Attributes:
        kept: One field.
    """
    kept: int
    forgotten: int
'''
INSIDE = '''
class Base:
    def shrink(self, divisor: float) -> None:
        """Shrink."""
'''


def run(*args: str) -> tuple[int, str]:
    """Run the tool and return its exit code and output."""
    result = subprocess.run(
        [sys.executable, str(TOOL), *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write a distribution whose docstrings lack three parameters; return the tree's root."""
    folder = tmp_path / "packages" / "nvrx-a" / "src" / "nvidia_resiliency_ext" / "things"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(MODULE)
    (folder / "_inside.py").write_text(INSIDE)
    return tmp_path


def test_each_parameter_without_a_name_in_the_docstring_is_reported(root: Path) -> None:
    """Functions, inherited methods and fields are checked; entries and backticks count."""
    code, said = run("--root", str(root))
    assert code == 1
    reported = sorted(line.split(": ", 1)[1] for line in said.splitlines())
    assert reported == [
        "Base.shrink does not name divisor",
        "Value does not name forgotten",
        "silent does not name amount",
    ]


def test_every_public_docstring_names_all_parameters() -> None:
    """A user finds each parameter of each public callable in the reference."""
    code, said = run()
    assert code == 0, said


@pytest.mark.slow
def test_examples_in_docstrings_run() -> None:
    """Every example in a docstring does what it shows."""
    code, said = run("--examples")
    assert code == 0, said
