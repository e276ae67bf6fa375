# SPDX-License-Identifier: Apache-2.0
"""Pieces of a log and how bytes are cut into them; nothing here keeps state."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BATCH_BYTES", "MAX_LINE_BYTES", "Chunk", "Gap", "cut_at", "notice_of"]

BATCH_BYTES = 64 * 1024
"""A batch of this size is sent without waiting for its deadline."""

MAX_LINE_BYTES = 1024 * 1024
"""A longer line goes on in a new line."""


class Chunk(NamedTuple):
    """Whole lines of one target, numbered; it never changes."""

    seq: int
    data: bytes
    lines: int


class Gap(NamedTuple):
    """Lines that were given up in one place; `seq` is the number of the last chunk among them."""

    seq: int = 0
    lines: int = 0
    size: int = 0

    def joined(self, later: Gap) -> Gap:
        """Return this gap and one that follows it directly as one."""
        return Gap(max(self.seq, later.seq), self.lines + later.lines, self.size + later.size)


def notice_of(gap: Gap) -> Chunk:
    """Return the line that stands in the log where lines were given up."""
    text = f"[nvrx] dropped {gap.lines} lines ({gap.size} bytes)\n"
    return Chunk(gap.seq, text.encode(), 1)


def cut_at(buffer: bytearray) -> int:
    """Return how many of the first bytes are whole lines; an endless line counts as one."""
    end = buffer.rfind(b"\n") + 1
    return end or (MAX_LINE_BYTES if len(buffer) >= MAX_LINE_BYTES else 0)
