# SPDX-License-Identifier: Apache-2.0
"""`tools/gen_reference.py`: tables of the reference pages as text that can be read anywhere."""

import importlib
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread, active_count

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGE = """# Codes

<!-- generated: exit-codes -->
{table}<!-- end -->

By hand | <b>.
"""


def run(pages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "gen_reference.py"), "--pages", str(pages)]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_page_that_is_not_up_to_date_is_named_and_written(tmp_path: Path) -> None:
    """`--check` fails and writes nothing; without it the table is written, the rest is kept."""
    page = tmp_path / "codes.md"
    page.write_text(PAGE.format(table="| code |\n"))
    (tmp_path / "other.md").write_text("no table here\n")
    checked = run(tmp_path, "--check")
    assert checked.returncode == 1
    assert checked.stdout == f"{page}: is not up to date\n"
    assert "dev.py reference" in checked.stderr
    assert page.read_text() == PAGE.format(table="| code |\n")
    assert run(tmp_path).returncode == 0
    written = page.read_text()
    assert "| `0` |" in written
    assert written.startswith("# Codes\n\n<!-- generated: exit-codes -->\n\n| code | meaning |\n")
    assert written.endswith("<!-- end -->\n\nBy hand | <b>.\n")
    assert run(tmp_path, "--check").returncode == 0


def test_defaults_come_from_the_code(tmp_path: Path) -> None:
    """The second column of a table of parameters is filled in; an unknown name is an error."""
    page = tmp_path / "timeouts.md"
    text = (
        "<!-- generated: defaults nvidia_resiliency_ext.inprocess:Wrapper -->\n\n"
        "| parameter | default | what |\n| --- | --- | --- |\n"
        "| `{name}` | 7 s | by hand |\n\n<!-- end -->\n"
    )
    page.write_text(text.format(name="hard_timeout"))
    assert run(tmp_path).returncode == 0
    assert "| `hard_timeout` | 90 s | by hand |" in page.read_text()
    page.write_text(text.format(name="harder_timeout"))
    failed = run(tmp_path)
    assert failed.returncode == 1
    assert "has no parameter" in failed.stderr


def test_each_program_has_its_command_line_in_the_reference() -> None:
    """The name of each program that a package installs heads a section or page of the reference."""
    heads = {
        line.split("`")[1]
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for line in page.read_text().splitlines()
        if line.startswith(("# ", "## ")) and line.count("`") > 1
    }
    programs = {
        name
        for project in ROOT.glob("packages/*/pyproject.toml")
        for name in tomllib.loads(project.read_text())["project"].get("scripts", ())
    }
    assert len(programs) > 5
    assert not programs - heads


def test_a_programs_commands_have_tables(tmp_path: Path) -> None:
    """`program MODULE` asks `main` for its parser: its purpose, arguments and commands."""
    page = tmp_path / "programs.md"
    module = "nvidia_resiliency_ext.checkpointing.__main__"
    page.write_text(f"<!-- generated: program {module} -->\n<!-- end -->\n")
    assert run(tmp_path).returncode == 0
    written = page.read_text()
    assert "Look at checkpoints on disk." in written
    for command in ("verify", "list", "diff"):
        assert f"### `python -m nvidia_resiliency_ext.checkpointing {command}`" in written
    assert "| `--json` |" in written


def test_the_main_class_of_a_module_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opens a module's section of the reference meets the class that can do most."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    in_order = importlib.import_module("nvrx_reference").in_order
    items = {"fail": OSError, "Thread": Thread, "Event": Event, "active_count": active_count}
    assert list(in_order(items).items()) == [
        ("Thread", "autoclass"),
        ("Event", "autoclass"),
        ("active_count", "autofunction"),
        ("fail", "autoexception"),
    ]


def test_each_public_module_has_a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A page names what its module exports, inherited members too; a gone module's page goes."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    reference = importlib.import_module("nvrx_reference")
    monkeypatch.setattr(reference, "REFERENCE", tmp_path)
    gone = tmp_path / "nvrx-ft" / "gone.rst"
    gone.parent.mkdir()
    gone.write_text("")
    reference.write_pages(None)
    assert not gone.exists()
    for folder in (ROOT / "packages").iterdir():
        pages = {page.stem for page in (tmp_path / folder.name).glob("*.rst")}
        assert pages == set(reference.public_modules(folder.name))
        assert pages
    name = "nvidia_resiliency_ext.fault_tolerance.rank_monitor_client"
    page = (gone.parent / f"{name}.rst").read_text()
    assert f".. autoclass:: {name}.RankMonitorClient\n   :members:\n   :inherited-" in page
