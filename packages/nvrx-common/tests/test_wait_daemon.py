# SPDX-License-Identifier: Apache-2.0
"""Waiting ends with the last process, at once, and never waits for the wrong one."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils import wait_daemon as wait_program
from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError
from nvidia_resiliency_ext.shared_utils.wait_daemon import (
    read_pids_from_file,
    wait_daemon,
    wait_for_pids,
)

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return what starts a process that sleeps; all are killed afterwards."""
    made: list[subprocess.Popen[bytes]] = []

    def begin() -> "subprocess.Popen[bytes]":
        made.append(subprocess.Popen(["sleep", "60"]))
        return made[-1]

    yield begin
    for process in made:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("content", "pids"),
    [
        (b"12\n34\n", [12, 34]),
        (b"12", [12]),
        (b" 12 \n\nx\n-3\n4 5\n0x7\n7\n", [12, 7]),
        (b"0\n99999999999999999999\n\xff\xfe\n\xd9\xa3\n8\n", [8]),
        (b"000000000012\n00\n9" + b"0" * 5000 + b"\n0" + b"1" * 5000 + b"\n8\n", [12, 8]),
        (b"", []),
    ],
)
def test_numbers_of_a_file(content: bytes, pids: list[int], tmp_path: Path) -> None:
    """One decimal number per line counts, everything else does not."""
    path = tmp_path / "pids"
    path.write_bytes(content)
    assert read_pids_from_file(str(path)) == pids


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A file that is missing, a directory, a FIFO or no path at all has no numbers."""
    os.mkfifo(tmp_path / "fifo")
    for name in ("nothing", "", "fifo", "nul\0"):
        assert read_pids_from_file(f"{tmp_path}/{name}") == []


def test_waits_for_the_last(start: Start, each_watch: str) -> None:
    """It returns soon after the last process has ended, and leaves the list as it is."""
    processes = [start() for _ in range(3)]
    pids = [each.pid for each in processes]
    ended: list[float] = []
    waiter = threading.Thread(target=lambda: (wait_for_pids(pids), ended.append(time.monotonic())))
    waiter.start()
    for process in processes[:2]:
        process.kill()
        process.wait()
    waiter.join(0.2)
    assert waiter.is_alive()
    # A zombie has ended: it is reaped only after the waiter has returned.
    processes[2].kill()
    killed = time.monotonic()
    waiter.join(20)
    assert ended[0] - killed < 5.0
    assert len(pids) == 3


def test_nothing_to_wait_for(start: Start, each_watch: str) -> None:
    """Ended, impossible and own numbers are not waited for."""
    process = start()
    process.kill()
    wait_for_pids([process.pid, 0, -5, 10**30, os.getpid()])
    process.wait()
    wait_for_pids([process.pid])
    wait_for_pids([])


def test_time_is_up(start: Start, each_watch: str) -> None:
    """After the timeout the processes that still run are named."""
    process = start()
    with pytest.raises(DeadlineExceededError, match=str(process.pid)):
        wait_for_pids([process.pid], 0.05)


def test_process_of_another_user_counts(
    start: Start, each_watch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that /proc hides, and that may not be signalled, is alive until it is gone."""
    process, kill = start(), os.kill

    def hidden(pid: int) -> None:
        raise ProcessLookupError

    def forbidden(pid: int, sig: int) -> None:
        if process.poll() is not None:
            raise ProcessLookupError
        raise PermissionError

    monkeypatch.setattr(wait_program, "PidHandle", hidden)
    monkeypatch.setattr(os, "kill", forbidden)
    with pytest.raises(DeadlineExceededError):
        wait_for_pids([process.pid], 0.05)
    kill(process.pid, signal.SIGKILL)
    wait_for_pids([process.pid], 20)
    monkeypatch.undo()


def test_recycled_number(start: Start, tmp_path: Path) -> None:
    """A process that is younger than the file is another one under an old number."""
    process = start()
    path = tmp_path / "pids"
    path.write_text(f"{process.pid}\n")
    with pytest.raises(DeadlineExceededError):
        wait_daemon(str(path), 0.05)
    before = time.time() - 100
    os.utime(path, (before, before))
    wait_daemon(str(path), 0.05)


def test_program(start: Start, tmp_path: Path) -> None:
    """The program exits 0 when all have ended, and 1 with a line where it cannot wait."""
    command = [sys.executable, "-m", wait_program.__name__]
    process = start()
    path = tmp_path / "pids"
    path.write_text(f"monitor\n{process.pid}\n")

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=150, check=False
        )
        return done.returncode, done.stderr

    code, err = run(str(path), "--timeout", "0.1")
    assert (code, str(process.pid) in err) == (1, True)
    process.kill()
    assert run(str(path)) == (0, "")
    path.write_text("no number\n")
    assert run(str(path)) == (0, "")
    path.unlink()
    code, err = run(str(path))
    assert (code, str(path) in err) == (1, True)
    assert run(str(path), "--timeout", "nan")[0] == 2
