# SPDX-License-Identifier: Apache-2.0
"""A report for people: a table for the terminal and a picture."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from nvidia_resiliency_ext.shared_utils.console import plain
from nvidia_resiliency_ext.shared_utils.errors import MissingExtraError

if TYPE_CHECKING:
    from .report import Report

__all__ = ["plot", "table"]

_BAR = 20
_DOTS_PER_INCH = 120


def table(report: Report, k: int) -> str:
    """Return the slowest `k` ranks as lines, the reason of missing scores, and explanations."""
    scores = report.gpu_relative_perf_scores or report.gpu_individual_perf_scores
    is_relative = bool(report.gpu_relative_perf_scores)
    kind = "relative" if is_relative else "individual"
    threshold = report.thresholds["gpu_rel_threshold" if is_relative else "gpu_indiv_threshold"]
    worst = sorted(
        ((score, rank) for rank, score in scores.items() if not math.isnan(score)),
    )
    lines = [
        (
            f"{len(report.rank_to_node)} ranks, GPU score {kind}, threshold {threshold:g},"
            f" report took {report.generate_report_elapsed_time:.1f} ms"
        )
    ]
    if worst:
        values = [score for score, _ in worst]
        lines.append(
            f"min {values[0]:.3f}  median {float(np.median(values)):.3f}  max {values[-1]:.3f}"
        )
        width = max(len(plain(report.rank_to_node.get(rank, "?"))) for _, rank in worst[:k])
        lines.append(f"{'rank':>6}  {'node':{max(width, 4)}}  score")
    for score, rank in worst[:k]:
        node = plain(report.rank_to_node.get(rank, "?"))
        bar = "#" * round(_BAR * min(score, 1.0))
        mark = "  straggler" if score < threshold else ""
        lines.append(f"{rank:>6}  {node:{max(width, 4)}}  {score:.3f} {bar:{_BAR}}{mark}".rstrip())
    if len(worst) > k:
        lines.append(f"   ...  {len(worst) - k} more ranks, all at {worst[k][0]:.3f} or better")
    missing = len(scores) - len(worst)
    if missing:
        lines.append(f"{missing} ranks without a GPU score")
    lines += [f"{plain(name)}: {plain(text)}" for name, text in report.nan_reasons.items()]
    for item in report.explain()[:k]:
        lines += [plain(line) for line in str(item).splitlines()]
    return "\n".join(lines) + "\n"


def plot(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the scores by rank, and the sections' scores as a map where there are any."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("Report.plot", "'nvrx-straggler[plot]'", error) from error
    sections = report.section_relative_perf_scores or report.section_individual_perf_scores
    figure = Figure(figsize=(9, 6 if sections else 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if sections else 1, 1, squeeze=False)[:, 0]
    _plot_scores(report, axes[0])
    if sections:
        names = list(sections)
        values = np.array([list(sections[name].values()) for name in names], dtype=np.float64)
        image = axes[1].imshow(
            values, aspect="auto", cmap="viridis", vmin=0.5, vmax=1.0, interpolation="nearest"
        )
        axes[1].set_yticks(range(len(names)), [plain(name)[-32:] for name in names])
        axes[1].set_xlabel("rank")
        axes[0].set_xlim(axes[1].get_xlim())
        axes[1].set_title("section scores", loc="left")
        figure.colorbar(image, ax=axes[1])
    figure.savefig(os.fspath(path), dpi=_DOTS_PER_INCH)


def _plot_scores(report: Report, axes: Any) -> None:
    drawn = [
        ("relative", report.gpu_relative_perf_scores, "gpu_rel_threshold", "C0"),
        ("individual", report.gpu_individual_perf_scores, "gpu_indiv_threshold", "C1"),
    ]
    for label, scores, threshold_name, color in drawn:
        ranks = np.fromiter(scores, dtype=np.int64, count=len(scores))
        values = np.array(list(scores.values()), dtype=np.float64)
        if not np.isfinite(values).any():
            continue
        axes.plot(ranks, values, ".", color=color, label=f"{label} GPU score")
        threshold = report.thresholds[threshold_name]
        if label == "relative":
            axes.axhline(threshold, color="0.5", linestyle="--", linewidth=1)
            for rank in ranks[values < threshold][:16].tolist():
                axes.annotate(
                    f"{rank} ({plain(report.rank_to_node.get(rank, '?'))})",
                    (rank, scores[rank]),
                    textcoords="offset points",
                    xytext=(5, -4),
                    fontsize=8,
                )
    if not axes.lines:
        axes.text(0.5, 0.5, "no GPU scores", ha="center", transform=axes.transAxes)
    else:
        axes.legend(loc="lower left", fontsize=8)
    axes.set_ylim(0, 1.1)
    axes.set_ylabel("score")
    axes.set_title("GPU scores by rank (1.0 keeps up with the best)", loc="left")
