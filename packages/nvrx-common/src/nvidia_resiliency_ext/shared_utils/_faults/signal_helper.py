# SPDX-License-Identifier: Apache-2.0
"""A program of its own: sends its parent one signal when the time has come. It imports no package.

It is started when the fault is dispatched, so that it acts in time even when the parent's
interpreter no longer runs any Python. Input: ``b`` when the parent has begun its callback, ``g``
when it is through; the end of the input, or of the parent, ends the program without a signal.

usage: signal_helper.py PID SIGNAL DUE GRACE LINE
DUE is a moment on the monotonic clock; GRACE is how long after it the parent may stay silent; LINE
goes to stderr when it does. Exit code 0: the signal was sent.
"""

from __future__ import annotations

import os
import select
import sys
import time

_BEGUN, _GO = b"b", b"g"
_TICK_S = 1.0  # how often the parent is looked for where there are no pidfds


def main() -> int:
    """Wait, send the signal, and return the exit code."""
    pid, number, due, grace, line = sys.argv[1:]
    parent = _Parent(int(pid))
    received = parent.listen(float(due) + float(grace))
    if received == _BEGUN:
        received = parent.listen(float("inf"))
    if received is None:
        os.write(2, f"{line}\n".encode(errors="replace"))
    if received == b"" or not parent.alive():
        return 1
    os.kill(int(pid), int(number))
    return 0


class _Parent:
    """The process that started this one: its words and its life."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._poller = select.poll()
        self._poller.register(0, select.POLLIN)
        self._pidfd = -1
        if os.environ.get("NVRX_FORCE_NO_PIDFD") == "1":
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return
        self._poller.register(self._pidfd, select.POLLIN)

    def alive(self) -> bool:
        # The parent of an orphan is another process.
        return os.getppid() == self._pid

    def listen(self, until: float) -> bytes | None:
        """Return the helper's next word, `b""` when it is gone, `None` after the timeout."""
        while self.alive():
            left = until - time.monotonic()
            if left <= 0:
                return None
            if self._pidfd < 0:
                left = min(left, _TICK_S)
            # A day at most: the milliseconds of a longer time overflow.
            ready = [each for each, _ in self._poller.poll(min(left, 86400.0) * 1e3)]
            if self._pidfd in ready:
                return b""
            if 0 in ready:
                return os.read(0, 1)
        return b""


if __name__ == "__main__":
    sys.exit(main())
