# SPDX-License-Identifier: Apache-2.0
"""Owns what is learned of a hung process before it is killed, and the thread that writes to disk.

It decides nothing. Whatever may block for long (a record directory on a dead file system, memory
figures of a stuck process) runs in `SlowThread`, so that judging and killing never wait for it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils import procfs

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Evidence", "SlowThread", "inspect_process", "save_evidence"]

logger = logging.getLogger("nvrx")

_MAX_SAME_NAME = 1000
_STOPPED_STATES = frozenset("Tt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a hung process."""

    state: str
    wchan: str
    can_dump: bool
    rss_bytes: int | None = None
    stacks_path: str | None = None


def inspect_process(pid: int, dump_signal: int) -> Evidence:
    """Ask the kernel how a process does, and whether it can write its stacks.

    Args:
        pid: The process.
        dump_signal: The signal at which it writes them; 0 when it never offered to.
    """
    stat = procfs.read_stat(pid)
    state = stat.state if stat is not None else "?"
    can_dump = (
        dump_signal > 0 and state not in _STOPPED_STATES and procfs.catches_signal(pid, dump_signal)
    )
    return Evidence(state=state, wchan=procfs.wchan(pid) or "", can_dump=can_dump)


def save_evidence(
    directory: str, name: str, pid: int, evidence: Evidence, stacks: bytes
) -> tuple[int | None, str | None]:
    """Complete the evidence and write it to a new file; may block.

    Args:
        directory: Private directory of the record; nothing is written when empty.
        name: Name of the file without its ending.
        pid: The process.
        evidence: What is known so far.
        stacks: What the process wrote.

    Returns:
        Its resident memory in bytes, and the file's path; None for what could not be had.
    """
    memory = procfs.memory(pid)
    rss_bytes = None if memory is None else memory.rss
    text = (
        f"pid {pid} state {evidence.state} wchan {evidence.wchan or '-'} rss_bytes {rss_bytes}\n"
        f"{'' if stacks else 'no stacks: the process is stopped or did not answer'}\n"
    )
    try:
        return rss_bytes, _write_new(directory, name, text.encode() + stacks)
    except OSError as exc:
        logger.warning("cannot write evidence into %s: %s", directory, exc)
        return rss_bytes, None


def _write_new(directory: str, name: str, data: bytes) -> str | None:
    if not directory:
        return None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for attempt in range(_MAX_SAME_NAME):
        suffix = f".{attempt}" if attempt else ""
        path = f"{directory}/{name}{suffix}.txt"
        try:
            fd = os.open(path, flags, 0o600)
        except FileExistsError:
            continue
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
        return path
    return None


class SlowThread:
    """Runs jobs that may block, one after another, and hands their results to the loop.

    The thread starts with the first job. It is a daemon: a job that never returns holds up no
    exit. `fileno` becomes readable when results wait; `collect` runs their callbacks.
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None]
        self._jobs = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Reentrant: a signal handler may call `wake` in the middle of `close`.
        self._write_lock = threading.RLock()

    def fileno(self) -> int:
        """Return a descriptor that is readable while results wait."""
        return self._read_fd

    def submit(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run `job` in the thread, later `done(result)` in the thread that calls `collect`.

        Args:
            job: May block; an exception is logged and gives None.
            done: Takes the result.

        Raises:
            RuntimeError: The system gives no thread; the job waits for one that a later call gets.
        """
        self._jobs.put((job, done))
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="nvrx-slow", daemon=True)
            thread.start()  # RuntimeError at the limit of threads: the next job tries again
            self._thread = thread

    def wake(self) -> None:
        """Make `fileno` readable; from any thread and from a signal handler, at any time."""
        with self._write_lock:
            if self._write_fd < 0:
                return  # closed, and the number may be somebody else's by now
            try:
                os.write(self._write_fd, b"x")
            except BlockingIOError:
                return  # full means that there is plenty of reason to wake up

    def collect(self) -> None:
        """Run the callbacks of finished jobs."""
        try:
            os.read(self._read_fd, 4096)
        except BlockingIOError:
            return
        while not self._results.empty():
            done, result = self._results.get()
            done(result)

    def close(self, timeout_s: float = 0.5) -> None:
        """Let the waiting jobs finish, within limits."""
        if self._thread is None:
            with self._write_lock:
                write_fd, self._write_fd = self._write_fd, -1
                if write_fd >= 0:
                    os.close(write_fd)
                    os.close(self._read_fd)
            return
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._thread = None
            self.close()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            try:
                result = job()
            except Exception:
                logger.exception("a job of the rank monitor failed")
                result = None
            self._results.put((done, result))
            self.wake()
