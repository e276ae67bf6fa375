# SPDX-License-Identifier: Apache-2.0
"""Owns how many bytes may wait in memory and whose turn it is to wait; pure."""

from __future__ import annotations

import enum

__all__ = ["Budget", "Verdict"]

_FILE_SHARE = 8
_TROUBLED_SHARE = 2


class Verdict(enum.Enum):
    """What becomes of a chunk."""

    ADMIT = "admit"
    WAIT = "wait"
    REFUSE = "refuse"


class Budget:
    """Bytes that wait for their file.

    One file may hold an eighth, and all files that cannot be written at present a half together, so
    that the others always find room.

    Args:
        limit_bytes: The most that may wait.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.peak_bytes = 0
        self.file_limit_bytes = max(1, limit_bytes // _FILE_SHARE)
        self.troubled_limit_bytes = limit_bytes // _TROUBLED_SHARE

    def judge(
        self, size: int, file_held: int, *, is_failing: bool = False, troubled_held: int = 0
    ) -> Verdict:
        """Return what to do with a chunk now.

        Args:
            size: Its bytes.
            file_held: What waits for the same file.
            is_failing: Writing that file gives errors: then waiting would be for nobody knows how
                long, and the sender, who still has the chunk, is told.
            troubled_held: What waits for this and all other files that fail or hang; 0 when this
                file does neither.
        """
        if size > self.limit_bytes:
            return Verdict.REFUSE
        over_file = file_held > 0 and file_held + size > self.file_limit_bytes
        over_troubled = troubled_held > 0 and troubled_held + size > self.troubled_limit_bytes
        if over_file or over_troubled:
            return Verdict.REFUSE if is_failing else Verdict.WAIT
        return Verdict.ADMIT if self.has_room(size) else Verdict.WAIT

    def has_room(self, size: int) -> bool:
        """Tell whether so much more may wait, whatever its file."""
        return self.held_bytes + size <= self.limit_bytes

    def take(self, size: int) -> None:
        """Count a chunk in."""
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def give(self, size: int) -> None:
        """Count a chunk out."""
        self.held_bytes -= size
