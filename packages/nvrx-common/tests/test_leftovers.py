# SPDX-License-Identifier: Apache-2.0
"""The guard against leftovers, which all packages' tests have, does fail tests."""

import os
import subprocess
import sys
from pathlib import Path

import leftovers
import pytest

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


@pytest.mark.parametrize("kind", LEAKS)
def test_leak_fails_the_test(kind: str, tmp_path: Path) -> None:
    """A test that leaves this behind fails, and the message says what it left."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    program = PREAMBLE.format(leak=LEAKS[kind]) + EPILOGUE
    (tmp_path / "test_leak.py").write_text(program)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(leftovers.__file__).parent)},
    )
    assert "the test left behind" in result.stdout, result.stdout + result.stderr
    assert "test_leak.py::test_leak" in result.stdout
    assert result.returncode == 1
