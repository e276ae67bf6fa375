# SPDX-License-Identifier: Apache-2.0
"""How the programs end: with their exit code, though a thread may still be inside torch."""

import subprocess
import sys

import pytest

from nvidia_resiliency_ext.fault_tolerance._process.program_end import end_program

LEAVES = """
import atexit, os, sys, threading, time
from nvidia_resiliency_ext.fault_tolerance._process.program_end import end_program

class AtItsEnd:
    def __del__(self, write=os.write):
        write(1, b"taken down ")

at_its_end = AtItsEnd()
atexit.register(print, "at exit", end=" ", flush=True)
if sys.argv[1] == "thread":
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("said", end=" ")
end_program(7, is_own=True)
"""

CONNECTS = """
import os, socket, sys, threading, time
from datetime import timedelta
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
from torch.distributed import TCPStore
from nvidia_resiliency_ext.fault_tolerance._process.program_end import end_program

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(4)

slow = Slow()
with socket.socket() as nobody:
    nobody.bind(("127.0.0.1", 0))
    options = dict(is_master=False, wait_for_workers=False, timeout=timedelta(seconds=0.3))
    arguments = ("127.0.0.1", nobody.getsockname()[1])
    threading.Thread(target=TCPStore, args=arguments, kwargs=options, daemon=True).start()
    end_program(7, is_own=True)
"""


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    ("what", "said"), [("thread", "said at exit "), ("none", "said at exit taken down ")]
)
def test_what_programs_ask_for_at_the_end_is_done(what: str, said: str) -> None:
    """Output and exit functions are not lost; the interpreter goes only when no thread is left."""
    ended = run(LEAVES, what)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, said, "")


@pytest.mark.slow
def test_a_thread_inside_torch_does_not_abort_the_program() -> None:
    """A program whose thread is still connecting to a store leaves with its own exit code."""
    ended = run(CONNECTS)
    assert (ended.returncode, ended.stderr) == (7, "")


def test_a_callers_process_goes_on() -> None:
    """Whoever calls a program's `main` is told the exit code, whatever threads there are."""
    with pytest.raises(SystemExit) as left:
        end_program(3, is_own=False)
    assert left.value.code == 3
