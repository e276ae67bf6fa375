# SPDX-License-Identifier: Apache-2.0
"""The processes of ranks that the monitor has met: when they end, and signals to them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.children import PidHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

__all__ = ["Processes"]

logger = logging.getLogger("nvrx")


class Processes:
    """Holds each process once, until it ends.

    Args:
        loop: Where ends are seen, at once with pidfds, else whenever `look` is called.
        ended: Called with the number of a process that has ended.
    """

    def __init__(self, loop: EventLoop, ended: Callable[[int], None]) -> None:
        self._loop = loop
        self._ended = ended
        self._held: dict[int, PidHandle] = {}

    def __len__(self) -> int:
        """Return how many live."""
        return len(self._held)

    def __contains__(self, pid: object) -> bool:
        """Return whether a process is held and lives."""
        return pid in self._held

    @property
    def must_be_looked_at(self) -> bool:
        """Whether the kernel does not tell us when one ends."""
        return any(handle.fileno() is None for handle in self._held.values())

    def hold(self, pid: int, start_ticks: int | None = None) -> int:
        """Hold a process from now on; return when it was started.

        Raises:
            ProcessLookupError: It does not run, or another process has its number.
        """
        held = self._held.get(pid)
        if held is not None:
            return held.start_ticks
        handle = PidHandle(pid, start_ticks)
        self._held[pid] = handle
        fd = handle.fileno()
        if fd is not None:
            self._loop.watch(fd, lambda: self._drop(pid))
        return handle.start_ticks

    def look(self) -> None:
        """See who has ended, where the kernel does not tell."""
        for pid, handle in list(self._held.items()):
            if handle.fileno() is None and not handle.alive():
                self._drop(pid)

    def signal(self, pid: int, signals: tuple[int, ...]) -> None:
        """Send signals to a process, if it is there."""
        handle = self._held.get(pid)
        if handle is None:
            return
        for number in signals:
            try:
                handle.signal(number)
            except OSError as error:
                logger.warning("monitor_process: process %d: %s", pid, error)

    def close(self) -> None:
        """Let go of all."""
        for handle in self._held.values():
            handle.close()
        self._held.clear()

    def _drop(self, pid: int) -> None:
        handle = self._held.pop(pid)
        fd = handle.fileno()
        if fd is not None:
            self._loop.unwatch(fd)
        handle.close()
        self._ended(pid)
