# SPDX-License-Identifier: Apache-2.0
"""Owns how a pipe of a worker is made and how much fits into it."""

from __future__ import annotations

import contextlib
import fcntl
import os

__all__ = ["SMALLEST_BYTES", "open_pipe", "pipe_bytes"]

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

    Raises:
        OSError: There are no descriptors left.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    while size > SMALLEST_BYTES:
        with contextlib.suppress(OSError):
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, size)
            break
        size //= 2
    return reading, writing
