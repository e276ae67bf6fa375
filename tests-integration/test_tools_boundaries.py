# SPDX-License-Identifier: Apache-2.0
"""`tools/check_boundaries.py` on small trees, each with one broken rule."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "check_boundaries.py"
NAMESPACE = "nvidia_resiliency_ext"


def add_package(root: Path, name: str, declarations: str, files: dict[str, str]) -> None:
    """Write a distribution with these lines under [project] and these sources."""
    folder = root / "packages" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n{declarations}\n')
    for path, text in files.items():
        target = folder / "src" / NAMESPACE / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Write three distributions that break no rule."""
    add_package(
        tmp_path,
        "nvrx-common",
        "dependencies = []\n[project.optional-dependencies]\ngrpc = ['grpcio', 'protobuf']",
        {
            "__init__.py": "",
            "shared/__init__.py": "",
            "shared/_inside.py": f"def f():\n    from {NAMESPACE}.shared import m_pb2\n",
            "shared/m_pb2.py": "from google.protobuf import descriptor\n",
        },
    )
    add_package(
        tmp_path,
        "nvrx-a",
        "dependencies = ['nvrx-common[grpc]>=0.7', 'pyyaml>=6']",
        {
            "a/__init__.py": (
                "import json\nimport grpc\nimport yaml\n"
                "from google.protobuf import message\n"
                f"from {NAMESPACE}.shared import clock\nfrom . import other\n"
            ),
            "a/other.py": "",
        },
    )
    add_package(
        tmp_path,
        "nvrx-b",
        "dependencies = ['nvrx-common']\n[project.optional-dependencies]\na = ['nvrx-a', 'numpy']",
        {"b/__init__.py": f"def join():\n    import {NAMESPACE}.a.other\n    import numpy\n"},
    )
    return tmp_path


def check(root: Path) -> tuple[int, str]:
    """Run the tool and return its exit code and output."""
    result = subprocess.run(
        [sys.executable, str(TOOL), str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not result.stderr
    return result.returncode, result.stdout


def test_tree_without_mistakes_passes(tree: Path) -> None:
    """Declared imports, extras of siblings and imports inside functions are all accepted."""
    code, said = check(tree)
    assert code == 0, said
    assert "0 problems in 3 distributions" in said


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("nvrx-a/a/new.py", "import nvidia_resiliency_ext.b", "nvrx-a imports"),
        ("nvrx-a/a/new.py", "from .. import b", "nvrx-a imports"),
        ("nvrx-a/a/new.py", "import importlib\nimportlib.import_module('torch')", "torch"),
        ("nvrx-b/b/new.py", "import nvidia_resiliency_ext.a", "only an extra"),
        ("nvrx-b/b/new.py", "class C:\n    import numpy", "only an extra"),
        ("nvrx-b/b/new.py", "def f():\n    import torch", "does not declare torch"),
        ("nvrx-b/b/new.py", "def f():\n    from google.protobuf import any_pb2", "protobuf"),
        ("nvrx-a/a/new.py", "from nvidia_resiliency_ext.shared import _inside", "private"),
        ("nvrx-a/a/new.py", "from nvidia_resiliency_ext.shared._inside import x", "private"),
        ("nvrx-a/__init__.py", "", "keep one"),
        ("nvrx-b/a/other.py", "", "keep one"),
        ("nvrx-common/shared/new.py", "def f():\n    import nvidia_resiliency_ext.a", "no sibling"),
        ("nvrx-a/a/new.py", "import nvidia_resiliency_ext_typo", "does not declare"),
        ("nvrx-common/shared/new.py", "from . import m_pb2", "needs an extra"),
    ],
)
def test_broken_rule_is_named_with_its_place(
    tree: Path, path: str, text: str, complaint: str
) -> None:
    """Each forbidden import or file fails the check, with the file and the reason."""
    dist, _, inside = path.partition("/")
    target = tree / "packages" / dist / "src" / NAMESPACE / inside
    target.parent.mkdir(exist_ok=True)
    target.write_text(text + "\n")
    code, said = check(tree)
    assert code == 1
    assert complaint in said
    assert inside in said


def test_imports_for_type_checkers_are_free(tree: Path) -> None:
    """What stands under TYPE_CHECKING is no import at run time, so no rule applies."""
    target = tree / "packages" / "nvrx-common" / "src" / NAMESPACE / "shared" / "new.py"
    target.write_text(
        "from typing import TYPE_CHECKING\n"
        f"if TYPE_CHECKING:\n    from {NAMESPACE}.a._private import x\n"
    )
    code, said = check(tree)
    assert code == 0, said


def test_host_imports_may_stand_in_functions_only(tree: Path) -> None:
    """A module that the user's program brings is allowed inside functions and nowhere else."""
    declared = tree / "packages" / "nvrx-common" / "pyproject.toml"
    declared.write_text(declared.read_text() + "[tool.nvrx]\nhost-imports = ['torch']\n")
    target = tree / "packages" / "nvrx-common" / "src" / NAMESPACE / "shared" / "new.py"
    target.write_text("def f():\n    import torch.distributed\n")
    assert check(tree)[0] == 0
    target.write_text("import torch.distributed\n")
    code, said = check(tree)
    assert code == 1
    assert "new.py:1" in said


def test_empty_tree_is_no_success(tmp_path: Path) -> None:
    """A folder without packages fails, so a wrong path cannot pass as a clean result."""
    assert check(tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("a/_low/x.py", "from ..other import y", "imports nvidia_resiliency_ext.a.other, a layer"),
        ("a/_low/x.py", "def f():\n    from .._high import z", "a layer above it"),
        ("a/_high/z.py", "from . import w", ""),
        ("a/new.py", "", "a/new.py: is in no layer of nvrx-a"),
        ("a/_new/n.py", "", "a/_new/n.py: is in no layer of nvrx-a"),
    ],
)
def test_folders_import_downward(tree: Path, file: str, text: str, named: str) -> None:
    """An import of a higher layer, inside a function too, or a module in no layer is a problem."""
    files = {"a/_low/__init__.py": "", "a/_high/__init__.py": "", "a/_high/w.py": ""}
    files["a/_high/w.py"] = "from .._low import x\n"
    files["a/_low/x.py"] = ""
    files[file] = text + "\n"
    layers = "[tool.nvrx]\nlayers = ['a._low', 'a._high', 'a.other']"
    add_package(tree, "nvrx-a", f"dependencies = ['nvrx-common[grpc]', 'pyyaml']\n{layers}", files)
    code, said = check(tree)
    assert (code, named in said) == (1 if named else 0, True), said


def test_circles_are_named(tree: Path) -> None:
    """Two files that import each other, one of them inside a function, are named."""
    folder = tree / "packages/nvrx-a/src" / NAMESPACE / "a"
    (folder / "one.py").write_text("from . import two\n")
    (folder / "two.py").write_text("def f():\n    from . import one\n")
    code, said = check(tree)
    assert code == 1
    assert f"{NAMESPACE}.a.one, {NAMESPACE}.a.two import each other in a circle" in said
