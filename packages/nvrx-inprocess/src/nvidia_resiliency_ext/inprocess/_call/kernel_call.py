# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a thread of this process: the system call in which it waits."""

from __future__ import annotations

import platform

__all__ = ["is_in_futex", "kernel_call"]

_FUTEX_CALLS = {"x86_64": (202,), "aarch64": (98,)}
_FIELDS = 3  # of the line that the kernel shows of a call: its number, then its arguments
_NONE = (-1, 0, 0)


def kernel_call(native_id: int) -> tuple[int, int, int]:
    """Return number and first two arguments of the call; -1 for none, or where it is not told."""
    try:
        with open(f"/proc/self/task/{native_id}/syscall", encoding="ascii") as file:
            fields = file.read().split()
    except OSError:
        return _NONE
    if len(fields) < _FIELDS or not fields[0].isdecimal():
        return _NONE
    return int(fields[0]), int(fields[1], 16), int(fields[2], 16)


def is_in_futex(native_id: int) -> bool:
    """Say whether a thread waits for another one, as in a condition variable of C++."""
    return kernel_call(native_id)[0] in _FUTEX_CALLS.get(platform.machine(), ())
