# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a thread of this process: how, and for what, it waits."""

from __future__ import annotations

import enum
import platform

__all__ = ["Wait", "is_in_futex", "kernel_wait", "parse_wait"]


class Wait(enum.Enum):
    """System calls in which torch's threads wait."""

    POLL = enum.auto()
    FUTEX = enum.auto()


# poll and ppoll, futex.
_CALLS = {
    "x86_64": {7: Wait.POLL, 271: Wait.POLL, 202: Wait.FUTEX},
    "aarch64": {73: Wait.POLL, 98: Wait.FUTEX},
}
# A wait that was held up, as by SIGSTOP and SIGCONT, goes on in this call, with its own arguments.
_RESTART = {"x86_64": 219, "aarch64": 128}
# The second argument tells which one it was: poll's count of descriptors, or futex's operation
# FUTEX_WAIT or FUTEX_WAIT_BITSET between threads of one process, by either clock.
_RESTARTED = {0x1: Wait.POLL, **dict.fromkeys((0x80, 0x89, 0x180, 0x189), Wait.FUTEX)}
_FIELDS = 3  # of the line that the kernel shows of a call: its number, then its arguments


def kernel_wait(native_id: int) -> tuple[Wait | None, int, int]:
    """Return how a thread waits, and the call's first two arguments; `None` where it does not."""
    try:
        with open(f"/proc/self/task/{native_id}/syscall", encoding="ascii") as file:
            return parse_wait(file.read())
    except OSError:
        return None, 0, 0


def parse_wait(line: str) -> tuple[Wait | None, int, int]:
    """Return what the kernel's line says: see `kernel_wait`."""
    fields = line.split()
    if len(fields) < _FIELDS or not fields[0].isdecimal():
        return None, 0, 0
    number, first, second = int(fields[0]), int(fields[1], 16), int(fields[2], 16)
    machine = platform.machine()
    if number == _RESTART.get(machine):
        return _RESTARTED.get(second), first, second
    return _CALLS.get(machine, {}).get(number), first, second


def is_in_futex(native_id: int) -> bool:
    """Say whether a thread waits for another one, as in a condition variable of C++."""
    return kernel_wait(native_id)[0] is Wait.FUTEX
