# SPDX-License-Identifier: Apache-2.0
"""Owns short-lived child processes that may hang for ever in the kernel.

What hangs is killed; what cannot be killed (uninterruptible sleep) is abandoned, counted and
reaped later. Nobody waits for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from nvidia_resiliency_ext.shared_utils.children import Child, start_child

_KILL_WAIT_S = 0.5
_PIPE_BYTES = 1 << 16

_lock = threading.Lock()
_abandoned: list[Probe] = []


def _after_fork() -> None:
    # A thread of the parent may have held it, and the children are not ours.
    global _lock  # noqa: PLW0603 - the lock of this module
    _lock = threading.Lock()
    _abandoned.clear()


os.register_at_fork(after_in_child=_after_fork)


def abandoned_probes() -> int:
    """Reap abandoned children that have ended; return how many still hang after SIGKILL."""
    with _lock:
        _abandoned[:] = [probe for probe in _abandoned if not probe.has_ended()]
        return len(_abandoned)


class Probe:
    """One child process with its output, which nobody ever has to wait for."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._start = time.monotonic()

    @classmethod
    def start(cls, argv: Sequence[str], stdin: int = subprocess.DEVNULL) -> Probe:
        """Start a program; its standard output is collected, its errors are dropped."""
        pipe = subprocess.PIPE if stdin == subprocess.DEVNULL else subprocess.DEVNULL
        # In /, because `python -m` looks for modules in its working folder first.
        null = subprocess.DEVNULL
        child = start_child(argv, cwd="/", stdin=stdin, stdout=pipe, stderr=null)
        return cls(child)

    def age_s(self) -> float:
        return time.monotonic() - self._start

    def has_ended(self) -> bool:
        """Return whether the child has ended; if so, release its resources."""
        if self._child.poll() is None:
            return False
        self._child.close()
        return True

    def result(self, timeout_s: float) -> bytes | None:
        """Wait for its end; return its output, `None` when the time is up first.

        Output is read at the end only: writing more than a pipe holds (64 KiB) blocks it.
        """
        if self._child.wait(timeout_s) is None:
            return None
        output = b""
        if self._child.stdout is not None:
            # Not to wait for a process that inherited the other end.
            descriptor = self._child.stdout.fileno()
            os.set_blocking(descriptor, False)
            with suppress(BlockingIOError):
                output = os.read(descriptor, _PIPE_BYTES)
        self.has_ended()
        return output

    def kill(self) -> None:
        """Kill the probe; abandon the child if it does not end at once."""
        if self.has_ended():
            return
        self._child.signal_group(signal.SIGKILL)
        self._child.wait(_KILL_WAIT_S)
        if not self.has_ended():
            with _lock:
                _abandoned.append(self)
