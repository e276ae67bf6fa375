# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a thread of this process: how, and for what, it waits; its memory."""

from __future__ import annotations

import enum
import errno
import os
import platform

__all__ = [
    "Wait",
    "is_in_futex",
    "is_in_untimed_condition",
    "kernel_wait",
    "own_memory",
    "parse_call",
    "system_call",
    "wait_of",
]


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
# FUTEX_WAIT_BITSET between threads of one process, by either clock: glibc's wait for a condition.
_CONDITION_WAITS = frozenset({0x89, 0x189})
_FIELDS = 7  # of the line that the kernel shows of a call: its number, then its arguments


def system_call(native_id: int | str) -> tuple[int, ...]:
    """Return number and arguments of the call that a thread is in; nothing where it is in none."""
    try:
        with open(f"/proc/self/task/{native_id}/syscall", encoding="ascii") as file:
            return parse_call(file.read())
    except OSError:
        return ()


def parse_call(line: str) -> tuple[int, ...]:
    """Return what the kernel's line says: see `system_call`."""
    fields = line.split()
    if len(fields) < _FIELDS or not fields[0].isdecimal():
        return ()
    return int(fields[0]), *(int(field, 16) for field in fields[1:_FIELDS])


def kernel_wait(native_id: int) -> tuple[Wait | None, int, int]:
    """Return how a thread waits, and the call's first two arguments; `None` where it does not."""
    return wait_of(system_call(native_id))


def wait_of(call: tuple[int, ...]) -> tuple[Wait | None, int, int]:
    """Return what a system call is as a wait: see `kernel_wait`."""
    if not call:
        return None, 0, 0
    number, first, second = call[:3]
    machine = platform.machine()
    if number == _RESTART.get(machine):
        return _RESTARTED.get(second), first, second
    return _CALLS.get(machine, {}).get(number), first, second


def own_memory(address: int, size: int) -> bytes:
    """Return bytes of this process, such as of another thread's stack.

    The kernel reads them: memory that is gone meanwhile is an error and not a crash.

    Raises:
        OSError: There is no memory, or it may not be read.
    """
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(memory, size, address)
    except OverflowError as error:
        raise OSError(errno.EFAULT, f"no address: {error}") from None
    finally:
        os.close(memory)


def is_in_futex(native_id: int) -> bool:
    """Say whether a thread waits for another one, as in a condition variable of C++."""
    return kernel_wait(native_id)[0] is Wait.FUTEX


def is_in_untimed_condition(native_id: int | str) -> bool:
    """Say whether a thread waits for a condition variable of C or C++, and without a limit."""
    call = system_call(native_id)
    if not call or _CALLS.get(platform.machine(), {}).get(call[0]) is not Wait.FUTEX:
        return False
    _, _, operation, _, timeout = call[:5]
    return operation in _CONDITION_WAITS and timeout == 0
