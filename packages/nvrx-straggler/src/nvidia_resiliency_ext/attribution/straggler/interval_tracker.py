# SPDX-License-Identifier: Apache-2.0
"""Estimate from the time between iterations after how many iterations a report is due."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from . import dist_utils

__all__ = ["ReportIntervalTracker"]

NEVER = 2**62
"""Interval of a job in which no report will be due any more; the longest one."""

_SHORTEST_STEP_S = 1e-6
_RECENT_STEPS = 64
_SETTLING_ITERS = 16
_FIRST_RETRY_ITERS = 16
_WORTHWHILE_CHANGE = 0.02


@dataclass
class ReportIntervalTracker:
    """Counts iterations and tells when a report is due, equally on all ranks.

    The interval is estimated once, in the 17th call, by one collective; if that fails, again after
    16, 32, 64 and so on iterations. Each report corrects it at no extra cost; the correction counts
    from `settling_iter` on, so that a rank which gets it late still applies it in the same
    iteration as the others.

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
        step_times: Seconds between calls, the newest 16; empty after an estimate.
        profiling_interval: The least value of `iter_interval`.
        reduce_max: Returns the greatest value that any rank gives, or infinity on all ranks to be
            asked again `retry_iters` later; a collective.
        settling_iter: Iteration that begins with `settle`; None when no correction is expected.
        retry_iters: Iterations from an estimate that fails to the next one; doubled by each.
    """

    INTERVAL_ESTIMATION_ITERS: int = 16
    time_interval: float = 60.0
    current_iter: int = 0
    iter_interval: int | None = None
    prev_iter_start_time: float | None = None
    step_times: Sequence[float] = field(default_factory=list)
    profiling_interval: int = 1
    reduce_max: Callable[[float], float] | None = field(default=None, repr=False)
    settling_iter: int | None = field(default=None, repr=False)
    retry_iters: int = field(default=_FIRST_RETRY_ITERS, repr=False)
    _estimate_iter: int = field(default=0, repr=False)
    _anchor_iter: int = field(default=0, repr=False)
    _report_iter: int = field(default=0, repr=False)
    _recent: deque[float] = field(
        default_factory=lambda: deque(maxlen=_RECENT_STEPS), repr=False, compare=False
    )

    def iter_increase(self) -> None:
        """Count an iteration; the 17th call is a collective of all ranks."""
        self.current_iter += 1
        now = time.monotonic()
        steps = self.INTERVAL_ESTIMATION_ITERS
        if self.prev_iter_start_time is not None:
            self._recent.append(now - self.prev_iter_start_time)
            if self.iter_interval is None:
                self.step_times = [*self.step_times, now - self.prev_iter_start_time][-steps:]
        self.prev_iter_start_time = now
        if len(self.step_times) >= steps and self.current_iter >= self._estimate_iter:
            self._estimate()

    def _estimate(self) -> None:
        wanted = iterations_in(self.time_interval, _median(self.step_times))
        reduce_max = self.reduce_max or _reduce_max
        agreed = reduce_max(max(wanted, self.profiling_interval))
        if math.isfinite(agreed):
            self.iter_interval = int(agreed)
        else:
            self._estimate_iter = self.current_iter + self.retry_iters
            self.retry_iters *= 2
        self.step_times = []
        self._recent.clear()

    def is_interval_elapsed(self) -> bool:
        """Return whether the last counted iteration ends a reporting interval."""
        if self.iter_interval is None:
            return False
        return (self.current_iter - self._anchor_iter) % self.iter_interval == 0

    def take_step_time(self) -> float:
        """Return the median step time since the last call, s; infinity when none is known."""
        step_time = _median(self._recent) if self._recent else math.inf
        self._recent.clear()
        return step_time

    def expect_correction(self) -> None:
        """Remember that the report of this iteration corrects the interval, on all ranks."""
        self._report_iter = self.current_iter
        interval = NEVER if self.iter_interval is None else self.iter_interval
        self.settling_iter = self.current_iter + min(interval, _SETTLING_ITERS)

    def settle(self, iter_interval: int | None) -> None:
        """Apply the expected correction, counted from the iteration of its report.

        Args:
            iter_interval: The interval that all ranks agree on; None changes nothing.
        """
        self.settling_iter = None
        if self.iter_interval is None or iter_interval is None:
            return
        if abs(iter_interval - self.iter_interval) > _WORTHWHILE_CHANGE * self.iter_interval:
            self.iter_interval = iter_interval
            self._anchor_iter = self._report_iter


def iterations_in(time_interval: float, step_time: float) -> float:
    """Return how many iterations of `step_time` seconds fit into `time_interval` seconds.

    At most `NEVER`.

    Example:
        >>> iterations_in(60.0, 0.5)
        120.0
    """
    return min(time_interval / max(step_time, _SHORTEST_STEP_S), float(NEVER))


def _median(values: Sequence[float] | deque[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _reduce_max(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=dist_utils.get_device_for_backend())
    dist_utils.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())
