# SPDX-License-Identifier: Apache-2.0
"""Functions for a worker process: openers that fail, and saves that end badly."""

import ctypes
import errno
import io
import os
import signal
import time
from pathlib import Path


def refuse_to_open(path, mode):
    """Raise, as a broken file system does."""
    raise OSError(f"refuse_to_open {os.path.basename(path)} {mode}")


def kill_myself(*_args):
    """End this process as the OOM killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(*_args):
    """End this process as a fault in native code does."""
    ctypes.string_at(0)


def raise_error(*_args):
    """Fail."""
    raise RuntimeError("this save function fails")


def write_text(path, value):
    """Write a number, or the sum of a tensor."""
    Path(path).write_text(str(float(value.sum()) if hasattr(value, "sum") else value))


def write_sum(path, tensors):
    """Write the sum of several tensors."""
    Path(path).write_text(str(float(sum(tensor.sum() for tensor in tensors))))


def wait_for_file(path):
    """Work until a file is there."""
    while not os.path.exists(path):
        time.sleep(0.01)


def touch_and_wait(path, forever):
    """Say that the work has begun, then work until a file is there."""
    Path(path).touch()
    wait_for_file(forever)


class SlowFile(io.FileIO):
    """A file that takes one piece, and the next ones when another file is there."""

    def __init__(self, path, go):
        super().__init__(path, "wb")
        self._go, self._pieces = go, 0

    def write(self, data):
        if self._pieces:
            wait_for_file(self._go)
        self._pieces += 1
        return super().write(data)


def open_late(go, path, mode):
    """Open a file when another one is there; `<go>.begun` tells that it is waited for."""
    Path(f"{go}.begun").touch()
    wait_for_file(go)
    return open(path, mode)


def no_quota(path, _mode):
    """Raise what a file system says to a user who has used up the quota."""
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), path)


def slow_open(go, path, _mode):
    """Open a file that waits for `go`."""
    return SlowFile(path, go)
