# SPDX-License-Identifier: Apache-2.0
"""Processes as the kernel shows them: what a child does before it runs, learning that it has ended.

The one place that knows whether this kernel lets us use pidfds.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import select
import signal as signals
import threading
from typing import TYPE_CHECKING, final

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.clock import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable


logger = logging.getLogger("nvrx")

_PR_SET_PDEATHSIG = 1


def keep_exit_statuses() -> None:
    """Make sure that the kernel keeps the exit statuses of our children for us."""
    # A parent that ignored SIGCHLD leaves that to us, and the kernel then drops exit statuses.
    if signals.getsignal(signals.SIGCHLD) is not signals.SIG_IGN:
        return
    if threading.current_thread() is threading.main_thread():
        signals.signal(signals.SIGCHLD, signals.SIG_DFL)
    else:
        logger.warning("SIGCHLD is ignored: exit statuses of child processes will be lost")


def child_setup(*, death_signal: int | None) -> Callable[[], None] | None:
    """Return what the child runs before exec; `None` lets Popen use the faster vfork."""
    masked = bool(signals.pthread_sigmask(signals.SIG_BLOCK, ()))
    if death_signal is None and not masked:
        return None
    if death_signal is None:
        return _unmask
    # Everything is looked up here: between fork and exec nothing may be imported.
    return functools.partial(_set_up_child, os.getpid(), _load_prctl(), death_signal)


def end_with_parent(signum: int = signals.SIGTERM) -> None:
    """Let the kernel send this process `signum` (default SIGTERM) when its parent dies.

    Raises:
        OSError: The kernel refuses.
    """
    if _load_prctl()(_PR_SET_PDEATHSIG, signum) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) was refused")


def _unmask() -> None:
    signals.pthread_sigmask(signals.SIG_SETMASK, ())


def _set_up_child(parent_pid: int, prctl: Callable[[int, int], int], death_signal: int) -> None:
    _unmask()
    if prctl(_PR_SET_PDEATHSIG, death_signal) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) was refused")
    # The parent may have died before the call above; the kernel then sends nothing.
    if os.getppid() != parent_pid:
        os._exit(1)


@functools.lru_cache(maxsize=1)
def _load_prctl() -> Callable[[int, int], int]:
    import ctypes  # milliseconds that most starts need not pay

    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = (ctypes.c_int, ctypes.c_ulong)
    prctl.restype = ctypes.c_int
    function: Callable[[int, int], int] = prctl
    return function


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


@final
class PidHandle:
    """A hold on process `pid`, not our child, that never acts on a recycled number."""

    def __init__(self, pid: int, start_ticks: int | None = None) -> None:
        """Take hold of a running process that, if the caller knows it, started at `start_ticks`.

        Raises:
            ProcessLookupError: No such process runs, or one that started at another time.
        """
        self.pid = pid
        self._descriptor = os.pidfd_open(pid) if pidfd_available() else None
        try:
            self.start_ticks = self._identify(start_ticks)
        except BaseException:  # too many open files, for one: the descriptor must not stay behind
            self.close()
            raise

    def _identify(self, start_ticks: int | None) -> int:
        stat = procfs.read_stat(self.pid)
        # Alive after the stat was read means that the stat is of the process behind the pidfd.
        if stat is None or not stat.running or self._ended():
            raise ProcessLookupError(f"there is no running process {self.pid}")
        if start_ticks is not None and start_ticks != stat.start_ticks:
            raise ProcessLookupError(f"process {self.pid} is another one that took over its number")
        return stat.start_ticks

    def fileno(self) -> int | None:
        """Return a descriptor, readable once the process has ended; `None` without pidfd."""
        return self._descriptor

    def alive(self) -> bool:
        """Return whether the process still runs; a zombie does not."""
        if self._descriptor is not None:
            return not self._ended()
        stat = procfs.read_stat(self.pid)
        return stat is not None and stat.running and stat.start_ticks == self.start_ticks

    def signal(self, sig: int) -> bool:
        """Send signal `sig`; return whether the process still existed."""
        try:
            if self._descriptor is not None:
                signals.pidfd_send_signal(self._descriptor, sig)
            elif self.alive():
                os.kill(self.pid, sig)
            else:
                return False
        except ProcessLookupError:
            return False
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait `timeout_s` seconds at most for the process to end; return whether it has.

        Without pidfd this looks at /proc ten times a second: the kernel tells nobody but a parent.
        """
        deadline = Deadline.after(timeout_s)
        while self.alive() and not deadline.expired():
            if self._descriptor is not None:
                wait_readable(self._descriptor, deadline.timeout())
            else:
                select.select([], [], [], min(0.1, deadline.remaining()))
        return not self.alive()

    def close(self) -> None:
        """Give the descriptor back; the process is left alone."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> PidHandle:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _ended(self) -> bool:
        return self._descriptor is not None and wait_readable(self._descriptor, 0.0)
