# SPDX-License-Identifier: Apache-2.0
"""Why workers start cold, which variables matter, and whether the first cycle is held."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from nvidia_resiliency_ext.fault_tolerance._workers import conditions
from nvidia_resiliency_ext.fault_tolerance._workers import conditions as imports
from nvidia_resiliency_ext.fault_tolerance._workers.command import WorkerCommand
from nvidia_resiliency_ext.fault_tolerance._workers.conditions import (
    DEFAULT_IMPORTS,
    import_list,
    with_optional,
)


def command(*flags, entry="train.py", is_module=False, python=sys.executable):
    words = ("-m", entry) if is_module else (entry,)
    return WorkerCommand((python, *flags, *words), entry, is_module, True)


def reason(worker_command=None, env=None, prewarm="auto"):
    return conditions.cold_reason(worker_command or command("-u"), env or {}, prewarm)


def test_plain_script_is_warm():
    """An ordinary command has no reason to start cold."""
    assert reason() is None
    assert reason(prewarm="on") is None


def test_off_is_a_reason():
    """`--ft-prewarm off` starts everything cold."""
    assert reason(prewarm="off") == "--ft-prewarm off"


@pytest.mark.parametrize("name", ["PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME"])
def test_variables_that_look_at_imports(name):
    """Variables that measure imports start cold, unless they are empty."""
    assert reason(env={name: "1"}) == f"{name} is set"
    assert reason(env={name: ""}) is None


def test_programs_that_are_not_python():
    """A command that Python does not run, or another Python runs, starts cold."""
    assert "not a Python script" in reason(WorkerCommand(("./run",), "./run", False, False))
    assert "interpreter is not" in reason(command(python="/usr/bin/other-python"))


@pytest.mark.parametrize(
    "text",
    [
        "os.environ['OMP_NUM_THREADS'] = '4'",
        "os.environ.setdefault('TORCH_LOGS', 'x')",
        "os.putenv('MKL_NUM_THREADS', '1')",
        "os.environ.update({\n    'RANK': '0',\n    'TORCHDYNAMO_DISABLE': '1'})",
        "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'x'",
    ],
)
def test_script_that_names_an_import_time_variable(tmp_path, text):
    """A script that seems to set a variable that imports read starts cold."""
    path = tmp_path / "train.py"
    path.write_text(f"import os\n{text}\nimport torch\n")
    assert "which is read at import" in reason(command(entry=str(path)))


@pytest.mark.parametrize(
    "text",
    [
        "os.environ['RANK']",
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0'",
        "os.environ['NCCL_DEBUG'] = 'INFO'",
        "os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'",
        "os.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'",
        "# os.environ['OMP_NUM_THREADS'] would be 1",
        "print('OMP_NUM_THREADS')",
    ],
)
def test_script_that_names_late_variables(tmp_path, text):
    """Variables that are read when needed, comments and other text are no reason."""
    path = tmp_path / "train.py"
    path.write_text(f"import os\n{text}\nimport torch\n")
    assert reason(command(entry=str(path))) is None


def test_ranks_that_differ_in_an_import_time_variable():
    """A variable that imports read and that differs between ranks starts them cold."""
    env = {"OMP_NUM_THREADS": "1"}
    assert "OMP_NUM_THREADS" in conditions.go_reason(env, {"OMP_NUM_THREADS": "2"})
    assert "OMP_NUM_THREADS" in conditions.go_reason(env, {})
    assert conditions.go_reason(env, {**env, "RANK": "1", "TZ": "UTC"}) is None
    assert "TORCH_LOGS" in conditions.go_reason(env, {**env, "TORCH_LOGS": "x"})


def test_reasons_are_one_line(tmp_path):
    """Every reason fits on one line of a log."""
    path = tmp_path / "train.py"
    path.write_text("import os\nos.environ['OMP_NUM_THREADS'] = '4'\n")
    for found in (reason(command(entry=str(path))), reason(prewarm="off")):
        assert "\n" not in found


def test_rules_by_prefix():
    """New names of torch are import-time; the launcher's and NCCL's are not."""
    for name in ("TORCH_NEW", "PYTORCH_X", "CUDA_Y", "LC_ALL", "GOMP_X", "TRITON_CACHE"):
        assert conditions.is_import_time(name)
    for name in ("TORCHELASTIC_RUN_ID", "NCCL_X", "GLOO_X", "TZ", "MASTER_PORT", "NVRX_CYCLE"):
        assert not conditions.is_import_time(name)


HELD = [
    ("import torch", True),
    ("import numpy\nimport torch.nn as nn", True),
    ("from lightning.pytorch import Trainer", True),
    ("try:\n    import torch\nexcept ImportError:\n    torch = None", True),
    ("with open('x') as f:\n    import torch", True),
    ("if __name__ == '__main__':\n    import torch", True),
    ("if '__main__' == __name__:\n    import torch", True),
    ("def main():\n    import torch", False),
    ("import sys\nif '--train' in sys.argv:\n    import torch", False),
    ("class A:\n    def f(self):\n        import torch", False),
    ("try:\n    pass\nexcept ImportError:\n    import torch", False),
    ("for i in ():\n    import torch", False),
    ("import os, json", False),
    ("# import torch", False),
    ("import torch as (", False),
    ("", False),
]


@pytest.mark.parametrize(("text", "expected"), HELD)
def test_first_cycle_is_held_when_the_import_is_certain(tmp_path, text, expected):
    """Only an import of torch that is certain to run makes the first cycle wait for standbys."""
    path = tmp_path / "train.py"
    path.write_text(text)
    assert imports.should_hold_first_cycle(command(entry=str(path))) is expected


def test_first_cycle_follows_siblings_to_depth_two(tmp_path):
    """A file beside the script that itself imports torch counts, two steps deep."""
    for name, text in (
        ("train.py", "from first import x"),
        ("first.py", "import second"),
        ("second.py", "import torch"),
        ("far.py", "import train"),
    ):
        (tmp_path / name).write_text(text)
    assert imports.should_hold_first_cycle(command(entry=str(tmp_path / "train.py")))
    assert not imports.should_hold_first_cycle(command(entry=str(tmp_path / "far.py")))


def test_first_cycle_counts_named_modules(tmp_path):
    """A module that the user names for standbys counts as torch does."""
    path = tmp_path / "train.py"
    path.write_text("import mine.models")
    assert imports.should_hold_first_cycle(command(entry=str(path)), ("mine",))
    assert not imports.should_hold_first_cycle(command(entry=str(path)), DEFAULT_IMPORTS)


def test_first_cycle_of_other_commands(tmp_path):
    """What cannot be read is not held."""
    assert not imports.should_hold_first_cycle(command(entry=str(tmp_path / "missing.py")))
    assert not imports.should_hold_first_cycle(command(entry="no.such.module", is_module=True))
    assert not imports.should_hold_first_cycle(WorkerCommand(("x",), "x", False, False))


def test_first_cycle_module_is_read_where_it_is(tmp_path, monkeypatch):
    """With `-m` the file is looked up in the working directory first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import torch")
    assert imports.should_hold_first_cycle(command(entry="package", is_module=True))
    # A folder may also be named as a script.
    assert imports.should_hold_first_cycle(command(entry=str(tmp_path / "package")))


def test_first_cycle_decision_is_quick(tmp_path):
    """A long script is evaluated in a small part of an import of torch."""
    path = tmp_path / "train.py"
    path.write_text("import os\n" + textwrap.dedent("def f(x):\n    return x + 1\n") * 500)
    started = time.process_time()
    assert not imports.should_hold_first_cycle(command(entry=str(path)))
    assert time.process_time() - started < 0.3


def test_default_imports():
    """An empty list means the default; only torch itself must be there."""
    assert import_list("") == DEFAULT_IMPORTS
    assert import_list(" a, b.c ,") == ("a", "b.c")
    assert dict(with_optional(DEFAULT_IMPORTS))["torch"] is False
    assert dict(with_optional(("numpy", "mine"))) == {"numpy": True, "mine": False}


def test_workers_that_are_ending_say_nothing_of_standbys():
    """At a restart nobody maps torch, and ready standbys must not be ended for that."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        for pids in ([], [1 << 30], [process.pid], [1 << 30, process.pid]):
            assert conditions.wants_prewarming(pids) is None


@pytest.mark.slow
def test_workers_without_torch_want_no_standbys():
    """Workers gain from standbys only with libtorch mapped."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert conditions.wants_prewarming([process.pid]) is False
        process.communicate()
    pytest.importorskip("torch")
    code = "import torch, sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert conditions.wants_prewarming([1 << 30, process.pid])
        process.communicate()


def test_decisions_import_nothing_heavy():
    """The modules that the launcher loads at start bring no torch, numpy, psutil or asyncio."""
    code = (
        "import sys\n"
        "from nvidia_resiliency_ext.fault_tolerance._workers import "
        "conditions, pool, prewarmed\n"
        "print([n for n in ('torch', 'numpy', 'psutil', 'yaml', 'asyncio') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
