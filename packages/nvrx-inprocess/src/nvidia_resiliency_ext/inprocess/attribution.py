# SPDX-License-Identifier: Apache-2.0
"""Reasons for the interruption of an iteration: kinds, records and their text. Detects nothing."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .utils import format_rank_set

__all__ = ["Interruption", "InterruptionRecord", "format_interruption_records"]

# A record comes from a store that others can write to: ten digits hold every rank.
_RANK = re.compile(r"\brank=([0-9]{1,10})(?![0-9])")
_KIND = re.compile(r"\bInterruption\.([A-Z_]{1,40})\b", re.ASCII)
_SHOWN = 200


class Interruption(enum.Enum):
    """Reason for a restart."""

    EXCEPTION = enum.auto()
    BASE_EXCEPTION = enum.auto()
    SOFT_TIMEOUT = enum.auto()
    HARD_TIMEOUT = enum.auto()
    TERMINATED = enum.auto()
    UNRESPONSIVE = enum.auto()
    MONITOR_PROCESS_EXCEPTION = enum.auto()


@dataclass(frozen=True)
class InterruptionRecord:
    """One rank and what happened to it; `str()` and `from_str` are its form in the store.

    Args:
        rank: The rank.
        interruption: What happened to it.

    Example:
        >>> from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
        >>> record = InterruptionRecord(1, Interruption.EXCEPTION)
        >>> InterruptionRecord.from_str(str(record)) == record
        True
    """

    rank: int
    interruption: Interruption

    @classmethod
    def from_str(cls, string: str) -> InterruptionRecord:
        """Return the record of a text that `str()` made.

        Args:
            string: The text.

        Raises:
            ValueError: The text names no rank or no known kind.
        """
        rank, kind = _RANK.search(string), _KIND.search(string)
        if rank is None or kind is None or kind[1] not in Interruption.__members__:
            raise ValueError(f"{string[:_SHOWN]!r} is no record of an interruption")
        return cls(int(rank[1]), Interruption[kind[1]])


def format_interruption_records(records: Iterable[InterruptionRecord]) -> str:
    """Return a line with the ranks of `records` by kind: `Interruption.EXCEPTION on ranks={1}`."""
    ranks: dict[Interruption, set[int]] = {kind: set() for kind in Interruption}
    for record in records:
        ranks[record.interruption].add(record.rank)
    return ", ".join(
        f"{kind} on ranks={format_rank_set(of_kind)}" for kind, of_kind in ranks.items() if of_kind
    )
