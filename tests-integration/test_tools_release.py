# SPDX-License-Identifier: Apache-2.0
"""`tools/release.py` on a small repository with real git, hatch and towncrier."""

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "release.py"
PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.7.0"
"""


@pytest.fixture
def env() -> dict[str, str]:
    """Return an environment in which git needs no settings of the user."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": os.devnull}
    return {
        **os.environ,
        **who,
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
        "PATH": path,
    }


@pytest.fixture
def repository(tmp_path: Path, env: dict[str, str]) -> Path:
    """Make a repository with two distributions; nvrx-a has one unreleased change."""
    root = tmp_path / "repository"
    for name in ("nvrx-common", "nvrx-a"):
        folder = root / "packages" / name
        (folder / "changelog.d").mkdir(parents=True)
        (folder / "src").mkdir()
        (folder / "src" / "module.py").write_text("")
        (folder / "changelog.d" / ".gitignore").write_text("!.gitignore\n")
        (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name))
        (folder / "CHANGELOG.md").write_text(
            f"# Changelog of {name}\n\n<!-- towncrier release notes start -->\n"
        )
    (root / "packages" / "nvrx-a" / "changelog.d" / "+x.added.md").write_text("A new thing.\n")
    shutil.copy(ROOT / "towncrier.toml", root)
    git(root, env, "init", "-q", "-b", "main")
    git(root, env, "add", "--all")
    git(root, env, "commit", "-q", "-m", "first")
    return root


def git(root: Path, env: dict[str, str], *args: str) -> str:
    """Run git and return what it printed."""
    return subprocess.run(
        ["git", *args], cwd=root, env=env, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def run(root: Path, env: dict[str, str], *args: str) -> tuple[int, str]:
    """Run the tool and return its exit code and output."""
    result = subprocess.run(
        [sys.executable, str(TOOL), "--root", str(root), *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


def test_plan_names_what_has_unreleased_changes(repository: Path, env: dict[str, str]) -> None:
    """The plan counts fragments, and says when nvrx-common must be released first."""
    assert run(repository, env, "--plan") == (0, "nvrx-a: 1 unreleased changes\n")
    (repository / "packages" / "nvrx-common" / "changelog.d" / "12.fixed.md").write_text("Fixed.\n")
    assert "nvrx-a: 1 unreleased changes, after nvrx-common" in run(repository, env, "--plan")[1]


def test_changed_sources_need_a_fragment(repository: Path, env: dict[str, str]) -> None:
    """A branch that changes a package's sources without a fragment is named."""
    git(repository, env, "checkout", "-q", "-b", "change")
    (repository / "packages" / "nvrx-a" / "src" / "module.py").write_text("x = 1\n")
    git(repository, env, "commit", "-q", "-a", "-m", "change")
    code, said = run(repository, env, "--missing-fragments", "main")
    assert (code, said.split(":")[0]) == (1, "nvrx-a")
    (repository / "packages" / "nvrx-a" / "changelog.d" / "+y.fixed.md").write_text("Fixed.\n")
    git(repository, env, "add", "--all")
    git(repository, env, "commit", "-q", "-m", "fragment")
    assert run(repository, env, "--missing-fragments", "main") == (0, "")


def test_release_sets_version_changelog_commit_and_tag(
    repository: Path, env: dict[str, str]
) -> None:
    """A release raises the version, moves fragments into the changelog, commits and tags."""
    if shutil.which("hatch") is None or shutil.which("towncrier", path=env["PATH"]) is None:
        pytest.skip("hatch and towncrier are not on PATH (tools/dev.py puts them there)")
    code, said = run(repository, env, "nvrx-a", "minor", "--ci-passed")
    assert code == 0, said
    folder = repository / "packages" / "nvrx-a"
    assert 'version = "0.8.0"' in (folder / "pyproject.toml").read_text()
    changelog = (folder / "CHANGELOG.md").read_text()
    assert "## 0.8.0" in changelog
    assert "A new thing." in changelog
    assert git(repository, env, "tag", "--list").split() == ["nvrx-a-v0.8.0"]
    assert git(repository, env, "status", "--porcelain") == ""
    assert run(repository, env, "--plan") == (0, "nothing to release\n")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("nvrx-none", "minor"), "no distribution"),
        (("nvrx-common", "minor"), "no changelog fragment"),
        (("nvrx-a", "next"), "major, minor, patch"),
    ],
)
def test_release_that_makes_no_sense_changes_nothing(
    repository: Path, env: dict[str, str], args: tuple[str, ...], reason: str
) -> None:
    """A wrong name, a wrong version or nothing to release ends before anything is written."""
    code, said = run(repository, env, *args, "--ci-passed")
    assert code != 0
    assert reason in said
    assert git(repository, env, "status", "--porcelain") == ""


METADATA = """\
Metadata-Version: 2.4
Name: nvrx-a
Version: 0.7.0
Summary: A thing
License-Expression: Apache-2.0
Requires-Dist: nvrx-common>=0.7
Requires-Dist: torch>=2.4
Requires-Dist: grpcio; extra == "all"
Requires-Dist: nvrx-common[grpc]; extra == "all"
"""


def wheel_at(path: Path, files: dict[str, str]) -> Path:
    """Write a wheel with these files."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_a_bill_of_materials_says_what_is_in_a_wheel_and_what_it_requires(
    tmp_path: Path, env: dict[str, str]
) -> None:
    """It has hashes and requirements with their scope; the same wheel gives the same text."""
    files = {"nvrx_a-0.7.0.dist-info/METADATA": METADATA, "a/native.abi3.so": "code"}
    wheel = wheel_at(tmp_path / "nvrx_a-0.7.0-py3-none-any.whl", files)
    assert run(ROOT, env, "--sbom", str(wheel))[0] == 0
    text = (tmp_path / f"{wheel.name}.cdx.json").read_text()
    bom = json.loads(text)
    component = bom["metadata"]["component"]
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert component["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    scopes = {item["name"]: item.get("scope") for item in bom["components"]}
    assert scopes == {
        "grpcio": "optional", "nvrx-common": "required", "torch": "required",
        "a/native.abi3.so": None,
    }  # fmt: skip
    listed = {item["bom-ref"] for item in bom["components"]}
    assert set(bom["dependencies"][0]["dependsOn"]) == listed
    assert run(ROOT, env, "--sbom", str(wheel))[0] == 0
    assert (tmp_path / f"{wheel.name}.cdx.json").read_text() == text


def test_a_file_that_is_no_wheel_has_no_bill_of_materials(
    tmp_path: Path, env: dict[str, str]
) -> None:
    """Another file, an archive without metadata, or none, is one line and exit code 1."""
    text = tmp_path / "a.whl"
    text.write_text("no archive")
    empty = wheel_at(tmp_path / "b.whl", {})
    for path in (text, empty, tmp_path / "none.whl"):
        code, said = run(ROOT, env, "--sbom", str(path))
        assert code == 1
        assert len(said.splitlines()) == 1, said


def test_wheels_that_own_the_same_file_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two wheels with one file would overwrite each other; a file of one wheel is no problem."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    check_alone = importlib.import_module("check_alone")
    wheels = [
        wheel_at(tmp_path / "a.whl", {"x/__init__.py": "", "x/a.py": "", "x/_b.py": ""}),
        wheel_at(tmp_path / "b.whl", {"x/a.py": "", "b.dist-info/METADATA": ""}),
    ]
    assert check_alone.owned_twice(wheels) == ["x/a.py is in a.whl and b.whl"]
    assert check_alone.public_modules(wheels[0]) == ["x", "x.a"]


def test_release_needs_a_clean_tree(repository: Path, env: dict[str, str]) -> None:
    """Uncommitted changes end a release."""
    (repository / "packages" / "nvrx-a" / "src" / "module.py").write_text("x = 1\n")
    code, said = run(repository, env, "nvrx-a", "minor", "--ci-passed")
    assert code == 1
    assert "commit them first" in said
