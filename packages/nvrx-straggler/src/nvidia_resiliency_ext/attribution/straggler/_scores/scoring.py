# SPDX-License-Identifier: Apache-2.0
"""Scores from medians: pure array arithmetic, no collectives and no clocks.

A score is reference time divided by own time: 1.0 keeps up with the reference, 0.5 takes twice as
long. An entry whose time is unusable (zero, subnormal, NaN, infinite) has the score NaN.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from nvidia_resiliency_ext.attribution.straggler.name_mapper import MAX_NAME_CHARACTERS, shortened
from nvidia_resiliency_ext.attribution.straggler.statistics import Statistic, SummaryTable
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

Summaries = Mapping[str, Mapping[Statistic, float]]

MISSING = -1.0
"""Median of an entry that this rank should have and lacks: nobody gets a reference for it."""
ABSTAINS = float("inf")
"""Median of an entry on which this rank has no say."""

COMMUNICATION_KERNELS = (
    "ncclDev",
    "ncclKernel",
    "nvshmem",
    "mscclKernel",
    "userbuffers",
    "kuserbuffers",
)
"""Parts of names of kernels that wait for other ranks; they never count for a score."""

_SMALLEST = float(np.finfo(np.float64).tiny)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class ScoringOptions:
    """How medians become scores.

    Attributes:
        reference: `"best"` (the least median of all ranks), `"median"`, or a quantile of the
            medians between 0 (the best) and 1.
        reference_scope: `"all"`: an entry that any rank lacks has no reference. `"present"`: the
            reference is taken over those that have it.
        peer_groups: Disjoint sets of ranks that are compared only among themselves; ranks in none
            form one more group.
        min_samples: Entries with fewer samples are treated as missing.
        best_decay: Part by which the individual best is raised before each report, 0 for never.
        max_kernels: Kernels per rank and report; those with the least total time are left out.
        kernel_filter: Tells whether a kernel of this name is compared, instead of the built-in
            list of communication kernels.

    Raises:
        ConfigError: A value is wrong; the message names it.
    """

    reference: str | float = "best"
    reference_scope: str = "all"
    peer_groups: Sequence[Sequence[int]] | None = None
    min_samples: int = 1
    best_decay: float = 0.0
    max_kernels: int = 4096
    kernel_filter: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        if self.reference not in ("best", "median") and not (
            is_number(self.reference) and 0 <= self.reference <= 1
        ):
            raise ConfigError(
                f"reference={self.reference!r}: give 'best', 'median' or a number from 0 to 1"
            )
        if self.reference_scope not in ("all", "present"):
            raise ConfigError(f"reference_scope={self.reference_scope!r}: give 'all' or 'present'")
        self._check_peer_groups()
        for name in ("min_samples", "max_kernels"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1):
                raise ConfigError(f"{name}={value!r}: must be a whole number of at least 1")
        if not (is_number(self.best_decay) and 0 <= self.best_decay < 1):
            raise ConfigError(f"best_decay={self.best_decay!r}: must be at least 0 and below 1")
        if self.kernel_filter is not None and not callable(self.kernel_filter):
            raise ConfigError(
                f"kernel_filter={self.kernel_filter!r}: give a function of a kernel's name"
            )

    def _check_peer_groups(self) -> None:
        if self.peer_groups is None:
            return
        try:
            groups = [[operator.index(rank) for rank in group] for group in self.peer_groups]
        except TypeError:
            groups = [[-1]]
        members = [rank for group in groups for rank in group]
        if any(rank < 0 for rank in members):
            raise ConfigError(
                f"peer_groups={self.peer_groups!r}: give lists of ranks, such as [[0, 1], [2, 3]]"
            )
        if len(members) != len(set(members)):
            raise ConfigError(
                f"peer_groups={self.peer_groups!r}: a rank stands in more than one group"
            )
        object.__setattr__(self, "peer_groups", groups)  # whatever kind of sequence was given

    @property
    def quantile(self) -> float:
        """The quantile of all ranks' medians that is the reference; 0 for the best."""
        if isinstance(self.reference, str):
            return {"best": 0.0, "median": 0.5}[self.reference]
        return float(self.reference)

    @property
    def is_minimum_of_all(self) -> bool:
        """Return whether a minimum over all ranks is the reference: one reduction tells it."""
        return self.quantile == 0 and not self.peer_groups

    def peers_of(self, rank: int, world_size: int) -> list[int]:
        """Return the ranks with which a rank is compared, itself included.

        Args:
            rank: The rank.
            world_size: Number of ranks of the job.
        """
        groups = self.peer_groups or ()
        for group in groups:
            if rank in group:
                return [peer for peer in group if 0 <= peer < world_size]
        grouped = {peer for group in groups for peer in group}
        return [peer for peer in range(world_size) if peer not in grouped]


@dataclass
class Window:
    """Measurements of one rank since the last report.

    Attributes:
        kernel_names: Kernels that are compared.
        kernel_medians: Their medians, us; NaN where unusable.
        kernel_weights: Time spent in each, us.
        section_names: Sections of this window.
        section_medians: Their medians, ms; NaN where unusable.
        compute_us: Time in kernels that are compared.
        communication_us: Time in communication kernels.
        evicted: Kernels that were left out because there were too many.
        abstains_kernels: This rank does not time kernels, so it has no say about them.
        abstains_sections: This rank does not time sections.
    """

    kernel_names: Sequence[str] = ()
    kernel_medians: Array = field(default_factory=lambda: np.empty(0))
    kernel_weights: Array = field(default_factory=lambda: np.empty(0))
    section_names: Sequence[str] = ()
    section_medians: Array = field(default_factory=lambda: np.empty(0))
    compute_us: float = 0.0
    communication_us: float = 0.0
    evicted: int = 0
    abstains_kernels: bool = False
    abstains_sections: bool = False


def _is_compute(name: str) -> bool:
    """Return whether a kernel of this name does not wait for other ranks."""
    return not any(part in name for part in COMMUNICATION_KERNELS)


def read_window(
    sections: Summaries, kernels: Summaries, options: ScoringOptions, decisions: dict[str, bool]
) -> tuple[Window, Summaries]:
    """Return the window of a rank's summaries, and its kernel summaries without communication.

    Args:
        sections: Summary of each section.
        kernels: Summary of each kernel.
        options: What to leave out.
        decisions: Remembers for each kernel name whether it is compared; cleared when it grows.
    """
    table = SummaryTable.from_mapping(kernels)
    compared = _compared(table.names, options, decisions)
    rows = np.flatnonzero(compared)
    communication_us = float(np.nansum(table.totals[~compared]))
    evicted = max(0, len(rows) - options.max_kernels)
    if evicted:
        longest = np.argpartition(np.nan_to_num(table.totals[rows]), evicted)[evicted:]
        rows = rows[np.sort(longest)]
    kept = kernels
    if len(rows) < len(table):
        table = table.select(rows)
        is_table = isinstance(kernels, SummaryTable)
        kept = table if is_table else {name: kernels[name] for name in table.names}
    section_table = SummaryTable.from_mapping(sections)
    window = Window(
        kernel_names=_shortened(table.names),
        kernel_medians=_usable(table, options.min_samples),
        kernel_weights=table.totals,
        section_names=_shortened(section_table.names),
        section_medians=_usable(section_table, options.min_samples),
        compute_us=float(np.nansum(table.totals)),
        communication_us=communication_us,
        evicted=evicted,
    )
    return window, kept


def _shortened(names: Sequence[str]) -> Sequence[str]:
    """Return names as they travel between ranks."""
    longest = max(map(len, names), default=0)
    return names if longest <= MAX_NAME_CHARACTERS else [shortened(name) for name in names]


def _compared(
    names: Iterable[str], options: ScoringOptions, decisions: dict[str, bool]
) -> npt.NDArray[np.bool_]:
    if len(decisions) > 16 * options.max_kernels:
        decisions.clear()
    wanted = options.kernel_filter or _is_compute
    for name in names:
        if name not in decisions:
            decisions[name] = bool(wanted(name))
    return np.array([decisions[name] for name in names], dtype=np.bool_)


def _usable(table: SummaryTable, min_samples: int) -> Array:
    """Return the medians, NaN where unusable; a summary without a count has enough samples."""
    medians, counts = table.column(Statistic.MED), table.column(Statistic.NUM)
    usable = np.isfinite(medians) & (medians > _SMALLEST) & ~(counts < min_samples)
    return np.where(usable, medians, np.nan)


def ratios(reference: Array, medians: Array) -> Array:
    """Return reference / median of each entry, NaN where either is no positive finite number."""
    usable = np.isfinite(reference) & (reference > _SMALLEST) & (medians > _SMALLEST)
    result = np.full(len(medians), np.nan)
    np.divide(reference, medians, out=result, where=usable)
    return result


def gpu_score(scores: Array, weights: Array) -> float:
    """Return the mean of kernel scores, weighted by the time spent in each; NaN without any."""
    usable = np.isfinite(scores) & (weights > 0)
    total = float(weights[usable].sum())
    return float((scores[usable] * weights[usable]).sum() / total) if total > 0 else float("nan")


def slowest_kernels(scores: Array, weights: Array, count: int) -> npt.NDArray[np.intp]:
    """Return the entries that cost the most time against the reference, worst first."""
    lost = np.where(np.isfinite(scores), weights * (1 - scores), 0.0)
    order = np.argsort(-lost, kind="stable")[:count]
    worst: npt.NDArray[np.intp] = order[lost[order] > 0]
    return worst


def reference_of_ranks(medians: Array, options: ScoringOptions) -> Array:
    """Return the reference of each entry from all ranks' medians, shape `[ranks, entries]`.

    Medians are `MISSING` or `ABSTAINS` where a rank has none.
    """
    present = np.isfinite(medians) & (medians > 0)
    possible = present.any(axis=0)
    if options.reference_scope == "all":
        possible &= ~(medians == MISSING).any(axis=0)
    columns = np.flatnonzero(possible)
    reference = np.full(medians.shape[1], np.nan)
    if len(columns):
        times = np.where(present, medians, np.nan)[:, columns]
        reference[columns] = np.nanquantile(times, options.quantile, axis=0)
    return reference


class BestTimes:
    """The least median ever seen of each name on this rank, for a bounded number of names.

    Args:
        max_names: Names that are kept; those with the least total time are forgotten first.
        decay: Part by which every best is raised at each update.
    """

    def __init__(self, max_names: int, decay: float = 0.0) -> None:
        self._max_names = max_names
        self._decay = decay
        self._slot_of: dict[str, int] = {}
        self._best = np.empty(0)
        self._time = np.empty(0)

    def __len__(self) -> int:
        return len(self._slot_of)

    def update(self, names: Sequence[str], medians: Array, weights: Array) -> Array:
        """Take in a window and return the best median of each of its names, this window included.

        Args:
            names: Names of the window.
            medians: Their medians; NaN is taken as not measured.
            weights: Time spent under each name.
        """
        slot_of = self._slot_of
        for name in names:
            if name not in slot_of:
                slot_of[name] = len(slot_of)
        added = len(slot_of) - len(self._best)
        if added:
            self._best = np.concatenate([self._best, np.full(added, np.inf)])
            self._time = np.concatenate([self._time, np.zeros(added)])
        if self._decay:
            self._best *= 1 + self._decay
        slots = np.fromiter((slot_of[name] for name in names), dtype=np.intp, count=len(names))
        times = np.where(np.isfinite(medians), medians, np.inf)
        best = np.minimum(self._best[slots], times)
        self._best[slots] = best
        self._time[slots] += np.nan_to_num(weights)
        if len(slot_of) > self._max_names:
            self._forget()
        return best

    def _forget(self) -> None:
        kept = np.sort(np.argsort(-self._time, kind="stable")[: self._max_names])
        names = list(self._slot_of)
        self._slot_of = {names[old]: new for new, old in enumerate(kept.tolist())}
        self._best = self._best[kept]
        self._time = self._time[kept]
