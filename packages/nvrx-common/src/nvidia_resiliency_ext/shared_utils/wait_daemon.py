# SPDX-License-Identifier: Apache-2.0
"""Waits until the processes of a pid file have ended; it signals nobody.

``python -m nvidia_resiliency_ext.shared_utils.wait_daemon PIDFILE`` runs after a training command
under Slurm, so that a monitor process can finish before the step ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterable, Sequence

from .children import PidHandle, pidfd_available, wait_readable
from .clock import Deadline
from .console import write_err
from .errors import DeadlineExceededError
from .os_utils import read_regular_file

__all__ = ["main", "read_pids_from_file", "wait_daemon", "wait_for_pids"]

_LARGEST_FILE = 1 << 20
_LARGEST_PID = 1 << 22  # the kernel's own limit
_MOST_DIGITS = 9
_TICK_S = 0.02
_CLOCK_SLACK_S = 2.0


def read_pids_from_file(pidfile: str) -> list[int]:
    """Return the process numbers in `pidfile`, one per line; other lines are ignored.

    A file that cannot be read gives an empty list.
    """
    try:
        text = read_regular_file(pidfile, _LARGEST_FILE, follows_symlink=True)
    except (OSError, ValueError):
        return []
    numbers = (line.strip().lstrip(b"0") for line in text.splitlines())
    return [
        int(number)
        for number in numbers
        # Python refuses to read a number of thousands of digits.
        if number.isdigit() and len(number) <= _MOST_DIGITS and int(number) <= _LARGEST_PID
    ]


def wait_for_pids(pids: Iterable[int], timeout_s: float | None = None) -> None:
    """Wait until none of `pids`, but for our own, runs any more: `timeout_s` seconds at most.

    A zombie has ended. A number that another process takes over meanwhile is not waited for.

    Raises:
        DeadlineExceededError: Some still ran when the time was up; the message names them.
    """
    _wait_for(list(pids), Deadline.after(timeout_s))


def wait_daemon(pidfile: str, timeout_s: float | None = None) -> None:
    """Wait until no process of `pidfile` runs any more: `timeout_s` seconds at most.

    A process that started after the file was written is another one under an old number.

    Raises:
        SystemExit: With 1, after a line on stderr: there is no such file.
        DeadlineExceededError: As `wait_for_pids`.
    """
    try:
        written = os.stat(pidfile).st_mtime
    except (OSError, ValueError) as error:
        write_err(f"the pid file {pidfile!r} cannot be read: {error}\n")
        sys.exit(1)
    deadline = Deadline.after(timeout_s)
    _wait_for(read_pids_from_file(pidfile), deadline, started_before=written + _CLOCK_SLACK_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv` (None: the process's own) and return its exit code."""
    from argparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m nvidia_resiliency_ext.shared_utils.wait_daemon",
        description="Wait until the processes named in a pid file have ended.",
        epilog="Exit code 1: there is no such file, or a process still runs after --timeout.",
    )
    parser.add_argument("pidfile", help="file with one process number per line")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="wait at most S seconds")
    options = parser.parse_args(argv)
    try:
        wait_daemon(options.pidfile, options.timeout)
    except DeadlineExceededError as error:
        write_err(f"{error}\n")
        return 1
    return 0


def _wait_for(pids: list[int], deadline: Deadline, started_before: float | None = None) -> None:
    # All are held before the first is waited for, so that no number can change hands meanwhile.
    held = [each for each in map(_hold, dict.fromkeys(pids)) if each is not None]
    try:
        late = [
            str(each.pid)
            for each in held
            if not _is_newer(each, started_before) and not each.wait(deadline.remaining())
        ]
    finally:
        for each in held:
            each.close()
    if late:
        raise DeadlineExceededError(f"still running: {', '.join(late)}")


def _hold(pid: int) -> PidHandle | _Hidden | None:
    if pid == os.getpid() or not 0 < pid <= _LARGEST_PID:
        return None
    with contextlib.suppress(ProcessLookupError):
        return PidHandle(pid)
    with contextlib.suppress(ProcessLookupError):
        return _Hidden(pid) if _is_hidden(pid) else None
    return None


def _is_newer(held: PidHandle | _Hidden, moment: float | None) -> bool:
    if moment is None or isinstance(held, _Hidden):
        return False
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    age = since_boot - held.start_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age > moment


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds >= 0:
        raise ValueError(text)
    return seconds


def _is_hidden(pid: int) -> bool:
    """Return whether a process exists that /proc does not show us, as it is another user's."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False  # ours, so that /proc has told the truth: a zombie


class _Hidden:
    """A hold on a process that `_is_hidden`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid) if pidfd_available() else -1

    def wait(self, timeout_s: float) -> bool:
        deadline = Deadline.after(timeout_s)
        if self._pidfd >= 0:
            return wait_readable(self._pidfd, deadline.timeout())
        while _is_hidden(self.pid) and not deadline.expired():
            select.select([], [], [], min(_TICK_S, deadline.remaining()))
        return not _is_hidden(self.pid)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)


if __name__ == "__main__":
    sys.exit(main())
