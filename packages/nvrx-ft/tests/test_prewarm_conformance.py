# SPDX-License-Identifier: Apache-2.0
"""A worker from standby is like a fresh one: one program, run both ways and compared.

The light form: as script, with numpy as the only import. The full matrix is
`packages/nvrx-ft/bench/conformance.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import ft_conformance as conformance
import pytest

from nvidia_resiliency_ext.fault_tolerance._workers import prewarmed as standbys

pytestmark = pytest.mark.slow  # together

LIGHT = ("numpy", "tempfile")


@pytest.fixture(autouse=True)
def _usual_umask():
    old = os.umask(0o022)
    yield
    os.umask(old)


def setting(tmp_path, **options):
    return conformance.Setting(tmp_path, imports=options.pop("imports", LIGHT), **options)


def test_facts_agree_before_and_after_imports(tmp_path):
    """What the script can see of its process is the same cold and from standby."""
    assert conformance.state_differences(setting(tmp_path), "numpy") == {}


def test_facts_agree_with_dash_m(tmp_path):
    """The same with `-m`."""
    run = setting(tmp_path, as_module=True, base_env={"PYTHONPATH": str(conformance.PROGRAMS)})
    assert conformance.state_differences(run, "numpy", times=2) == {}


def test_facts_agree_without_imports_and_python_path(tmp_path):
    """The same when nothing is imported ahead and PYTHONPATH is empty."""
    run = setting(tmp_path, imports=(), base_env={"PYTHONPATH": ""})
    assert conformance.state_differences(run, "", times=2) == {}


@pytest.mark.parametrize("case", conformance.EXIT_CASES)
def test_ends_the_same_way(tmp_path, case):
    """Exit status and output of every way to end are the same cold and from standby."""
    assert conformance.case_difference(setting(tmp_path), case) is None


@pytest.mark.parametrize("case", [*conformance.CHILD_CASES, *conformance.NUMPY_CASES])
def test_children_and_imports_behave_the_same(tmp_path, case):
    """Processes that a worker starts know nothing of the standby, and modules are ordinary ones."""
    assert conformance.case_difference(setting(tmp_path), case) is None


CONTROLS = {
    "time zone": (("time.tzset()", "pass"), "before.python.time"),
    "PYTHONPATH": (('_set_variable("PYTHONPATH", os', "str(os"), "before.environ.PYTHONPATH"),
    "private variables": (
        ("os.environ.pop(_FD_VARIABLE, None)", "os.environ.get(_FD_VARIABLE)"),
        "before.environ.NVRX_STANDBY_FD",
    ),
    "search path": (("if entry != here", "if entry"), "before.sys.path"),
    "withdrawn variables": (
        ('for name in go["unset"]', "for name in ()"),
        "before.environ.NVRX_TEST_WITHDRAWN",
    ),
    "temporary folder": (('["tempdir"] = None', '["tempdir"] = "/"'), "before.python.tempdir"),
    "umask": (("time.tzset()", "time.tzset(); os.umask(0o7)"), "before.process.Umask"),
    "scheduling": (
        ("os.sched_setscheduler(int(task), os.SCHED_OTHER, usual)", "None"),
        "before.process.policy",
    ),
    "name": (('set_name(f"/proc/self/task/{task}", old)', "None"), "before.process.Name"),
    "modules": (("del sys.modules[key]", "pass"), "before.third_party.loaded"),
    "filters": (("_replace_list(live, old)", "pass"), "before.python.filters"),
    "module specs": (("module.__spec__ = self._spec", "pass"), "after.numpy"),
    "sitecustomize": (
        ("\nsys.modules.pop(__name__, None)\n__import__(__name__)", "\n"),
        "before.main.sitecustomize",
    ),
    "socket": (
        ("control_socket.close()", "globals().update(kept=control_socket)"),
        "before.process.fds",
    ),
    "shared random state": (
        ("gc.collect()", "gc.collect(); __import__('random').seed(7)"),
        "before.python.random",
    ),
    "seeded numpy": (
        ("gc.collect()", "gc.collect(); held._groups[1].modules['numpy'].random.seed(7)"),
        "after.numpy_state.draw",
    ),
}


# Two remedies of one group do not show, hide or prevent each other's difference.
APART = ({"umask", "modules", "private variables"}, {"filters", "sitecustomize"})


def test_probe_notices_missing_remedies(tmp_path):
    """With remedies of the hook off, the comparison fails in each: it can see that difference."""
    cold = conformance.cold_states(setting(tmp_path), "numpy", times=2)
    for names in (CONTROLS.keys() - set().union(*APART), *APART):
        folder = tmp_path / f"{len(names)}"
        folder.mkdir()
        changes, keys = zip(*map(CONTROLS.get, names), strict=True)
        run = setting(tmp_path, hook_folder=conformance.patched_hook(folder, *changes))
        found = conformance.state_differences(run, "numpy", times=2, cold=cold)
        assert set(keys) <= found.keys(), names


def test_probe_notices_another_kind_of_stream(tmp_path, monkeypatch):
    """A standby started on a terminal and moved to a file differs in its buffers."""
    terminals = []

    def placeholder(path):
        parent, child = os.openpty()
        terminals.append(parent)
        return child if path else None

    monkeypatch.setattr(standbys, "_placeholder", placeholder)
    try:
        different = conformance.state_differences(setting(tmp_path), "numpy", times=1)
    finally:
        for terminal in terminals:
            os.close(terminal)
    assert "before.streams.stdout.line_buffering" in different


@pytest.mark.skipif(os.getuid() != 0, reason="starts as root to become an ordinary user")
def test_ordinary_user_gets_priority_and_cores_back(tmp_path):
    """What a standby gives up while it imports an ordinary user can take back at "go"."""
    programs = conformance.PROGRAMS
    folder = tmp_path / "work"
    folder.mkdir()
    folder.chmod(0o777)
    helpers = Path(conformance.__file__).parent
    done = subprocess.run(
        [
            *(sys.executable, str(programs / "ft_as_ordinary_user.py")),
            *(sys.executable, str(programs / "ft_conformance_report.py")),
            *(str(helpers), str(folder)),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    assert reported == {"user": 65534, "held": [os.SCHED_BATCH], "different": {}}
