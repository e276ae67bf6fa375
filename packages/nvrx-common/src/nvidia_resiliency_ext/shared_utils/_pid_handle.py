# SPDX-License-Identifier: Apache-2.0
"""A hold on a process that is not our child; it starts and reaps nothing."""

from __future__ import annotations

import os
import select
import signal as signals
from typing import final

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils._process_watch import pidfd_available, wait_readable
from nvidia_resiliency_ext.shared_utils.clock import Deadline

__all__ = ["PidHandle"]


@final
class PidHandle:
    """A hold on a process that is not our child: it never acts on a recycled number.

    Attributes:
        pid: Its number.
        start_ticks: Its start since boot in clock ticks.
    """

    def __init__(self, pid: int, start_ticks: int | None = None) -> None:
        """Take hold of a running process.

        Args:
            pid: Its number.
            start_ticks: Its start, where the caller knows it from before.

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
        """Send a signal; return whether the process still existed.

        Args:
            sig: Number of the signal.
        """
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
        """Wait until the process has ended; return whether it has.

        Without pidfd this looks at /proc ten times a second: the kernel tells nobody but a parent.

        Args:
            timeout_s: Seconds to wait at most.
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
