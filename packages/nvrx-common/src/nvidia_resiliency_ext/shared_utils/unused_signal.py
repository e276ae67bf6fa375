# SPDX-License-Identifier: Apache-2.0
"""Finds a real-time signal that nothing in this process uses: neither Python nor a C library."""

from __future__ import annotations

import contextlib
import signal

__all__ = ["unused_realtime_signal"]

_STATUS = "/proc/thread-self/status"
_TAKEN_FIELDS = ("SigIgn", "SigCgt")


def unused_realtime_signal() -> int:
    """Return the highest real-time signal that this process neither handles nor ignores.

    Raises:
        RuntimeError: There is none.

    Example:
        >>> signal.getsignal(unused_realtime_signal()) is signal.SIG_DFL
        True
    """
    # Python knows only its own handlers; the kernel knows those of libraries, too.
    taken = 0
    with contextlib.suppress(OSError), open(_STATUS, encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in _TAKEN_FIELDS:
                taken |= int(value, 16)  # a bit for each signal
    for number in range(int(signal.SIGRTMAX), int(signal.SIGRTMIN) - 1, -1):
        if not taken >> (number - 1) & 1 and signal.getsignal(number) is signal.SIG_DFL:
            return number
    raise RuntimeError("every real-time signal of this process is in use")
