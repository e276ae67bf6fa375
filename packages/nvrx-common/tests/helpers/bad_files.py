# SPDX-License-Identifier: Apache-2.0
"""Files that the kernel itself lets nobody write: there is no space, or writing hangs."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

PREFIX_BYTES = 16 << 20


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size.

    As on a full disk, a write stops in the middle, and the next one fails.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def make_large(path: Path) -> None:
    """Make a file of PREFIX_BYTES without blocks; a limit above it leaves all others alone."""
    with path.open("wb") as file:
        file.seek(PREFIX_BYTES - 1)
        file.write(b"\n")


class Hung:
    """A FIFO that is full and that nobody reads: who writes to it hangs in the kernel."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        # With both ends open neither the opening hangs nor is there an end before `close`.
        self.writer = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._filler = self._fill()
        self._read = bytearray()
        self._thread: threading.Thread | None = None

    def release(self) -> None:
        """Read from now on; what was written so far and comes later goes through."""
        if self._thread is None:
            os.set_blocking(self._reader, True)
            self._thread = threading.Thread(target=self._drain)
            self._thread.start()

    def close(self) -> bytes:
        """Wait until the writing end is closed; return what was written to it."""
        self.release()
        assert self._thread is not None
        self._thread.join(20.0)
        assert not self._thread.is_alive(), "somebody still has the writing end"
        os.close(self._reader)
        return bytes(self._read[self._filler :])

    def _fill(self) -> int:
        size = 0
        os.set_blocking(self.writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                size += os.write(self.writer, b"f" * 4096)
        os.set_blocking(self.writer, True)
        return size

    def _drain(self) -> None:
        while data := os.read(self._reader, 1 << 16):
            self._read += data
