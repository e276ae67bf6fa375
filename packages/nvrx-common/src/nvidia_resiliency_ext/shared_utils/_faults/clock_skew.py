# SPDX-License-Identifier: Apache-2.0
"""The fault of a wall clock that jumps. It is the machine's clock, for every process on it."""

from __future__ import annotations

import atexit
import time
from typing import TYPE_CHECKING

from .actions import Action, refusal

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

__all__ = ["SKEW_S", "Skew", "skew_clock"]

SKEW_S = 3600.0
_CAP_SYS_TIME = 25
_WHOLE_MACHINE = ["0", "0", "4294967295"]


def skew_clock(due: float, has_callback: bool) -> Action:
    """Prepare to set the clock an hour ahead until the fault is cancelled or the program ends."""
    del due, has_callback
    if not _may_set_clock():
        raise refusal("CLOCK_SKEW", "this process may not set the clock (CAP_SYS_TIME)")
    return Skew(time.time, lambda wall_s: time.clock_settime(time.CLOCK_REALTIME, wall_s))


class Skew(Action):
    """Owns one jump ahead and the jump back.

    Args:
        read: Returns the wall time.
        write: Sets it.
    """

    def __init__(self, read: Callable[[], float], write: Callable[[float], object]) -> None:
        self._read = read
        self._write = write
        self._ahead = False

    def act(self, stop: threading.Event) -> None:
        self._write(self._read() + SKEW_S)
        self._ahead = True
        atexit.register(self._go_back)
        stop.wait()
        self._go_back()

    def _go_back(self) -> None:
        atexit.unregister(self._go_back)
        ahead, self._ahead = self._ahead, False
        if ahead:
            self._write(self._read() - SKEW_S)


def _may_set_clock() -> bool:
    # The right counts in the first user namespace only. Asked of /proc, as a trial sets the clock.
    try:
        with open("/proc/thread-self/status", encoding="ascii", errors="replace") as status:
            rights = next(line for line in status if line.startswith("CapEff:")).split()[1]
        with open("/proc/self/uid_map", encoding="ascii") as users:
            whole = users.read().split() == _WHOLE_MACHINE
    except (OSError, StopIteration):
        return False
    return whole and bool(int(rights, 16) >> _CAP_SYS_TIME & 1)
