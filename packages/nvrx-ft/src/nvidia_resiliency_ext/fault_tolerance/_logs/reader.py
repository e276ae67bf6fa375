# SPDX-License-Identifier: Apache-2.0
"""Make and read the pipes of workers; no worker waits for a log."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.event_loop import WakeUp

if TYPE_CHECKING:
    from .lines import LineAssembler
    from .outlet import Outlet, Target


LARGEST_BYTES = 1 << 20
SMALLEST_BYTES = 1 << 16
# Of the 64 MiB that the kernel gives to all pipes of a user who is not root. Beyond it every new
# pipe of that user, of any program, would hold two pages only.
_SHARE_BYTES = 16 << 20


def pipe_bytes(workers: int) -> int:
    """Return how much the pipe of each of so many workers should hold: a power of two."""
    size = LARGEST_BYTES
    while size > SMALLEST_BYTES and size * max(1, workers) > _SHARE_BYTES:
        size //= 2
    return size


def open_pipe(size: int = LARGEST_BYTES) -> tuple[int, int]:
    """Return a pipe as (reading end that never waits, writing end) that holds about `size` bytes.

    What it holds is what a worker can still write while the launcher does not read. Where the
    kernel refuses the size it is halved, down to what the pipe has anyway.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    while size > SMALLEST_BYTES:
        with contextlib.suppress(OSError):
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, size)
            break
        size //= 2
    return reading, writing


_FULL_PIPE_READS = 32


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """How pipes are read.

    Attributes:
        read_bytes: The most that is read from a pipe before the next one has its turn. Larger
            blocks take twice the time: fresh pages are mapped for each.
        quiet_bytes: A round of less than this is followed by a pause, so that a worker that
            writes line by line does not wake the launcher for each.
        pause_s: That pause.
        behind_bytes: When so much waits to be written a round is followed by a moment for the
            writer, which has the same processor or interpreter.
        behind_s: That moment; short, for it slows workers down.
        drain_s: How long a pipe is read whose worker is dead but whose writing end somebody holds.
    """

    read_bytes: int = 64 << 10
    quiet_bytes: int = 16 << 10
    pause_s: float = 0.01
    behind_bytes: int = 8 << 20
    behind_s: float = 0.002
    drain_s: float = 2.0


@dataclass(slots=True)
class _Pipe:
    """One pipe being read."""

    target: Target
    lines: LineAssembler


class MultiplexingReaderThread(threading.Thread):
    """Reads pipes until they end; the methods that give orders may be called from any thread.

    A pipe belongs to a log, its `target`; `outlet` is the object that writes lines, `config` has
    times and sizes.
    """

    def __init__(self, outlet: Outlet, config: ReaderConfig | None = None) -> None:
        super().__init__(name="nvrx-log-reader", daemon=True)
        self._outlet = outlet
        self._config = config or ReaderConfig()
        self._lock = threading.Lock()  # guards the two fields below
        self._orders: collections.deque[Callable[[], None]] = collections.deque()
        self._is_over = False
        self._wake_up = WakeUp()
        self._epoll = select.epoll()
        self._epoll.register(self._wake_up, select.EPOLLIN)
        self._pause = select.poll()
        self._pause.register(self._wake_up, select.POLLIN)
        self._pipes: dict[int, _Pipe] = {}
        self._targets: set[Target] = set()
        self._stops_at: float | None = None
        self._waiting_bytes = 0

    # Orders ----------------------------------------------------------------------------------

    def add(self, fd: int, lines: LineAssembler, target: Target) -> None:
        """Read the pipe `fd`, non-blocking and ours now, into `target`; close it at its end.

        `lines` assembles whole lines.
        """
        if not self._order(lambda: self._add(fd, _Pipe(target, lines))):
            os.close(fd)

    def end(self, target: Target) -> None:
        """Finish the log `target` when its pipes are closed, at the latest after `drain_s`."""
        at = time.monotonic() + self._config.drain_s
        self._order(lambda: self._end(target, at))

    def leave(self, target: Target) -> None:
        """Read what the pipes of `target` hold now, and close them even if a process has them."""
        self._order(lambda: self._leave(target))

    def stop(self, timeout_s: float | None = None) -> None:
        """Read every pipe to its end, within `timeout_s` (None: `drain_s`), and end the thread."""
        limit_s = self._config.drain_s if timeout_s is None else timeout_s
        at = time.monotonic() + limit_s
        self._order(lambda: self._stop_by(at))
        self.join(limit_s + 1.0)

    def _order(self, order: Callable[[], None]) -> bool:
        """Let the thread do something; False when it has ended."""
        with self._lock:
            if self._is_over:
                return False
            self._orders.append(order)
            self._wake_up.set()
        return True

    def _add(self, fd: int, pipe: _Pipe) -> None:
        self._pipes[fd] = pipe
        self._targets.add(pipe.target)
        pipe.target.pipes.add(fd)
        self._epoll.register(fd, select.EPOLLIN)

    def _end(self, target: Target, at: float) -> None:
        self._targets.add(target)
        target.ends_at = at
        self._check_end(target)

    def _leave(self, target: Target) -> None:
        self._end(target, time.monotonic())
        self._end_overdue()

    def _stop_by(self, at: float) -> None:
        self._stops_at = at
        for target in list(self._targets):
            self._end(target, at)

    # The thread ------------------------------------------------------------------------------

    def run(self) -> None:
        """Read until `stop` is called."""
        try:
            while self._stops_at is None or self._pipes:
                count = self._round()
                if self._stops_at is not None:
                    continue
                if self._waiting_bytes > self._config.behind_bytes:
                    self._pause.poll(self._config.behind_s * 1000)
                elif 0 < count < self._config.quiet_bytes:
                    self._pause.poll(self._config.pause_s * 1000)
        finally:
            with self._lock:
                self._is_over = True
            self._obey()
            for fd in list(self._pipes):
                self._finish(fd)
            self._epoll.close()
            self._wake_up.close()

    def _round(self) -> int:
        """Read once from each pipe that has something; return how much came."""
        count = 0
        for fd, _ in self._epoll.poll(self._wait_s()):
            if fd == self._wake_up.fileno():
                self._obey()
            elif fd in self._pipes:
                count += self._read(fd)
        self._end_overdue()
        return count

    def _obey(self) -> None:
        self._wake_up.clear()
        while self._orders:
            self._orders.popleft()()

    def _wait_s(self) -> float | None:
        ends = [target.ends_at for target in self._targets if target.ends_at is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _read(self, fd: int) -> int:
        pipe = self._pipes[fd]
        try:
            data = os.read(fd, self._config.read_bytes)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._record(pipe, f"this output cannot be read any more: {error}")
            data = b""
        if not data:
            self._finish(fd)
            return 0
        try:
            self._waiting_bytes = self._outlet.put(pipe.target, pipe.lines.feed(data))
        except Exception as error:  # noqa: BLE001 - without this thread all workers would stop
            self._record(pipe, f"{len(data)} bytes were lost: {error!r}")
        return len(data)

    def _record(self, pipe: _Pipe, text: str) -> None:
        """Write a line of our own; the launcher's logger may end in a pipe that we read."""
        self._outlet.put(pipe.target, f"[nvrx] {text}\n".encode())

    def _finish_soon(self, fd: int) -> None:
        """Read what a pipe holds and close it, although its writers live."""
        for _ in range(_FULL_PIPE_READS):
            if fd not in self._pipes or not self._read(fd):
                break
        if fd in self._pipes:
            self._finish(fd)

    def _finish(self, fd: int) -> None:
        """Write the last line of a pipe and close it."""
        pipe = self._pipes.pop(fd)
        self._epoll.unregister(fd)
        os.close(fd)
        self._outlet.put(pipe.target, pipe.lines.finish())
        pipe.target.pipes.discard(fd)
        self._check_end(pipe.target)

    def _check_end(self, target: Target) -> None:
        if target.ends_at is not None and not target.pipes and target in self._targets:
            self._targets.discard(target)
            self._outlet.end(target)

    def _end_overdue(self) -> None:
        """Close the pipes that somebody holds open long after the worker's end."""
        now = time.monotonic()
        for target in list(self._targets):
            if target.ends_at is not None and target.ends_at <= now:
                for fd in list(target.pipes):
                    self._finish_soon(fd)
