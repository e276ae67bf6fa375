# SPDX-License-Identifier: Apache-2.0
"""Check and set the processor and disk priority of the worker process."""

from __future__ import annotations

import ctypes
import logging
import os
import platform

logger = logging.getLogger("nvrx")

_MAX_NICE = 19
_IO_CLASSES = range(4)
_SYSTEM_CALLS = {"x86_64": (251, 252), "aarch64": (30, 31)}  # ioprio_set, ioprio_get
_WHO_PROCESS = 1
_CLASS_SHIFT = 13
_DEFAULT_LEVEL = 4


def check_priorities(cpu_priority: int, io_priority: int | None) -> int | None:
    """Return the class of disk priority that applies; warn about one that does not exist.

    Raises:
        ValueError: `cpu_priority` is not in 0 to 19.
    """
    if not 0 <= cpu_priority <= _MAX_NICE:
        raise ValueError(f"cpu_priority is {cpu_priority}; allowed are 0 to {_MAX_NICE}")
    if io_priority is not None and io_priority not in _IO_CLASSES:
        logger.warning("io_priority %s is none of 0, 1, 2, 3: it is not set", io_priority)
        return None
    return io_priority


def apply_priorities(cpu_priority: int, io_priority: int | None) -> None:
    """Set the priorities of this thread and of those that it starts from now on.

    It never takes more of the processor than before.
    """
    if cpu_priority > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, cpu_priority)
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if io_priority is not None and numbers is not None:
        value = (io_priority << _CLASS_SHIFT) | (_DEFAULT_LEVEL if io_priority in (1, 2) else 0)
        ctypes.CDLL(None).syscall(numbers[0], _WHO_PROCESS, 0, value)


def io_class_of(thread: int) -> int | None:
    """Return the class of disk priority of a thread, 0 for this one; None where it is not told."""
    numbers = _SYSTEM_CALLS.get(platform.machine())
    found = -1 if numbers is None else ctypes.CDLL(None).syscall(numbers[1], _WHO_PROCESS, thread)
    return None if found < 0 else found >> _CLASS_SHIFT
