# SPDX-License-Identifier: Apache-2.0
"""Learning that a process has ended, and signalling it: pidfds and what replaces them.

The one place that knows whether this kernel lets us use pidfds.
"""

from __future__ import annotations

import errno
import functools
import os
import select
import signal as signals
import threading

__all__ = ["PidfdWatch", "ThreadWatch", "open_watch", "pidfd_available", "wait_readable"]

_JOIN_WAIT_S = 10.0


@functools.lru_cache(maxsize=1)
def pidfd_available() -> bool:
    """Return whether processes can be watched and signalled through pidfds; probed once."""
    if os.environ.get("NVRX_FORCE_NO_PIDFD") == "1" or not hasattr(os, "pidfd_open"):
        return False
    try:
        descriptor = os.pidfd_open(os.getpid())
    except OSError:
        return False
    try:
        signals.pidfd_send_signal(descriptor, 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


class PidfdWatch:
    """Watches and signals a process through its pidfd."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._descriptor

    def send(self, sig: int) -> None:
        signals.pidfd_send_signal(self._descriptor, sig)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class ThreadWatch:
    """Watches a child of ours with a thread that ends, and closes a pipe, when the child does."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        """Start the thread.

        Raises:
            OSError: The system gives no descriptor or no thread.
        """
        self._reader, writer = os.pipe()
        self._thread = threading.Thread(
            target=_close_at_exit_of, args=(pid, writer), name=f"nvrx-watch-{pid}", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._reader)
            os.close(writer)
            raise OSError(errno.EAGAIN, str(error)) from error

    def fileno(self) -> int:
        return self._reader

    def send(self, sig: int) -> None:
        os.kill(self._pid, sig)

    def close(self) -> None:
        descriptor, self._reader = self._reader, -1
        if descriptor >= 0:
            self._thread.join(_JOIN_WAIT_S)
            os.close(descriptor)


def open_watch(pid: int) -> PidfdWatch | ThreadWatch:
    """Return the watch of a child that nobody has reaped yet."""
    return PidfdWatch(pid) if pidfd_available() else ThreadWatch(pid)


def _close_at_exit_of(pid: int, writer: int) -> None:
    try:
        # WNOWAIT leaves the status to Child.poll, which may also be faster than this thread.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        pass
    finally:
        os.close(writer)


def wait_readable(descriptor: int, timeout_s: float | None) -> bool:
    """Wait until a descriptor is readable or the time is up; return whether it is readable."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    # A day at most per call: the milliseconds of a longer time overflow.
    return bool(poller.poll(None if timeout_s is None else min(timeout_s, 86400.0) * 1000.0))
