# SPDX-License-Identifier: Apache-2.0
"""`tools/check_api.py` on a small tree: what it records and which changes it sees."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "check_api.py"

PUBLIC_API = """
from ._inside import Thing as Renamed, helper
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from ._later import Lazy
__all__ = ["LIMIT", "Lazy", "Renamed", "helper"]
LIMIT: int = 3
def __getattr__(name): ...
"""
INSIDE = '''
class Thing(Base, metaclass=Meta):
    """Doc."""
    size_bytes: int = 0
    _private = 1
    def __init__(self, path: str, *, timeout_s: float = 1.5) -> None: ...
    @property
    def name(self) -> str: ...
    def _hidden(self): ...
async def helper(*items: int, **options: object) -> list[str]: ...
'''
EXPECTED = """\
nvidia_resiliency_ext.part
  LIMIT: int = 3
  class Lazy
  class Renamed(Base, metaclass=Meta)
      size_bytes: int = 0
      def __init__(self, path: str, *, timeout_s: float=1.5) -> None
      @property
      def name(self) -> str
  async def helper(*items: int, **options: object) -> list[str]
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write one distribution and return the folder of its package."""
    folder = tmp_path / "packages" / "nvrx-a" / "src" / "nvidia_resiliency_ext" / "part"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PUBLIC_API)
    (folder / "_inside.py").write_text(INSIDE)
    (folder / "_later.py").write_text("class Lazy: ...\n")
    return folder


def run(root: Path, *args: str) -> tuple[int, str]:
    """Run the tool on the tree and return its exit code and output."""
    result = subprocess.run(
        [sys.executable, str(TOOL), "--root", str(root), *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not result.stderr
    return result.returncode, result.stdout


def test_record_shows_names_signatures_and_members(source: Path, tmp_path: Path) -> None:
    """Names are followed to their definition; private members are left out."""
    assert run(tmp_path, "--write")[0] == 0
    record = tmp_path / "packages" / "nvrx-a" / "tests" / "public_api.txt"
    assert record.read_text() == EXPECTED
    assert run(tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("_inside.py", "timeout_s: float = 1.5", "timeout_s: float = 2.5"),
        ("_inside.py", "*items: int", "*items: str"),
        ("_inside.py", "    @property\n", ""),
        ("__init__.py", '"Lazy", ', ""),
        ("__init__.py", "LIMIT: int = 3", "LIMIT: int = 4"),
    ],
)
def test_change_of_the_api_is_shown(
    source: Path, tmp_path: Path, file: str, old: str, new: str
) -> None:
    """A changed default, type, kind, name or value fails the check with a diff."""
    run(tmp_path, "--write")
    text = (source / file).read_text()
    assert old in text
    (source / file).write_text(text.replace(old, new))
    code, said = run(tmp_path)
    assert code == 1
    assert "--- nvrx-a (recorded)" in said


def test_change_inside_is_not_shown(source: Path, tmp_path: Path) -> None:
    """A change of bodies, docstrings and private members leaves the record as it is."""
    run(tmp_path, "--write")
    text = (source / "_inside.py").read_text()
    (source / "_inside.py").write_text(text.replace("Doc.", "Other.").replace("_hidden", "_secret"))
    assert run(tmp_path) == (0, "")


def test_members_inherited_from_private_classes_are_shown(source: Path, tmp_path: Path) -> None:
    """Members of private bases belong to the class; public and foreign bases are only named."""
    other = tmp_path / "packages" / "nvrx-b" / "src" / "nvidia_resiliency_ext" / "foreign"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text('__all__ = ["Far"]\nclass Far:\n    def far(self): ...\n')
    (source / "_root.py").write_text(
        "class Root:\n    limit: int = 1\n    def __init__(self, path): ...\n"
        "    @property\n    def size(self) -> int: ...\n    def close(self): ...\n"
    )
    (source / "_middle.py").write_text(
        "from typing import Generic\nfrom . import _root as base\n"
        "class Middle(base.Root, Generic[T]):\n    def close(self, *, now: bool): ...\n"
        "    def _hidden(self): ...\n"
    )
    (source / "_again.py").write_text("from ._middle import Middle as Renamed\n")
    (source / "other.py").write_text(
        "from nvidia_resiliency_ext.foreign import Far\nfrom ._again import Renamed\n"
        '__all__ = ["Known", "Leaf"]\nclass Mixin:\n    def mix(self): ...\n'
        "class Known:\n    def known(self): ...\n"
        "class Leaf(Renamed[int], Mixin, Known, Far):\n    def size(self) -> float: ...\n"
    )
    assert run(tmp_path, "--write")[0] == 0
    record = (tmp_path / "packages" / "nvrx-a" / "tests" / "public_api.txt").read_text()
    assert record.partition("nvidia_resiliency_ext.part.other\n")[2] == (
        "  class Known\n"
        "      def known(self)\n"
        "  class Leaf(Renamed[int], Mixin, Known, Far)\n"
        "      def size(self) -> float\n"
        "      def close(self, *, now: bool)\n"
        "      limit: int = 1\n"
        "      def __init__(self, path)\n"
        "      def mix(self)\n"
    )


def test_a_class_that_inherits_from_itself_ends(source: Path, tmp_path: Path) -> None:
    """Sources that no Python would run do not hold up the tool."""
    (source / "other.py").write_text('__all__ = ["A"]\nclass A(B): ...\nclass B(A): ...\n')
    assert run(tmp_path, "--write")[0] == 0


def test_name_that_is_not_defined_is_an_error(source: Path, tmp_path: Path) -> None:
    """`__all__` may not promise what the module lacks."""
    (source / "other.py").write_text('__all__ = ["absent"]\n')
    code, said = run(tmp_path, "--write")
    assert code == 1
    assert "__all__ names absent" in said


def test_public_module_needs_a_list_of_names(source: Path, tmp_path: Path) -> None:
    """A public module that defines public names without `__all__` is an error."""
    (source / "other.py").write_text("def thing(): ...\n")
    code, said = run(tmp_path, "--write")
    assert code == 1
    assert "no __all__" in said
