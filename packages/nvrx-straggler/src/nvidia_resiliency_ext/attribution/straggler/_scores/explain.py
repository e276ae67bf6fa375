# SPDX-License-Identifier: Apache-2.0
"""Why a rank is slow: its costly kernels and sections, and compute against communication."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .views import RankDetail, SlowKernel

if TYPE_CHECKING:
    from .report import Report

_LONGEST_NAME = 72
_NO_DETAIL = RankDetail(0.0, 0.0, "ok", 0, 0, ())


@dataclass(frozen=True)
class RankExplanation:
    """Explanation of one rank's scores; `str()` gives a few lines of text.

    Attributes:
        rank: The rank.
        node: Its node.
        gpu_score: Relative GPU score, else the individual one; NaN without any.
        kernels: Kernels that cost the most time against the reference, worst first.
        sections: `(section, score)` of its slow sections, slowest first.
        compute_us: GPU time in kernels that are compared, us in this window.
        communication_us: GPU time in communication kernels, us in this window.
        compute_ratio: `compute_us` over the median of all ranks in the report; NaN when unknown.
        communication_ratio: Likewise. A slow rank waits less than others do: below 1.
        reason: Why there is no GPU score; empty if there is one.
    """

    rank: int
    node: str
    gpu_score: float
    kernels: tuple[SlowKernel, ...]
    sections: tuple[tuple[str, float], ...]
    compute_us: float
    communication_us: float
    compute_ratio: float
    communication_ratio: float
    reason: str

    def __str__(self) -> str:
        head = f"rank {self.rank} on {self.node}: "
        if self.reason:
            lines = [f"{head}no GPU score: {self.reason}"]
        else:
            lines = [f"{head}GPU score {self.gpu_score:.2f}"]
        if self.compute_us or self.communication_us:
            lines.append(
                f"  compute {self.compute_us / 1e3:.1f} ms{_against(self.compute_ratio)},"
                f" communication {self.communication_us / 1e3:.1f} ms"
                f"{_against(self.communication_ratio)}"
            )
        lines += [
            f"  kernel {short(kernel.name)}: {1 / kernel.score:.2f} times the reference,"
            f" {kernel.share:.0%} of its compute time"
            for kernel in self.kernels
        ]
        lines += [
            f"  section {short(name)}: {1 / score:.2f} times the reference"
            for name, score in self.sections
        ]
        return "\n".join(lines)


class Explanations(list[RankExplanation]):
    """Explanations of ranks, slowest first; `str()` gives their text."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no rank is below a threshold"


def explain(report: Report, rank: int | None, k: int) -> Explanations:
    """Return the explanation of one rank, or of each that is below a threshold, slowest first."""
    if rank is not None:
        if rank not in report.rank_to_node:
            raise KeyError(f"the report has no rank {rank}; it covers {len(report.rank_to_node)}")
        return Explanations([_explain_rank(report, rank, k)])
    found = report.identify_stragglers(**report.thresholds)
    ids = found["straggler_gpus_relative"].union(
        found["straggler_gpus_individual"],
        *found["straggler_sections_relative"].values(),
        *found["straggler_sections_individual"].values(),
    )
    explained = [_explain_rank(report, item.rank, k) for item in ids]
    return Explanations(sorted(explained, key=lambda item: (_or_one(item), item.rank)))


def _explain_rank(report: Report, rank: int, k: int) -> RankExplanation:
    _, scores, _ = gpu_scores(report)
    score = scores.get(rank, math.nan)
    detail = report.details.get(rank, _NO_DETAIL)
    sections, limit = section_scores(report)
    slow = [(name, of_ranks[rank]) for name, of_ranks in sections.items() if rank in of_ranks]
    slow = sorted((item for item in slow if item[1] < limit), key=lambda item: item[1])
    return RankExplanation(
        rank=rank,
        node=report.rank_to_node.get(rank, "?"),
        gpu_score=score,
        kernels=detail.slowest[:k],
        sections=tuple(slow[:k]),
        compute_us=detail.compute_us,
        communication_us=detail.communication_us,
        compute_ratio=_ratio(detail.compute_us, report.details, column=0),
        communication_ratio=_ratio(detail.communication_us, report.details, column=1),
        reason=_reason(report, detail) if math.isnan(score) else "",
    )


def gpu_scores(report: Report) -> tuple[str, Mapping[int, float], float]:
    """Return the kind of GPU score that people are shown, the scores, and their threshold."""
    if report.gpu_relative_perf_scores:
        return "relative", report.gpu_relative_perf_scores, report.thresholds["gpu_rel_threshold"]
    return "individual", report.gpu_individual_perf_scores, report.thresholds["gpu_indiv_threshold"]


def section_scores(report: Report) -> tuple[Mapping[str, Mapping[int, float]], float]:
    """Return the scores of sections that people are shown, and their threshold."""
    if report.section_relative_perf_scores:
        return report.section_relative_perf_scores, report.thresholds["section_rel_threshold"]
    return report.section_individual_perf_scores, report.thresholds["section_indiv_threshold"]


def _reason(report: Report, detail: RankDetail) -> str:
    if detail.cuda_profiling_status != "ok":
        status = detail.cuda_profiling_status
        if report.rank is not None and report.details.get(report.rank) == detail:
            status = report.cuda_profiling_status
        return f"kernel timing is {status}"
    return report.nan_reasons.get("gpu", "no kernel that can be compared ran in this window")


def _ratio(own: float, details: Mapping[int, RankDetail], column: int) -> float:
    array = getattr(details, "array", None)
    if array is None or len(array) <= 1:
        return float("nan")
    usual = float(np.median(array[:, column]))
    return own / usual if usual > 0 else float("nan")


def _against(ratio: float) -> str:
    return "" if math.isnan(ratio) else f" ({ratio:.2f} times the median rank)"


def short(name: str) -> str:
    """Return a name that fits into a line."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _or_one(item: RankExplanation) -> float:
    worst = min((score for _, score in item.sections), default=1.0)
    return worst if math.isnan(item.gpu_score) else item.gpu_score
