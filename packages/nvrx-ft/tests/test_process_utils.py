# SPDX-License-Identifier: Apache-2.0
"""Waiting for processes, ending leftovers, and the exception hook of ranks."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import shared_memory

import pytest

from nvidia_resiliency_ext.fault_tolerance import utils
from nvidia_resiliency_ext.fault_tolerance._core import processes

SLEEPER = [sys.executable, "-S", "-c", "print('up', flush=True); import time; time.sleep(600)"]


@contextlib.contextmanager
def running(argv, **options):
    """A process in a group of its own that has said that it is up; killed at the end."""
    child = subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, start_new_session=True, **options
    )
    try:
        child.first_line = child.stdout.readline().strip()
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(30)
        child.stdout.close()


def group_becomes(pgid, condition):
    """Wait until the description of a process group meets the condition."""
    give_up_at = time.monotonic() + 30
    while not condition(found := utils.get_processes_by_pgids([pgid])):
        assert time.monotonic() < give_up_at, found
        time.sleep(0.01)


def test_zombies_are_not_alive():
    """A process is alive until it has ended, whether or not it was reaped."""
    with running(SLEEPER) as child:
        assert utils.is_process_alive(child.pid)
        with pytest.raises(TimeoutError, match=f"process {child.pid} has not ended"):
            utils.wait_until_process_terminated(child.pid, timeout=0.05)
        # Without a time it is waited for, however long that takes.
        killer = threading.Timer(0.2, child.kill)
        killer.start()
        utils.wait_until_process_terminated(child.pid, timeout=0)
        killer.join()
        assert child.returncode is None
        assert not utils.is_process_alive(child.pid)
    utils.wait_until_process_terminated(child.pid)


def test_waiting_for_events():
    """All events must be set within one time limit; those missing are named."""
    context = multiprocessing.get_context("spawn")
    events = [context.Event(), context.Event()]
    events[0].set()
    with pytest.raises(TimeoutError, match=r"1 of 2 events .*\[1\]"):
        utils.wait_for_mp_events(events, timeout=0.05)
    events[1].set()
    utils.wait_for_mp_events(events, timeout=0)
    thread_event = threading.Event()
    thread_event.set()
    utils.wait_for_mp_events([thread_event])


def test_only_given_groups_are_ended():
    """Members of the groups are killed, and nobody else."""
    with running(SLEEPER) as victim, running(SLEEPER) as other:
        utils.terminate_mp_processes({victim.pid})
        assert victim.wait(30) == -signal.SIGKILL
        assert other.poll() is None


def test_parents_can_be_given_too():
    """With parents given, only their children in the groups are killed."""
    with running(SLEEPER) as child:
        utils.terminate_mp_processes({child.pid}, {1})
        assert child.poll() is None
        utils.terminate_mp_processes({child.pid}, {os.getpid()})
        assert child.wait(30) == -signal.SIGKILL


def test_own_group_is_never_ended():
    """Naming our own group, by mistake, ends nobody."""
    program = (
        "import os, subprocess, sys;"
        "from nvidia_resiliency_ext.fault_tolerance.utils import terminate_mp_processes;"
        "child = subprocess.Popen(['sleep', '600']);"
        "terminate_mp_processes({os.getpgrp()});"
        "print(child.poll()); child.kill(); child.wait()"
    )
    with running([sys.executable, "-c", program]) as child:
        assert child.first_line == "None"
        assert child.wait(30) == 0


def test_resource_tracker_may_clean_up(monkeypatch):
    """Shared memory of a killed program is removed, because its tracker is not killed with it."""
    program = (
        "import time; from multiprocessing import shared_memory;"
        "print(shared_memory.SharedMemory(create=True, size=1).name, flush=True); time.sleep(600)"
    )
    with running([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as child:
        memory = shared_memory.SharedMemory(child.first_line)
        memory.close()
        multiprocessing.resource_tracker.unregister(f"/{child.first_line}", "shared_memory")
        # Between its fork and its exec a tracker cannot be told from the program.
        group_becomes(
            child.pid, lambda all_of: any("resource_tracker" in str(e["cmdline"]) for e in all_of)
        )
        # The tracker may still be starting.
        monkeypatch.setattr(processes, "_TRACKER_GRACE_S", 60.0)
        utils.terminate_mp_processes({child.pid})
        assert child.wait(30) == -signal.SIGKILL
        with pytest.raises(FileNotFoundError):
            shared_memory.SharedMemory(child.first_line)
        left = utils.get_processes_by_pgids({child.pid})
        assert all(entry["status"] == "zombie" for entry in left)


def test_list_of_processes():
    """The processes of a group are described, zombies too, and the caller only on request."""
    with running(SLEEPER) as child:
        [entry] = utils.get_processes_by_pgids([child.pid])
        assert entry["pid"] == entry["pgid"] == child.pid
        assert entry["ppid"] == os.getpid()
        assert entry["cmdline"] == SLEEPER
        group_becomes(child.pid, lambda all_of: all_of[0]["status"] == "sleeping")
        assert entry["name"]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        [entry] = utils.get_processes_by_pgids([child.pid])
        assert (entry["status"], entry["cmdline"]) == ("zombie", [])
    own = {entry["pid"] for entry in utils.get_processes_by_pgids([os.getpgrp()])}
    everyone = utils.get_processes_by_pgids([os.getpgrp()], exclude_launcher=False)
    assert os.getpid() not in own
    assert os.getpid() in {entry["pid"] for entry in everyone}


class Base:
    """A class with a method to replace."""

    def greet(self):
        """The original."""
        return "base"


class Derived(Base):
    """A class that only inherits it."""


@pytest.mark.parametrize("target", [Base, Derived, Base(), os])
def test_patched_method(target):
    """The attribute is replaced inside the block only, and an inherited one is inherited again."""
    name = "getpid" if target is os else "greet"
    before, own = getattr(target, name), dict(vars(target))
    with utils.patched_method(target, name, lambda *_: "new"):
        assert getattr(target, name)() == "new"
    assert getattr(target, name) == before
    with contextlib.suppress(KeyError), utils.patched_method(target, name, None):
        raise KeyError
    assert getattr(target, name) == before
    assert dict(vars(target)) == own


def test_patched_method_must_exist():
    """A misspelt name is an error."""
    with pytest.raises(AttributeError), utils.patched_method(Base, "gret", None):
        pass


HOOKED = """
import atexit, sys
from nvidia_resiliency_ext.fault_tolerance.utils import install_exception_handler
install_exception_handler()
install_exception_handler()
atexit.register(print, "exit handlers ran")
print("before")
{action}
"""


@pytest.mark.parametrize(
    ("action", "rank", "code", "output", "errors"),
    [
        ("raise ValueError('broken')", "3", 1, "before\n", ["[rank 3] ValueError: broken"]),
        ("1 / 0", None, 1, "before\n", ["[rank unknown] ZeroDivisionError"]),
        (
            "raise KeyboardInterrupt",
            "3",
            -signal.SIGINT,
            "before\nexit handlers ran\n",
            ["KeyboardInterrupt"],
        ),
        ("sys.exit(5)", "3", 5, "before\nexit handlers ran\n", []),
        ("pass", "3", 0, "before\nexit handlers ran\n", []),
    ],
)
def test_exception_hook(action, rank, code, output, errors):
    """An uncaught exception ends the rank at once with its traceback; nothing else changes."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    if rank is not None:
        environment["RANK"] = rank
    result = subprocess.run(
        [sys.executable, "-c", HOOKED.format(action=action)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == code, result.stderr
    assert result.stdout == output
    assert all(error in result.stderr for error in errors)
    if "raise ValueError" in action:
        assert "[rank 3] Traceback (most recent call last):" in result.stderr


def test_rank(clean_environment):
    """The rank is that of the environment when there is no process group."""
    clean_environment.setenv("RANK", "4")
    assert utils.get_rank() == 4
    clean_environment.delenv("RANK")
    with pytest.raises(RuntimeError):
        utils.get_rank()


def test_cuda_context_without_a_driver():
    """Without a CUDA context there is nothing to reduce, and none is made."""
    assert utils.reduce_cuda_ctx_size() is None
