# SPDX-License-Identifier: Apache-2.0
"""The check of scripts: which uses it names, that it runs nothing, and its exit codes."""

import pytest

from nvidia_resiliency_ext.shared_utils.check_script import ScriptError, check_file, main

ROOT = "nvidia_resiliency_ext.shared_utils"


def texts(tmp_path, code):
    """Return what is said about a script."""
    script = tmp_path / "script.py"
    script.write_text(code)
    return [(problem.line, problem.text) for problem in check_file(str(script))]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (f"from {ROOT}.inject_fault import Fualt", "has no Fualt; did you mean Fault?"),
        (f"import {ROOT}.gone", f"there is no module {ROOT}.gone"),
        (f"import {ROOT}.inject_falt", f"module {ROOT}.inject_falt; did you mean inject_fault?"),
        (f"import {ROOT}.gone.deeper", f"there is no module {ROOT}.gone"),
        (
            f"import {ROOT}.rundir as r\nr.RunDir.crate('x')",
            "RunDir has no crate; did you mean create?",
        ),
        (f"import {ROOT}.rundir\n{ROOT}.rundir.Gone", f"{ROOT}.rundir has no Gone"),
        (f"import importlib\nx = importlib.import_module('{ROOT}.no')", f"no module {ROOT}.no"),
        (
            (
                f"from {ROOT} import inject_fault\n"
                "inject_fault.dispatch_fault_injection(fault=1, wait=2, callback=None)"
            ),
            "inject_fault.dispatch_fault_injection() takes no argument wait",
        ),
        (
            (
                f"from {ROOT}.rundir import RunDir\nclass A:\n"
                " def __init__(self): self.d = RunDir('/x')\n def f(self): self.d.remove(1, 2)"
            ),
            "self.d.remove() takes 0 positional arguments, not 2",
        ),
    ],
)
def test_a_use_that_would_fail_is_named_with_its_line(tmp_path, code, said):
    """A name, module or argument that is not there is named, at the line that uses it."""
    ((line, text),) = texts(tmp_path, code)
    assert said in text
    assert line == len(code.splitlines())


@pytest.mark.parametrize(
    "code",
    [
        f"from {ROOT}.inject_fault import *\nimport torch.nope, os\nfrom . import x\nx.y()",
        f"import {ROOT}.rundir as r\nr = 3\nr.nope",
        f"from {ROOT}.inject_fault import Fault\nFault.SIGKILL.name\nf(Fault['SIGKILL'])",
        f"from {ROOT}.rundir import RunDir\nRunDir.create(*a, **b)",
    ],
)
def test_what_works_and_what_is_unknown_is_not_named(tmp_path, code):
    """Nothing is said about right uses, foreign names, and names that were bound anew."""
    assert texts(tmp_path, code) == []


def test_nothing_in_a_script_runs(tmp_path):
    """A script that would leave a file, at import and at a call, leaves none."""
    texts(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\nimport {ROOT}.console")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    """Where a distribution is not installed, the line says what to install."""
    monkeypatch.setattr("importlib.metadata.distributions", list)
    said = texts(tmp_path, "import nvidia_resiliency_ext.checkpointing.not_there")
    assert said == [(1, "nvidia_resiliency_ext.checkpointing.not_there: pip install nvrx-ckpt")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"x = (", "no Python"),
        (b"\0", "no Python"),
        (b"# coding: nope\n", "no Python"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_and_exit_code_2(tmp_path, capsys, content, said):
    """A missing file, or one that is no Python, ends the program without a traceback."""
    script = tmp_path / "a.py"
    if content is not None:
        script.write_bytes(content)
    with pytest.raises(ScriptError):
        check_file(str(script))
    assert main([str(script)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert str(script) in line


def test_exit_code_is_1_when_a_line_needs_a_look_and_folders_are_searched(tmp_path, capsys):
    """A folder's files are all checked; one bad line makes the exit code 1."""
    (tmp_path / "good.py").write_text(f"import {ROOT}.console")
    assert main([str(tmp_path)]) == 0
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "bad.py").write_text(f"from {ROOT}.console import gone")
    assert main([str(tmp_path)]) == 1
    assert "2 files: 1 line to look at" in capsys.readouterr().out
