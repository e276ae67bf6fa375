# SPDX-License-Identifier: Apache-2.0
"""`Report`: the scores of one window, and what can be asked of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from nvidia_resiliency_ext.attribution.straggler.statistics import Statistic

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

    from .explain import RankExplanation
    from .views import RankDetail

    _Array = npt.NDArray[np.float64]

DEFAULT_THRESHOLDS: Mapping[str, float] = {
    "gpu_rel_threshold": 0.75,
    "section_rel_threshold": 0.75,
    "gpu_indiv_threshold": 0.75,
    "section_indiv_threshold": 0.75,
}
"""Scores below which a rank is a straggler, by argument of `Report.identify_stragglers`."""

_FALSE_ALARMS = 1e-4
"""Part of healthy jobs in which chance alone may take a rank beyond a suggested threshold."""


@dataclass(frozen=True)
class StragglerId:
    """A slow rank and its node.

    Args:
        rank: The rank.
        node: The name of its host.

    Example:
        >>> StragglerId(3, "node-a")
        StragglerId(rank=3, node='node-a')
    """

    rank: int
    node: str


@dataclass(frozen=True)
class Report:
    """Scores of one window. A score of 1.0 keeps up with the reference, 0.5 takes twice as long.

    Relative scores compare a rank with the best rank, individual scores with its own past. A
    score that cannot be computed is NaN, and `nan_reasons` says why. Mappings are read-only views.

    Attributes:
        gpu_relative_perf_scores: Rank -> score of its kernels; empty if not computed.
        section_relative_perf_scores: Section -> rank -> score.
        gpu_individual_perf_scores: Rank -> score against its own best.
        section_individual_perf_scores: Section -> rank -> score against its own best.
        rank_to_node: Rank -> node: all ranks when gathered, else this one.
        local_section_summaries: Section -> figures on this rank, ms.
        local_kernel_summaries: Kernel -> figures on this rank, us, without communication kernels.
        generate_report_elapsed_time: Time to build the report, ms.
        gather_on_rank0: Whether the report covers all ranks.
        rank: The rank that built it.
        cuda_profiling_status: `ok`, `off`, `paused: torch.profiler`, `unavailable: <why>` or
            another reason why kernels were not timed on this rank.
        details: Rank -> times, status and slowest kernels.
        thresholds: The job's thresholds, as set with `Detector.request_settings` or from outside.
        nan_reasons: Why scores are missing, under `gpu` and `sections`.
        consecutive_windows_below: Rank -> in how many windows in a row, this one included, the
            relative GPU score was below the threshold.
    """

    gpu_relative_perf_scores: Mapping[int, float]
    section_relative_perf_scores: Mapping[str, Mapping[int, float]]
    gpu_individual_perf_scores: Mapping[int, float]
    section_individual_perf_scores: Mapping[str, Mapping[int, float]]
    rank_to_node: Mapping[int, str]
    local_section_summaries: Mapping[str, Mapping[Statistic, float]]
    local_kernel_summaries: Mapping[str, Mapping[Statistic, float]]
    generate_report_elapsed_time: float
    gather_on_rank0: bool
    rank: int | None = None
    cuda_profiling_status: str = "off"
    details: Mapping[int, RankDetail] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_THRESHOLDS))
    nan_reasons: Mapping[str, str] = field(default_factory=dict)
    consecutive_windows_below: Mapping[int, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return True

    def identify_stragglers(
        self,
        gpu_rel_threshold: float = 0.75,
        section_rel_threshold: float = 0.75,
        gpu_indiv_threshold: float = 0.75,
        section_indiv_threshold: float = 0.75,
    ) -> dict[str, Any]:
        """Return the ranks whose score is below a threshold; a NaN score never is.

        Any number is a threshold: nobody is below 0, and with a reference other than the best rank
        scores may be above 1.

        Args:
            gpu_rel_threshold: For a GPU's score relative to the other ranks; default 0.75.
            section_rel_threshold: For a section's score relative to the other ranks; default 0.75.
            gpu_indiv_threshold: For a GPU's score relative to its own best; default 0.75.
            section_indiv_threshold: For a section's score relative to its own best; default 0.75.

        Returns:
            `straggler_gpus_relative` and `straggler_gpus_individual`: sets of `StragglerId`;
            `straggler_sections_relative` and `straggler_sections_individual`: such a set for each
            section that has a straggler.

        Raises:
            ValueError: A threshold is NaN.

        Example:
            >>> report = Report({0: 1.0, 1: 0.6}, {}, {}, {}, {0: "a", 1: "b"}, {}, {}, 1.0, True)
            >>> report.identify_stragglers()["straggler_gpus_relative"]
            {StragglerId(rank=1, node='b')}
        """
        given = (
            gpu_rel_threshold,
            section_rel_threshold,
            gpu_indiv_threshold,
            section_indiv_threshold,
        )
        for name, threshold in zip(DEFAULT_THRESHOLDS, given, strict=True):
            if math.isnan(threshold):
                raise ValueError(f"{name}=nan: give a number, such as 0.75")
        gpus, sections = self._ids_below, self._section_ids_below
        return {
            "straggler_gpus_relative": gpus(self.gpu_relative_perf_scores, given[0]),
            "straggler_gpus_individual": gpus(self.gpu_individual_perf_scores, given[2]),
            "straggler_sections_relative": sections(self.section_relative_perf_scores, given[1]),
            "straggler_sections_individual": sections(
                self.section_individual_perf_scores, given[3]
            ),
        }

    def suggest_threshold(self, slowdown: float = 0.10) -> float:
        """Return the relative GPU score below which a rank is slow, given how these ranks vary.

        The default of `identify_stragglers`, 0.75, names ranks that take a third longer than the
        best; one that takes 10 % longer scores 0.91. The suggestion lies half-way between the
        healthy ranks and one that is `slowdown` slower, and beyond what chance makes of healthy
        ranks that differ as much as these do. It holds while at most half of the ranks are slow.

        Args:
            slowdown: Additional time, as a part of a healthy rank's, from which on a rank is to be
                named; 0.10 for 10 %.

        Returns:
            A score between 0 and 1; the job's own threshold if no rank has a score.

        Raises:
            ValueError: `slowdown` is not more than 0.

        Example:
            >>> report = Report({0: 1.0, 1: 0.99, 2: 0.9}, {}, {}, {}, {}, {}, {}, 1.0, True)
            >>> limit = report.suggest_threshold()
            >>> report.identify_stragglers(gpu_rel_threshold=limit)["straggler_gpus_relative"]
            {StragglerId(rank=2, node='?')}
        """
        if not slowdown > 0:
            raise ValueError(f"slowdown={slowdown}: must be more than 0, such as 0.10 for 10 %")
        scores = _array(self.gpu_relative_perf_scores)
        scores = scores[np.isfinite(scores) & (scores > 0)]
        if not len(scores):
            return self.thresholds["gpu_rel_threshold"]
        return 1 / _slow_from(np.sort(1 / scores), slowdown)

    def explain(self, rank: int | None = None, k: int = 3) -> list[RankExplanation]:
        """Return why ranks are slow: kernels and sections that cost time, and where the time went.

        Args:
            rank: The rank to explain; default: every rank below one of the job's thresholds,
                slowest first.
            k: Kernels and sections to name for a rank, at most 3 kernels.

        Returns:
            A list, whose `str()` is text for people.

        Raises:
            KeyError: The report has no such rank.
            ValueError: `k` is negative.
        """
        from .explain import explain

        _require_count(k)
        return explain(self, rank, k)

    def summary(self, k: int = 5) -> dict[str, Any]:
        """Return the extremes of each GPU score: least, median, greatest, `k` worst and best ranks.

        Returns:
            For `gpu_relative` and `gpu_individual`, those that were computed: `min`, `median`,
            `max`, `worst` and `best` (lists of `(rank, node, score)`) and `without_score`
            (how many ranks have none).

        Raises:
            ValueError: `k` is negative.
        """
        _require_count(k)
        given = {
            "gpu_relative": self.gpu_relative_perf_scores,
            "gpu_individual": self.gpu_individual_perf_scores,
        }
        return {name: self._extremes(scores, k) for name, scores in given.items() if scores}

    def table(self, k: int = 8) -> str:
        """Return the report as text for a terminal: the `k` slowest ranks, and why.

        Raises:
            ValueError: `k` is negative.
        """
        from .render import table

        _require_count(k)
        return table(self, k)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of the scores; the suffix of the path chooses the format, else PNG.

        Args:
            path: The file to write, such as `report.png` or `report.svg`; it is replaced.

        Raises:
            MissingExtraError: matplotlib is not installed (`pip install 'nvrx-straggler[plot]'`).
            OSError: The file cannot be written; what was there is unchanged.
            ValueError: matplotlib does not know the format.
        """
        from .render import plot

        plot(self, path)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values; NaN becomes None, statistics their names."""
        names = (item.name for item in fields(self) if item.name != "details")
        return {name: _plain(getattr(self, name)) for name in names}

    def to_json(self) -> str:
        """Return `to_dict` as JSON; ranks become text keys."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def _extremes(self, scores: Mapping[int, float], k: int) -> dict[str, Any]:
        ranks = np.fromiter(scores, dtype=np.int64, count=len(scores))
        values = _array(scores)
        usable = np.flatnonzero(np.isfinite(values))
        order = usable[np.argsort(values[usable], kind="stable")]
        named = [
            (int(ranks[i]), self._node(int(ranks[i])), float(values[i])) for i in order.tolist()
        ]
        found = values[usable] if len(usable) else np.array([math.nan])
        return {
            "min": float(found.min()),
            "median": float(np.median(found)),
            "max": float(found.max()),
            "worst": named[:k],
            "best": named[::-1][:k],
            "without_score": len(values) - len(usable),
        }

    def _node(self, rank: int) -> str:
        return self.rank_to_node.get(rank, "?")

    def _ids_below(self, scores: Mapping[int, float], threshold: float) -> set[StragglerId]:
        below = getattr(scores, "below", None)
        ranks = below(threshold) if below else [r for r, s in scores.items() if s < threshold]
        return {StragglerId(rank, self._node(rank)) for rank in ranks}

    def _section_ids_below(
        self, scores: Mapping[str, Mapping[int, float]], threshold: float
    ) -> dict[str, set[StragglerId]]:
        found = {name: self._ids_below(ranks, threshold) for name, ranks in scores.items()}
        return {name: ids for name, ids in found.items() if ids}


def _require_count(k: int) -> None:
    if k < 0:
        raise ValueError(f"k={k}: must be 0 or more")


def _array(scores: Mapping[int, float]) -> _Array:
    array = getattr(scores, "array", None)
    return np.asarray(list(scores.values()) if array is None else array, dtype=np.float64)


def _slow_from(times: _Array, slowdown: float) -> float:
    """Return the time from which on a rank is slow, for the sorted times of all ranks.

    The fastest half is healthy, and so is the next rank as long as it is not too far from all
    that are faster. How much healthy ranks differ is thus measured without the slow ones.
    """
    from statistics import NormalDist  # costs an import of some ms, which few programs need

    count = len(times)
    healthy = np.arange((count + 1) // 2, count + 1)
    later = times - times[0]
    mean = np.cumsum(later)[healthy - 1] / healthy
    squares = np.cumsum(later**2)[healthy - 1] - healthy * mean**2
    deviation = np.sqrt(np.maximum(squares, 0.0) / np.maximum(healthy - 1, 1))
    usual = times[0] + mean
    deviations = NormalDist().inv_cdf(1 - _FALSE_ALARMS / count)
    limits = np.maximum(usual * (1 + slowdown / 2), usual + deviations * deviation)
    following = np.append(times, math.inf)[healthy]
    return float(limits[np.argmax(following > limits)])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        names = ((str(k) if isinstance(k, Statistic) else k, v) for k, v in value.items())
        return {name: _plain(item) for name, item in names}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
