# SPDX-License-Identifier: Apache-2.0
"""Collect the output of workers, and of the launcher itself, in logs.

Cycles overlap: what workers of the last one wrote is read while those of the next one start.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile

from .lines import LineAssembler, cycle_log_file, rank_prefix
from .outlet import MEMORY_BYTES, Backlog, Outlet, Target
from .reader import MultiplexingReaderThread, open_pipe, pipe_bytes
from .sinks import FunnelSink, LocalFile

_STREAMS = (1, 2)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


# With a log server most of what waits is in its client.
_MEMORY_BEFORE_FUNNEL_BYTES = 16 << 20
_FILE_CLOSE_S = 5.0


class CycleLogs:
    """Collect the output of workers; own the two threads, all pipes and the spill files.

    A cycle's log is `base_log_file`, an absolute path, with `_cycle<number>` before the extension.
    Without a `funnel`, the log server that keeps the logs, files are written from here. `workers`
    is for the size of pipes; in `spill_dir` (None: the system's) wait lines without room in memory.
    """

    def __init__(
        self,
        base_log_file: str,
        *,
        workers: int = 1,
        funnel: FunnelSink | None = None,
        spill_dir: str | None = None,
    ) -> None:
        self._base_log_file = base_log_file
        self._pipe_bytes = pipe_bytes(workers)
        self._funnel = funnel
        memory = MEMORY_BYTES if funnel is None else _MEMORY_BEFORE_FUNNEL_BYTES
        open_log = LocalFile if funnel is None else funnel.open
        self._outlet = Outlet(open_log, Backlog(memory, spill_dir or tempfile.gettempdir()))
        self._reader = MultiplexingReaderThread(self._outlet)
        self._reader.start()
        self._present: Target | None = None
        self._own: Target | None = None
        self._captured: list[int] = []
        self._world_size = 1
        self._is_closed = False

    def begin_cycle(self, cycle: int, world_size: int) -> None:
        """Record that the workers of a cycle are about to start, and that the last are gone."""
        self.end_cycle()
        self._world_size = world_size
        self._present = self._outlet.open(cycle_log_file(self._base_log_file, cycle))

    def end_cycle(self) -> None:
        """End the present cycle: its pipes are read to their ends, those held open for 2 s."""
        present, self._present = self._present, None
        if present is not None:
            self._reader.end(present)

    def open_pipe(self, rank: int) -> int:
        """Return the writing end of a new pipe for a rank of the present cycle."""
        reading, writing = open_pipe(self._pipe_bytes)
        self.read(reading, rank)
        return writing

    def read(self, fd: int, rank: int) -> None:
        """Read a pipe of a rank of the present cycle, and close it at its end."""
        assert self._present is not None, "no cycle has begun"
        lines = LineAssembler(rank_prefix(rank, self._world_size))
        self._reader.add(fd, lines, self._present)

    def capture_own_streams(self, path: str) -> None:
        """Let the launcher's own stdout and stderr go into a log, as they are, until `close`."""
        reading, writing = open_pipe()
        _flush()
        self._captured = [os.dup(stream) for stream in _STREAMS]
        for stream in _STREAMS:
            os.dup2(writing, stream)
        os.close(writing)
        self.read_own(reading, path)

    def read_own(self, fd: int, path: str) -> None:
        """Copy the bytes of a pipe into a log, unchanged, until `close`."""
        os.set_blocking(fd, False)
        self._own = self._outlet.open(path)
        self._reader.add(fd, LineAssembler(drops_noise=False), self._own)

    def close(self, timeout_s: float = _FILE_CLOSE_S) -> bool:
        """Read and write what is left, once; say whether every line is where it belongs.

        Pipes have 2 s; logs have `timeout_s`, those of a server that long once more.
        """
        if self._is_closed:
            return True
        self._is_closed = True
        if self._captured:
            _flush()
        for stream, fd in zip(_STREAMS, self._captured, strict=False):
            os.dup2(fd, stream)
            os.close(fd)
        if self._own is not None:
            self._reader.leave(self._own)
        self.end_cycle()
        self._reader.stop()
        is_written = self._outlet.close(timeout_s)
        is_kept = self._funnel is None or self._funnel.close(timeout_s)
        return is_written and is_kept
