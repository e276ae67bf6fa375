# SPDX-License-Identifier: Apache-2.0
"""Counts what all targets of a client hold in memory and on disk; it holds no data itself."""

from __future__ import annotations

import threading

__all__ = ["RESERVE_BYTES", "Room"]

RESERVE_BYTES = 128 * 1024
"""What a target may hold even when the others have used up the memory."""


class Room:
    """Two limits, shared by threads. Its lock guards every field and is taken last.

    Args:
        memory_limit_bytes: What the targets may hold in memory together.
        spill_limit_bytes: What they may hold in files together.
    """

    def __init__(self, memory_limit_bytes: int, spill_limit_bytes: int) -> None:
        self.memory_limit_bytes = memory_limit_bytes
        self.spill_limit_bytes = spill_limit_bytes
        self._changed = threading.Condition(threading.Lock())
        self._memory_bytes = 0
        self._spill_bytes = 0
        self._version = 0
        self._waiters = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes held in memory now."""
        return self._memory_bytes

    @property
    def spill_bytes(self) -> int:
        """Bytes held in files now."""
        return self._spill_bytes

    @property
    def version(self) -> int:
        """Read it before trying to take, and hand it to `wait` when that failed."""
        return self._version

    def take_memory(self, size: int, held: int) -> bool:
        """Count bytes in, if there is room or the taker holds next to nothing.

        Args:
            size: Bytes wanted.
            held: Bytes that this target holds already.
        """
        with self._changed:
            fits = self._memory_bytes + size <= self.memory_limit_bytes
            if fits or not held or held + size <= RESERVE_BYTES:
                self._memory_bytes += size
                return True
            return False

    def add_memory(self, size: int) -> None:
        """Count bytes in that are on their way already and have a limit of their own."""
        with self._changed:
            self._memory_bytes += size

    def give_memory(self, size: int) -> None:
        """Count bytes out."""
        with self._changed:
            self._memory_bytes -= size
            self._tell()

    def take_spill(self, size: int) -> bool:
        """Count bytes of files in, if there is room."""
        with self._changed:
            if self._spill_bytes + size > self.spill_limit_bytes:
                return False
            self._spill_bytes += size
            return True

    def add_spill(self, size: int) -> None:
        """Count bytes of files in that are there already."""
        with self._changed:
            self._spill_bytes += size

    def give_spill(self, size: int) -> None:
        """Count bytes of files out."""
        with self._changed:
            self._spill_bytes -= size
            self._tell()

    def wake(self) -> None:
        """Make every waiter look again."""
        with self._changed:
            self._tell()

    def wait(self, version: int, timeout_s: float) -> None:
        """Wait until something has changed since `version` was read."""
        with self._changed:
            self._waiters += 1
            try:
                self._changed.wait_for(lambda: self._version != version, timeout_s)
            finally:
                self._waiters -= 1

    def _tell(self) -> None:
        self._version += 1
        if self._waiters:
            self._changed.notify_all()
