# SPDX-License-Identifier: Apache-2.0
"""Make and read the pipes of workers; no worker waits for a log."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

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

    So much a worker can still write while the launcher does not read. Where the kernel refuses the
    size it is halved, down to what the pipe has anyway.
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


class MultiplexingReaderThread(threading.Thread):
    """Reads pipes until they end; the methods that give orders may be called from any thread.

    `outlet` writes the lines of each pipe to its `target`, `config` has times and sizes.
    """

    def __init__(self, outlet: Outlet, config: ReaderConfig | None = None) -> None:
        super().__init__(name="nvrx-log-reader", daemon=True)
        self._outlet = outlet
        self._config = config or ReaderConfig()
        self._loop = EventLoop()
        self._lock = threading.Lock()  # no order comes after the thread's end
        self._is_over = False
        # The fields below are the thread's.
        self._pipes: dict[int, tuple[Target, LineAssembler]] = {}
        self._stops_at: float | None = None
        self._read_bytes = 0
        self._waiting_bytes = 0

    def add(self, fd: int, lines: LineAssembler, target: Target) -> None:
        """Read the pipe `fd`, non-blocking and ours now, by `lines` into `target`, to its end."""
        if not self._order(lambda: self._add(fd, lines, target)):
            os.close(fd)

    def end(self, target: Target) -> None:
        """Finish the log `target` when its pipes are closed, at the latest after `drain_s`."""
        at = time.monotonic() + self._config.drain_s
        self._order(lambda: self._end(target, at))

    def leave(self, target: Target) -> None:
        """Drain the pipes of `target`, and close them even if a process can still write."""
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
            if not self._is_over:
                self._loop.post(order)
            return not self._is_over

    # The thread ------------------------------------------------------------------------------

    def run(self) -> None:
        """Read until `stop` is called."""
        try:
            while self._stops_at is None or self._pipes:
                self._read_bytes = 0
                self._loop.run_once()
                if self._stops_at is not None:
                    continue
                if self._waiting_bytes > self._config.behind_bytes:
                    time.sleep(self._config.behind_s)
                elif 0 < self._read_bytes < self._config.quiet_bytes:
                    time.sleep(self._config.pause_s)
        finally:
            with self._lock:
                self._is_over = True
            self._loop.run_once(until=0.0)  # the orders that came before that
            for fd in list(self._pipes):
                self._finish(fd)
            self._loop.close()

    def _add(self, fd: int, lines: LineAssembler, target: Target) -> None:
        self._pipes[fd] = target, lines
        target.pipes.add(fd)
        self._loop.watch(fd, lambda: self._read(fd))
        if self._stops_at is not None:
            self._end(target, self._stops_at)

    def _end(self, target: Target, at: float) -> None:
        target.gets_no_pipe = True
        if target.pipes:
            # Somebody may hold them open long after the worker's end.
            self._loop.call_at(at, lambda: self._leave(target))
        else:
            self._outlet.end(target)

    def _leave(self, target: Target) -> None:
        """Drain and close the pipes of a log, although their writers live."""
        for fd in list(target.pipes):
            for _ in range(_FULL_PIPE_READS):
                before = self._read_bytes
                self._read(fd)
                if self._read_bytes == before:
                    break
            if fd in self._pipes:
                self._finish(fd)
        self._end(target, 0.0)

    def _stop_by(self, at: float) -> None:
        self._stops_at = at
        for target in {target for target, _ in self._pipes.values()}:
            self._end(target, at)

    def _read(self, fd: int) -> None:
        """Read once from a pipe, and close it at its end."""
        target, lines = self._pipes[fd]
        try:
            data = os.read(fd, self._config.read_bytes)
        except BlockingIOError:
            return
        except OSError as error:
            self._record(target, f"this output cannot be read any more: {error}")
            data = b""
        if not data:
            self._finish(fd)
            return
        self._read_bytes += len(data)
        try:
            self._waiting_bytes = self._outlet.put(target, lines.feed(data))
        except Exception as error:  # noqa: BLE001 - without this thread all workers would stop
            self._record(target, f"{len(data)} bytes were lost: {error!r}")

    def _record(self, target: Target, text: str) -> None:
        """Write a line of our own; the launcher's logger may end in a pipe that we read."""
        self._outlet.put(target, f"[nvrx] {text}\n".encode())

    def _finish(self, fd: int) -> None:
        """Write the last line of a pipe and close it."""
        target, lines = self._pipes.pop(fd)
        self._loop.unwatch(fd)
        os.close(fd)
        self._outlet.put(target, lines.finish())
        target.pipes.discard(fd)
        if target.gets_no_pipe and not target.pipes:
            self._outlet.end(target)
