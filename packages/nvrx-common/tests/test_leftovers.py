# SPDX-License-Identifier: Apache-2.0
"""The guard against leftovers, which all packages' tests have, does fail tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import leftovers

CONFTEST = """
import leftovers
looks = [leftovers.children, leftovers.marked_processes, leftovers.threads, leftovers.descriptors]
looks += [leftovers.run_directories, leftovers.shared_memory]
_guard = leftovers.guard(*looks, grace_s=0.1)
"""
LEAKS = {
    "zombie": "child = subprocess.Popen(['true']); os.waitid(os.P_PID, child.pid, ZOMBIE); "
    "keep.append(child)",
    "process": "keep.append(subprocess.Popen(['sleep', '15']).pid)",
    "grandchild": "keep.append(int(subprocess.check_output(['sh', '-c', ORPHAN])))",
    "thread": "threading.Thread(target=time.sleep, args=(15,), daemon=True).start()",
    "socket": "keep.append(socket.socketpair())",
    "run directory": "keep.append(RunDir.create('leak'))",
    "shared memory": "keep.append(open(f'/dev/shm/leak-{os.getpid()}', 'w'))",
}
# The look that sees it first.
LOOKS = {
    "zombie": "children",
    "process": "children",
    "grandchild": "marked_processes",
    "thread": "threads",
    "socket": "descriptors",
    "run directory": "run_directories",
    "shared memory": "shared_memory",
}
PREAMBLE = """
import os, socket, subprocess, threading, time
from nvidia_resiliency_ext.shared_utils.rundir import RunDir
ORPHAN = "sleep 15 >/dev/null 2>&1 & echo $!"
ZOMBIE = os.WEXITED | os.WNOWAIT
keep = []
def test_leak():
    {leak}
"""
EPILOGUE = """
def test_clean():
    for item in keep:
        if isinstance(item, RunDir):
            item.remove()
        if isinstance(item, subprocess.Popen):
            item.wait()
        if isinstance(item, int):
            os.kill(item, 9)
    if os.path.exists(f'/dev/shm/leak-{os.getpid()}'):
        os.unlink(f'/dev/shm/leak-{os.getpid()}')
"""


def test_leaks_fail_their_tests(tmp_path: Path) -> None:
    """A test that leaves one of these behind fails, alone, and the message says what it left."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for kind, leak in LEAKS.items():
        program = PREAMBLE.format(leak=leak) + EPILOGUE
        (tmp_path / f"test_{kind.replace(' ', '_')}.py").write_text(program)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:schemathesis"]
    options += ["-c", os.devnull]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(leftovers.__file__).parent),
            "COLUMNS": "300",  # the summary has whole messages
        },
    )
    said = result.stdout + result.stderr
    failures = re.findall(
        r"^ERROR (\S+) - .*the test left behind: (\w+): ", result.stdout, re.MULTILINE
    )
    assert dict(failures) == {
        f"test_{kind.replace(' ', '_')}.py::test_leak": look for kind, look in LOOKS.items()
    }, said
    assert f"{2 * len(LEAKS)} passed, " in said
    assert result.returncode == 1
