# SPDX-License-Identifier: Apache-2.0
"""A whole interruption of the main thread, as of one that has nothing to abort."""

import time

from nvidia_resiliency_ext.inprocess._call.interrupt import AtomicLock, MainThreadInterrupter


def interrupt_main_thread(
    interrupter: MainThreadInterrupter, message: str, quiet_s: float, lock: AtomicLock
) -> int | None:
    """Raise in the main thread until it has left; return how often, `None` if it was not inside."""
    with lock:
        interruption = interrupter.begin(message)
    return None if interruption is None else interruption.see_out(quiet_s, lock)


def is_held_by_others(lock: AtomicLock) -> bool:
    """Return whether another thread than the calling one holds a lock."""
    if not lock._acquire(False):
        return True
    lock._release()
    return False


def await_waiter(lock: AtomicLock) -> None:
    """Return when a thread waits for a lock that the calling one holds."""
    deadline = time.monotonic() + 30
    while not lock._is_waited_for:
        assert time.monotonic() < deadline, "nobody waits for the lock"
