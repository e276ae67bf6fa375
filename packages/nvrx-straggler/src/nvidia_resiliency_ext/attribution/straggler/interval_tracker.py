# SPDX-License-Identifier: Apache-2.0
"""After how many iterations a report is due, estimated from the time between iterations."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from . import dist_utils

__all__ = ["ReportIntervalTracker"]

_SHORTEST_STEP_S = 1e-6
_RECENT_STEPS = 64
_WORTHWHILE_CHANGE = 0.02


@dataclass
class ReportIntervalTracker:
    """Counts iterations and tells when a report is due, equally on all ranks.

    The interval is estimated once, in the 17th call, by one collective; each report then corrects
    it at no extra cost.

    Example:
        >>> tracker = ReportIntervalTracker(time_interval=0.0, profiling_interval=2)
        >>> for _ in range(18):
        ...     tracker.iter_increase()
        >>> tracker.iter_interval, tracker.is_interval_elapsed()
        (2, True)

    Attributes:
        INTERVAL_ESTIMATION_ITERS: Steps that are timed before the first estimate.
        time_interval: Seconds between reports.
        current_iter: Iterations so far.
        iter_interval: Iterations between reports; None before the first estimate.
        prev_iter_start_time: When the last call was made, monotonic seconds.
        step_times: Seconds between calls; empty after the first estimate.
        profiling_interval: The least value of `iter_interval`.
        reduce_max: Returns the greatest value that any rank gives; a collective.
    """

    INTERVAL_ESTIMATION_ITERS: int = 16
    time_interval: float = 60.0
    current_iter: int = 0
    iter_interval: int | None = None
    prev_iter_start_time: float | None = None
    step_times: Sequence[float] = field(default_factory=list)
    profiling_interval: int = 1
    reduce_max: Callable[[float], float] | None = field(default=None, repr=False)
    _anchor_iter: int = field(default=0, repr=False)
    _recent: deque[float] = field(
        default_factory=lambda: deque(maxlen=_RECENT_STEPS), repr=False, compare=False
    )

    def iter_increase(self) -> None:
        """Count an iteration; the 17th call is a collective of all ranks."""
        self.current_iter += 1
        now = time.monotonic()
        if self.prev_iter_start_time is not None:
            self._recent.append(now - self.prev_iter_start_time)
            if self.iter_interval is None:
                self.step_times = [*self.step_times, now - self.prev_iter_start_time]
        self.prev_iter_start_time = now
        if self.iter_interval is None and len(self.step_times) >= self.INTERVAL_ESTIMATION_ITERS:
            wanted = self._wanted(self.step_times)
            reduce_max = self.reduce_max or _reduce_max
            self.iter_interval = int(max(reduce_max(wanted), self.profiling_interval))
            self.step_times = []
            self._recent.clear()

    def is_interval_elapsed(self) -> bool:
        """Tell whether the last counted iteration ends a reporting interval."""
        if self.iter_interval is None:
            return False
        return (self.current_iter - self._anchor_iter) % self.iter_interval == 0

    def wanted_interval(self) -> float:
        """Return how many iterations fit into `time_interval` on this rank, 0 when unknown."""
        return self._wanted(self._recent) if self._recent else 0.0

    def correct(self, iter_interval: float) -> None:
        """Take over an interval that all ranks agree on, counted from the present iteration.

        Args:
            iter_interval: The greatest `wanted_interval` of all ranks; 0 changes nothing.
        """
        self._recent.clear()
        if self.iter_interval is None or iter_interval <= 0:
            return
        agreed = int(max(iter_interval, self.profiling_interval))
        if abs(agreed - self.iter_interval) > _WORTHWHILE_CHANGE * self.iter_interval:
            self.iter_interval = agreed
            self._anchor_iter = self.current_iter

    def _wanted(self, step_times: Sequence[float] | deque[float]) -> float:
        return self.time_interval / max(_median(step_times), _SHORTEST_STEP_S)


def _median(values: Sequence[float] | deque[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _reduce_max(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=dist_utils.get_device_for_backend())
    dist_utils.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())
