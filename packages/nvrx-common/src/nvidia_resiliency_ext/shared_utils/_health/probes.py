# SPDX-License-Identifier: Apache-2.0
"""Owns short-lived child processes that may hang for ever in the kernel.

What hangs is killed; what cannot be killed (uninterruptible sleep) is left behind, counted and
reaped later. Nobody waits for it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.children import start_child

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvidia_resiliency_ext.shared_utils.children import Child

__all__ = ["Probe", "abandoned_probes"]

_KILL_WAIT_S = 0.5
_OUTPUT_LIMIT_BYTES = 1 << 20

_lock = threading.Lock()
_abandoned: list[Probe] = []


def abandoned_probes() -> int:
    """Reap what has ended at last; return how many children still hang after SIGKILL."""
    with _lock:
        _abandoned[:] = [probe for probe in _abandoned if not probe.has_ended()]
        return len(_abandoned)


class Probe:
    """One child process with its output, which nobody ever has to wait for."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._start = time.monotonic()
        self._output = bytearray()
        self._is_closed = False

    @classmethod
    def start(cls, argv: Sequence[str], stdin: int = subprocess.DEVNULL) -> Probe:
        """Start a program; its standard output is collected, its errors are dropped.

        Raises:
            ChildStartError: It cannot be run.
        """
        pipe = subprocess.PIPE if stdin == subprocess.DEVNULL else subprocess.DEVNULL
        # In /, because `python -m` looks for modules in its working folder first.
        null = subprocess.DEVNULL
        child = start_child(argv, cwd="/", stdin=stdin, stdout=pipe, stderr=null)
        return cls(child)

    def age_s(self) -> float:
        """Return the seconds since its start."""
        return time.monotonic() - self._start

    def has_ended(self) -> bool:
        """Reap it if it has ended; say whether it has."""
        if not self._is_closed and self._child.poll() is not None:
            self._is_closed = True
            self._child.close()
        return self._is_closed

    def result(self, timeout_s: float) -> tuple[int, bytes] | None:
        """Wait for its end; return its exit code and output, `None` when the time is up first.

        It is killed when the time is up, or when it writes more than 1 MiB.
        """
        deadline = time.monotonic() + timeout_s
        if not self._read_all(deadline):
            self.kill()
            return None
        status = self._child.wait(max(0.0, deadline - time.monotonic()))
        if status is None:
            self.kill()
            return None
        self.has_ended()
        return status.returncode, bytes(self._output)

    def kill(self) -> None:
        """Kill it; leave it behind when that does not end it at once."""
        if self.has_ended():
            return
        self._child.signal_group(signal.SIGKILL)
        if self._child.wait(_KILL_WAIT_S) is not None:
            self.has_ended()
            return
        with _lock:
            _abandoned.append(self)

    def _read_all(self, deadline: float) -> bool:
        stream: Any = self._child.stdout
        if stream is None:
            return True
        poller = select.poll()
        poller.register(stream, select.POLLIN)
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poller.poll(left_s * 1000 + 1):
                return False
            data = os.read(stream.fileno(), 65536)
            if not data:
                return True
            self._output += data
            if len(self._output) > _OUTPUT_LIMIT_BYTES:
                return False
