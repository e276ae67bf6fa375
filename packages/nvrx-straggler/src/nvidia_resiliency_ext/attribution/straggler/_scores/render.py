# SPDX-License-Identifier: Apache-2.0
"""A report for people: a table for the terminal and a picture."""

from __future__ import annotations

import io
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from nvidia_resiliency_ext.shared_utils.console import plain
from nvidia_resiliency_ext.shared_utils.errors import MissingExtraError
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write

from .explain import gpu_scores, section_scores, short

if TYPE_CHECKING:
    from .report import Report

_BAR = 20
_DOTS_PER_INCH = 120


def table(report: Report, k: int) -> str:
    """Return the slowest `k` ranks as lines, the reason of missing scores, and explanations."""
    kind, scores, threshold = gpu_scores(report)
    found = report.summary(k + 1).get(f"gpu_{kind}", {"worst": [], "without_score": 0})
    worst, missing = found["worst"][:k], found["without_score"]
    count = len(report.rank_to_node)
    lines = [
        (
            f"{count} rank{'' if count == 1 else 's'}, GPU score {kind}, threshold {threshold:g},"
            f" report took {report.generate_report_elapsed_time:.1f} ms"
        )
    ]
    if worst:
        lines.append("min {min:.3f}  median {median:.3f}  max {max:.3f}".format(**found))
        width = max(4, *(len(plain(node)) for _, node, _ in worst))
        lines.append(f"{'rank':>6}  {'node':{width}}  score")
    for rank, node, score in worst:
        bar = "#" * round(_BAR * min(score, 1.0))
        mark = "  straggler" if score < threshold else ""
        lines.append(f"{rank:>6}  {plain(node):{width}}  {score:.3f} {bar:{_BAR}}{mark}".rstrip())
    more = len(scores) - missing - len(worst)
    if worst and more:
        best = found["worst"][k][2]
        lines.append(f"   ...  {more} more ranks, all at {best:.3f} or better")
    if missing:
        lines.append(f"{missing} rank{'' if missing == 1 else 's'} without a GPU score")
    lines += [f"{plain(name)}: {plain(text)}" for name, text in report.nan_reasons.items()]
    lines += _section_lines(report)[:k]
    for item in report.explain()[:k]:
        lines += [plain(line) for line in str(item).splitlines()]
    return "\n".join(lines) + "\n"


def _section_lines(report: Report) -> list[str]:
    """Return the slowest rank of each section, worst section first."""
    sections, limit = section_scores(report)
    found = []
    for name, scores in sections.items():
        scored = [(score, rank) for rank, score in scores.items() if not math.isnan(score)]
        if scored:
            found.append((*min(scored), name))
    return [
        f"section {plain(short(name))}: slowest is rank {rank} on"
        f" {plain(report.rank_to_node.get(rank, '?'))}, score {score:.3f}"
        + ("  straggler" if score < limit else "")
        for score, rank, name in sorted(found)
    ]


def plot(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the scores by rank, and the sections' scores as a map where there are any."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("Report.plot", "'nvrx-straggler[plot]'", error) from error
    sections, _ = section_scores(report)
    has_gpu = any(np.isfinite(values).any() for *_, values in _scores_by_kind(report))
    parts = [(has_gpu or not sections, _plot_scores), (bool(sections), _plot_sections)]
    drawn = [draw for is_wanted, draw in parts if is_wanted]
    figure = Figure(figsize=(9, 0.5 + 3 * len(drawn)), layout="constrained")
    FigureCanvasAgg(figure)
    # One axis of ranks for both parts.
    axes = figure.subplots(len(drawn), 1, squeeze=False, sharex=True)[:, 0]
    for draw, part in zip(drawn, axes, strict=True):
        draw(report, part)
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel("rank")
    picture = io.BytesIO()  # a full disk leaves no half of it
    suffix = os.path.splitext(path)[1][1:]
    figure.savefig(picture, format=suffix or "png", dpi=_DOTS_PER_INCH)
    atomic_write(path, picture.getvalue(), mode=None, fsync=False)


def _scores_by_kind(report: Report) -> list[tuple[str, Any, Any]]:
    """Return `(kind, ranks, scores)` of each GPU score."""
    given = [
        ("relative", report.gpu_relative_perf_scores),
        ("individual", report.gpu_individual_perf_scores),
    ]
    return [(kind, np.array(list(of)), np.array(list(of.values()), float)) for kind, of in given]


def _plot_scores(report: Report, axes: Any) -> None:
    for (kind, ranks, values), (marker, color) in zip(
        _scores_by_kind(report), (("o", "C0"), ("x", "C1")), strict=True
    ):
        if not np.isfinite(values).any():
            continue
        axes.plot(ranks, values, marker, color=color, markersize=4, label=f"{kind} GPU score")
        if kind == "relative":
            limit = report.thresholds["gpu_rel_threshold"]
            axes.axhline(
                limit, color="0.4", linestyle="--", linewidth=1, label=f"threshold {limit:g}"
            )
            for rank, score in zip(
                ranks[values < limit][:16], values[values < limit], strict=False
            ):
                axes.annotate(
                    f"rank {rank} on {plain(report.rank_to_node.get(int(rank), '?'))}",
                    (rank, score),
                    textcoords="offset points",
                    # Names at the right end would leave the picture.
                    xytext=(-6, -4) if 2 * rank > len(ranks) else (6, -4),
                    ha="right" if 2 * rank > len(ranks) else "left",
                    fontsize=8,
                )
    if axes.lines:
        axes.legend(loc="lower left", fontsize=8)
    else:
        axes.text(0.5, 0.5, "no scores", ha="center", transform=axes.transAxes)
    axes.set_ylim(0, 1.1)
    axes.set_ylabel("score")
    axes.set_title("GPU scores by rank (1.0: as fast as the best)", loc="left")


def _plot_sections(report: Report, axes: Any) -> None:
    sections, _ = section_scores(report)
    is_relative = bool(report.section_relative_perf_scores)
    best = "as fast as the best rank" if is_relative else "as fast as ever"
    names = list(sections)
    values = np.array([list(sections[name].values()) for name in names], dtype=np.float64)
    ranks = list(next(iter(sections.values())))
    image = axes.imshow(
        values,
        aspect="auto",
        cmap="viridis",
        vmin=0.5,
        vmax=1.0,
        interpolation="nearest",
        extent=(ranks[0] - 0.5, ranks[-1] + 0.5, len(names) - 0.5, -0.5),
    )
    axes.set_yticks(range(len(names)), [plain(name)[-32:] for name in names])
    axes.set_title(f"section scores by rank (1.0: {best}; white: no score)", loc="left")
    axes.figure.colorbar(image, ax=axes, label="score", extend="min")
