# SPDX-License-Identifier: Apache-2.0
"""How the programs end: with their exit code, though a thread may still be inside torch."""

import subprocess
import sys

import pytest

from nvidia_resiliency_ext.fault_tolerance._core.processes import end_program

LEAVES = """
import atexit, os, sys, threading, time
from nvidia_resiliency_ext.fault_tolerance._core.processes import end_program

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
from nvidia_resiliency_ext.fault_tolerance._core.processes import end_program

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(4)

slow = Slow()
# Where this thread stands still, the other one may have given up before the end.
threading.excepthook = lambda _: None
with socket.socket() as nobody:
    nobody.bind(("127.0.0.1", 0))
    options = dict(is_master=False, wait_for_workers=False, timeout=timedelta(seconds=0.3))
    arguments = ("127.0.0.1", nobody.getsockname()[1])
    threading.Thread(target=TCPStore, args=arguments, kwargs=options, daemon=True).start()
    end_program(7, is_own=True)
"""


IS_PARKED = """
import atexit, ctypes, os, sys, threading, time
from nvidia_resiliency_ext.shared_utils.abandonable import ParkedAtExit

class Waits(ParkedAtExit):
    def run(self):
        self.begin()
        inside.set()
        ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
        os.write(1, b"came back ")

inside = threading.Event()
reading, writing = os.pipe()

thread = Waits("waits")
if sys.argv[1] == "exit":
    # Done last, for it is asked for first: what the thread waits for comes, and so would it.
    atexit.register(os.write, 1, b"the end")
    atexit.register(time.sleep, 0.5)
    atexit.register(os.write, writing, b"x")
    thread.start()
    inside.wait()
    sys.exit(5)
thread.start()
os.write(writing, b"x")
thread.join()
"""

BEGINS_LATE = """
import atexit, os, sys, threading
from nvidia_resiliency_ext.shared_utils.abandonable import ParkedAtExit

class Late(ParkedAtExit):
    def run(self):
        go_on.wait()
        self.begin()
        os.write(1, b"in native code ")

go_on = threading.Event()
atexit.register(lambda: os.write(1, b"the end"))
thread = Late("late")
# Asked for later, so done before: what parks threads has been there by then.
atexit.register(lambda: (go_on.set(), thread.join(60)))
thread.start()
sys.exit(5)
"""

GIVES_UP = """
import os, socket, sys, threading, time
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
from nvidia_resiliency_ext.fault_tolerance._rendezvous import store

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(4)

slow = Slow()
listener = socket.create_server(("127.0.0.1", 0))
def die():
    with listener, listener.accept()[0]:
        pass
threading.Thread(target=die).start()
try:
    store.connect(*listener.getsockname(), "job:", b"secret", 1.0, 1.0)
except store.StoreLostError as error:
    print(error)
    sys.exit(5)
"""


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.parametrize(
    ("what", "said"), [("thread", "said at exit "), ("none", "said at exit taken down ")]
)
@pytest.mark.no_second_try
def test_what_programs_ask_for_at_the_end_is_done(what: str, said: str) -> None:
    """Output and exit functions are not lost; the interpreter goes only when no thread is left."""
    ended = run(LEAVES, what)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, said, "")


@pytest.mark.slow
def test_a_thread_inside_torch_does_not_abort_the_program() -> None:
    """A program whose thread is still connecting to a store leaves with its own exit code."""
    ended = run(CONNECTS)
    assert (ended.returncode, ended.stderr) == (7, "")


@pytest.mark.parametrize(("how", "left"), [("exit", (5, "the end")), ("waits", (0, "came back "))])
def test_a_thread_in_native_code_stands_still_at_the_end(how: str, left: tuple[int, str]) -> None:
    """It does not come back while a process that is not ours is taken down, and else it does."""
    ended = run(IS_PARKED, how)
    assert (ended.returncode, ended.stdout, ended.stderr) == (*left, "")


def test_a_thread_that_begins_at_the_end_does_not_enter_native_code() -> None:
    """On a busy machine a thread may first run when the interpreter is being taken down."""
    ended = run(BEGINS_LATE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, "the end", "")


@pytest.mark.slow
def test_a_callers_process_ends_well_though_torch_still_connects() -> None:
    """Its store died while it connected: a program of somebody else leaves with its own code."""
    ended = run(GIVES_UP)
    assert (ended.returncode, ended.stderr) == (5, "")


def test_a_callers_process_goes_on() -> None:
    """Whoever calls a program's `main` is told the exit code, whatever threads there are."""
    with pytest.raises(SystemExit) as left:
        end_program(3, is_own=False)
    assert left.value.code == 3
