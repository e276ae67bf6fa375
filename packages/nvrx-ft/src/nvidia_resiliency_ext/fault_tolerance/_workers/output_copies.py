# SPDX-License-Identifier: Apache-2.0
"""Copies of workers' lines: on the launcher's own console, and in one file of chosen lines."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import time
from collections.abc import Sequence

# What a pipe that polls as writable takes without blocking (PIPE_BUF on Linux).
CHUNK_BYTES = 4096


def offer(name: str, data: bytes, wait_s: float) -> int:
    """Write what the console takes, and return how many bytes that was.

    A console that is closed or gone takes everything: nobody is there to miss it.

    Args:
        name: `stdout` or `stderr`; looked up in `sys` at each call, as programs replace them.
        data: What to write.
        wait_s: How long to wait for a reader that does not read.
    """
    console = getattr(sys, name)
    try:
        fd = console.fileno()
    except (OSError, ValueError, AttributeError):
        return _offer_text(console, data)
    deadline = time.monotonic() + wait_s
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    taken = 0
    while taken < len(data):
        ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            return taken
        if not ready[0][1] & select.POLLOUT:
            return len(data)
        try:
            taken += os.write(fd, data[taken : taken + CHUNK_BYTES])
        except BlockingIOError:
            return taken
        except OSError:
            return len(data)
    return taken


def _offer_text(console: object, data: bytes) -> int:
    """Write to a stream without descriptor, such as a notebook's."""
    write = getattr(console, "write", None)
    if write is not None:
        with contextlib.suppress(OSError, ValueError):
            write(data.decode("utf-8", "replace"))
    return len(data)


logger = logging.getLogger("nvrx")


class FilteredFile:
    """The lines that were wanted, of one stream of all workers of a cycle.

    A file that cannot be written costs its lines and one message, never the job.

    Args:
        path: The file; it is made anew, also when no line is wanted.
        texts: A line that holds one of them is wanted.
    """

    def __init__(self, path: str, texts: Sequence[str]) -> None:
        self._path = path
        self._texts = [text.encode(errors="surrogateescape") for text in texts]
        self._fd = -1
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._fd = os.open(path, flags, 0o644)
        except OSError as error:
            self._give_up(error)

    def wants(self, line: bytes) -> bool:
        """Return whether a line, without its prefix, belongs here."""
        return any(text in line for text in self._texts)

    def write(self, lines: bytes, _wait_s: float) -> int:
        """Write whole lines; return how many bytes are done with, which is all of them."""
        left = lines
        while left and self._fd >= 0:
            try:
                left = left[os.write(self._fd, left) :]
            except OSError as error:
                self._give_up(error)
        return len(lines)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give_up(self, error: OSError) -> None:
        logger.warning("%s is not written any more: %s", self._path, error.strerror or error)
        self.close()
