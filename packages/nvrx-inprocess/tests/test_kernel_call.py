# SPDX-License-Identifier: Apache-2.0
"""How a thread waits, by the kernel's account, also after it was stopped in its wait."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest

from nvidia_resiliency_ext.inprocess._unblock.waits import (
    Wait,
    kernel_wait,
    own_memory,
    wait_of,
)

DEADLINE_S = 60.0
POLL = """
import select, socket
one, other = socket.socketpair()
poll = select.poll()
poll.register(one, select.POLLIN)
poll.poll(60_000)
"""
PROGRAMS = {
    Wait.POLL: POLL,
    Wait.FUTEX: "import threading; threading.Event().wait(60)",
    None: "import time; time.sleep(60)",
}


@pytest.mark.parametrize("wait", [Wait.POLL, Wait.FUTEX])
def test_a_wait_that_was_held_up_is_the_same_wait(wait: Wait) -> None:
    """SIGSTOP and SIGCONT let a wait go on in another system call: it is still found."""
    with subprocess.Popen([sys.executable, "-c", PROGRAMS[wait]]) as process:
        try:
            before = _line_when(process.pid, lambda line: _wait_of(line)[0] is wait)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            process.send_signal(signal.SIGCONT)
            number = before.split()[0]
            after = _line_when(process.pid, lambda line: line.split()[0] not in {number, "running"})
            assert _wait_of(after) == _wait_of(before)
        finally:
            process.kill()


def test_a_sleep_that_was_held_up_is_no_wait() -> None:
    """What else goes on in that call is not taken for one of torch's waits."""
    with subprocess.Popen([sys.executable, "-c", PROGRAMS[None]]) as process:
        try:
            asleep = {"x86_64": "230", "aarch64": "115"}[os.uname().machine]
            _line_when(process.pid, lambda line: line.split()[0] == asleep)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            process.send_signal(signal.SIGCONT)
            after = _line_when(process.pid, lambda line: line.split()[0] != "running")
            assert _wait_of(after)[0] is None
        finally:
            process.kill()


def test_running_thread_is_in_no_wait() -> None:
    """A thread at work, and one that is not there, wait for nothing."""
    assert kernel_wait(os.getpid())[0] is None
    assert kernel_wait(2**22 + 1) == (None, 0, 0)


def test_memory_is_read_and_what_is_gone_is_an_error() -> None:
    """Bytes of this process are read as they are; where there are none that is an error."""
    text = ctypes.create_string_buffer(b"here it is")
    assert own_memory(ctypes.addressof(text), 7) == b"here it"
    for gone in (0, 2**64 - 8, 2**70):
        with pytest.raises(OSError, match=r".+"):
            own_memory(gone, 8)


def _wait_of(line: str) -> tuple[Wait | None, int, int]:
    number, *arguments = line.split()[:7]
    return wait_of((int(number), *(int(each, 16) for each in arguments)) if arguments else ())


def _line_when(pid: int, holds) -> str:
    """Return what the kernel says of a process when that holds."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            line = file.read()
        if holds(line):
            return line
        assert time.monotonic() < deadline, line
