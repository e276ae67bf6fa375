# SPDX-License-Identifier: Apache-2.0
"""Owns the funnel's state and the one lock that guards it; no behaviour."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils._funnel.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvidia_resiliency_ext.shared_utils._funnel.streams import Source
    from nvidia_resiliency_ext.shared_utils._funnel.target import Target

__all__ = ["FunnelState", "FunnelStats", "tell"]


@dataclass(frozen=True, slots=True)
class FunnelStats:
    """What the funnel did so far; all but the counts of files only grow or are momentary."""

    received_bytes: int
    received_chunks: int
    written_bytes: int
    repeated_chunks: int
    lost_bytes: int
    buffered_bytes: int
    buffered_bytes_peak: int
    files: int
    open_files: int
    failing_files: int


class FunnelState:
    """What all parts of a funnel share. `lock` guards every other field and what is in it.

    Attributes:
        settled: Notified when chunks were written, let in or refused, and when no writer works.
        targets: All files, the one that was not written for longest first.
        open: Those that are held open, likewise.
        working: Those that wait for a writer or are with one.
        troubled: Those that cannot be written at present.
    """

    def __init__(self, max_buffered_bytes: int) -> None:
        self.lock = threading.Lock()
        self.settled = threading.Condition(self.lock)
        self.budget = Budget(max_buffered_bytes)
        self.targets: OrderedDict[str, Target] = OrderedDict()
        self.open: OrderedDict[Target, None] = OrderedDict()
        self.working: set[Target] = set()
        self.troubled: set[Target] = set()
        self.is_flushing = False
        self.is_closed = False
        self.received_bytes = 0
        self.received_chunks = 0
        self.written_bytes = 0
        self.repeated = 0
        self.lost_bytes = 0

    def stats(self) -> FunnelStats:
        """Return what was done so far."""
        with self.lock:
            return FunnelStats(
                received_bytes=self.received_bytes,
                received_chunks=self.received_chunks,
                written_bytes=self.written_bytes,
                repeated_chunks=self.repeated,
                lost_bytes=self.lost_bytes,
                buffered_bytes=self.budget.held_bytes,
                buffered_bytes_peak=self.budget.peak_bytes,
                files=len(self.targets),
                open_files=len(self.open),
                failing_files=sum(t.error is not None for t in self.troubled),
            )


def tell(sources: Iterable[Source]) -> None:
    """Tell connections that their sources moved; with no lock held."""
    for source in sources:
        source.connection.progress(source)
