# SPDX-License-Identifier: Apache-2.0
"""What /proc says about real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import start_child

NO_SUCH_PID = 2**22 + 1  # above the largest number that Linux gives out


def test_stat_of_a_child_names_parent_group_and_session() -> None:
    """A child with its own session leads it and its group, and its start time stays the same."""
    with start_child(["sleep", "60"]) as child:
        stat = procfs.read_stat(child.pid)
        assert stat is not None
        assert (stat.ppid, stat.pgid, stat.sid) == (os.getpid(), child.pid, child.pid)
        assert stat.running
        again = procfs.read_stat(child.pid)
        assert again is not None
        assert again.start_ticks == stat.start_ticks > 0


def test_command_with_blanks_and_parentheses_is_read_right() -> None:
    """The fields after a command are found even if the command looks like the fields."""
    line = b"42 (a) R 1 2 (x) S 7 8 9 " + b" ".join(b"%d" % n for n in range(10, 30))
    stat = procfs._parse_stat(42, line)
    assert stat is not None
    assert (stat.comm, stat.state, stat.ppid, stat.pgid, stat.sid) == ("a) R 1 2 (x", "S", 7, 8, 9)
    assert stat.start_ticks == 25


def test_garbage_is_no_process() -> None:
    """A line that is cut short is not taken for a process."""
    assert procfs._parse_stat(1, b"1 (x) S 2") is None
    assert procfs._parse_stat(1, b"") is None


def test_zombie_is_not_running() -> None:
    """A process that ended but was not reaped exists and does not run."""
    with start_child(["sh", "-c", "exit 0"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        stat = procfs.read_stat(child.pid)
        assert stat is not None
        assert stat.state == "Z"
        assert not procfs.is_running(child.pid)
        assert procfs.pids_in_groups([child.pid]) == []


def test_process_that_does_not_exist_is_answered_not_raised() -> None:
    """Every reader has an answer for a process that is gone."""
    assert procfs.read_stat(NO_SUCH_PID) is None
    assert procfs.environ_value(NO_SUCH_PID, "PATH") is None
    assert procfs.memory(NO_SUCH_PID) is None
    assert procfs.wchan(NO_SUCH_PID) is None
    assert not procfs.is_running(NO_SUCH_PID)
    assert not procfs.maps_name(NO_SUCH_PID, "libc")
    assert not procfs.catches_signal(NO_SUCH_PID, signal.SIGTERM)


def test_other_errors_are_raised() -> None:
    """Running out of descriptors does not make a living process look dead."""
    program = (
        "import os, resource\n"
        "from nvidia_resiliency_ext.shared_utils import procfs\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))\n"
        "try:\n"
        "    procfs.is_running(os.getpid())\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=150
    )
    assert result.stdout == "Too many open files\n"


def test_environment_finds_exactly_the_processes_that_carry_it() -> None:
    """A scan finds each process with the variable and value, also a long one, and no other."""
    value = f"run-{os.getpid()}-{time.monotonic_ns()}" + "x" * 100_000
    marked = dict(os.environ, NVRX_RUN_ID=value)
    longer = dict(os.environ, NVRX_RUN_ID=value + "y")
    prefixed = dict(os.environ, XNVRX_RUN_ID=value)
    with (
        start_child(["sh", "-c", "sleep 60 & wait"], env=marked, die_with_parent=True) as child,
        start_child(["sleep", "60"], env=longer, die_with_parent=True),
        start_child(["sleep", "60"], env=prefixed, die_with_parent=True),
    ):
        deadline = time.monotonic() + 20.0
        found: list[int] = []
        while len(found) < 2 and time.monotonic() < deadline:
            found = [each.pid for each in procfs.processes_with_environ("NVRX_RUN_ID", value)]
        assert child.pid in found
        assert sorted(found) == sorted(procfs.pids_in_groups([child.pid]))
        assert procfs.environ_value(child.pid, "NVRX_RUN_ID") == value
        assert procfs.environ_value(child.pid, "NVRX_RUN") is None
        child.stop(0.0)
        # The end of the grandchild, which was killed with its group, is not ours to wait for.
        while procfs.processes_with_environ("NVRX_RUN_ID", value):
            assert time.monotonic() < deadline


def test_scan_leaves_this_process_out() -> None:
    """The caller itself is not among the processes that are found by its own environment."""
    # The environment may have changed since the start, which /proc does not show.
    name, value = next(
        (name, value)
        for name, value in os.environ.items()
        if value and procfs.environ_value(os.getpid(), name) == value
    )
    found = procfs.processes_with_environ(name, value)
    assert os.getpid() not in [each.pid for each in found]


def test_scan_survives_processes_that_come_and_go() -> None:
    """Processes that vanish during a scan are simply not found."""
    with start_child(["sh", "-c", "while :; do /bin/true; done"], die_with_parent=True):
        for _ in range(100):
            procfs.processes_with_environ("NVRX_NOBODY_SETS_THIS", "1")
            procfs.pids_in_groups([1])


@pytest.fixture
def handled_signal() -> Iterator[signal.Signals]:
    """Give a signal that this process handles."""
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    yield signal.SIGUSR2
    signal.signal(signal.SIGUSR2, before)


def test_memory_maps_and_signals_of_this_process(handled_signal: signal.Signals) -> None:
    """Sizes are ordered as their definitions demand; maps and handlers are those we have."""
    memory = procfs.memory(os.getpid())
    assert memory is not None
    assert memory.rss > 0
    if memory.pss is not None and memory.uss is not None:
        assert memory.uss <= memory.pss <= memory.rss
    executable = os.path.basename(os.path.realpath(sys.executable))
    assert procfs.maps_name(os.getpid(), executable)
    assert not procfs.maps_name(os.getpid(), "no-such-library.so")
    assert procfs.catches_signal(os.getpid(), handled_signal)
    assert not procfs.catches_signal(os.getpid(), signal.SIGKILL)
    assert procfs.wchan(os.getpid()) is not None


def test_boot_and_namespace_have_names() -> None:
    """The names that identify a process beyond its number are there and stay the same."""
    assert procfs.is_available()
    assert procfs.boot_id() == procfs.boot_id() != ""
    assert procfs.pid_namespace().startswith("pid:")
