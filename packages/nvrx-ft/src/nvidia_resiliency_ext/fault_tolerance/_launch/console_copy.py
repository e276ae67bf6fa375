# SPDX-License-Identifier: Apache-2.0
"""Writing to the launcher's own stdout and stderr without ever waiting for their reader."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time

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
