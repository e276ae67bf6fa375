# SPDX-License-Identifier: Apache-2.0
"""Scores and reports of one process, and what can be asked of a report."""

import json
import math
import resource
import sys

import numpy as np
import pytest
from straggler_ranks import summary

from nvidia_resiliency_ext.attribution.straggler import Report, Statistic, StragglerId
from nvidia_resiliency_ext.attribution.straggler._scores.scoring import BestTimes, ScoringOptions
from nvidia_resiliency_ext.attribution.straggler._scores.views import RankScores
from nvidia_resiliency_ext.attribution.straggler.reporting import ReportGenerator
from nvidia_resiliency_ext.shared_utils.errors import MissingExtraError

NAN = float("nan")


def test_individual_scores_compare_with_the_own_past():
    """Doubled medians give 0.5, absent kernels do not matter, a new low is the new reference."""
    generator = ReportGenerator("individual_perf_scores", gather_on_rank0=False)

    def score(**medians):
        kernels = {name: summary(median) for name, median in medians.items()}
        report = generator.generate_report({"s": summary(sum(medians.values()))}, kernels)
        assert report.gpu_relative_perf_scores == {}
        return report.gpu_individual_perf_scores[0], report.section_individual_perf_scores["s"][0]

    assert score(a=1.0, b=2.0) == (1.0, 1.0)
    assert score(a=2.0, b=4.0) == (0.5, 0.5)
    assert score(a=1.0) == (1.0, 1.0)
    assert score(a=0.5) == (1.0, 1.0)
    assert score(a=1.0)[0] == 0.5
    assert generator.name_mapper.kernel_counter == generator.name_mapper.section_counter == 0


def test_a_kernel_without_a_count_weighs_one_call():
    """A kernel whose summary has no count counts for the GPU score, with its mean time."""
    generator = ReportGenerator("individual_perf_scores", gather_on_rank0=False)
    for median, score in ((1.0, 1.0), (2.0, 0.5)):
        kernels = {"a": {Statistic.MED: median, Statistic.AVG: median}}
        report = generator.generate_report({}, kernels)
        assert report.gpu_individual_perf_scores[0] == score


@pytest.mark.parametrize("gather", [True, False])
def test_sections_of_earlier_windows_stay_in_gathered_reports(gather):
    """Gathered reports list every section ever seen, NaN without samples; others this window's."""
    generator = ReportGenerator("all", gather_on_rank0=gather)
    generator.generate_report({"fw": summary(1.0), "eval": summary(1.0)}, {})
    report = generator.generate_report({"fw": summary(1.0)}, {})
    relative = report.section_relative_perf_scores
    assert sorted(relative) == (["eval", "fw"] if gather else ["fw"])
    assert relative["fw"] == {0: 1.0}
    assert not gather or math.isnan(relative["eval"][0])
    assert list(report.local_section_summaries) == ["fw"]


def test_gpu_score_is_weighted_by_time():
    """The GPU score is the mean of the kernels' scores, weighted by count and mean time."""
    generator = ReportGenerator("individual_perf_scores", gather_on_rank0=False)
    generator.generate_report({}, {"a": summary(1.0), "b": summary(1.0)})
    slow = {**summary(4.0), Statistic.AVG: 3.0, Statistic.NUM: 10}
    report = generator.generate_report({}, {"a": slow, "b": summary(1.0, count=10)})
    assert report.gpu_individual_perf_scores[0] == pytest.approx((30 * 0.25 + 10 * 1) / 40)


@pytest.mark.parametrize("bad", [0.0, -1.0, 5e-324, NAN, float("inf")])
def test_unusable_medians_give_nan(bad):
    """A median that cannot be divided by is no error: its entry has no score."""
    generator = ReportGenerator("all", gather_on_rank0=False)
    report = generator.generate_report(
        {"s": summary(bad), "t": summary(1.0)}, {"k": summary(bad), "good": summary(1.0)}
    )
    assert math.isnan(report.section_relative_perf_scores["s"][0])
    assert report.section_relative_perf_scores["t"][0] == 1.0
    assert report.gpu_relative_perf_scores[0] == report.gpu_individual_perf_scores[0] == 1.0
    assert report.to_json()


def test_communication_kernels_do_not_count():
    """Kernels that wait for other ranks are left out, by the built-in list or by the user's."""
    names = ["ncclDevKernel_AllReduce", "ncclKernel_x", "nvshmem_barrier", "mscclKernel_y",
             "kuserbuffers_pushrecv", "userbuffers_fp16", "gemm"]  # fmt: skip
    kernels = {name: summary(1.0) for name in names}
    report = ReportGenerator("all", gather_on_rank0=False).generate_report({}, kernels)
    assert list(report.local_kernel_summaries) == ["gemm"]
    assert report.details[0].communication_us == 60.0
    chosen = ScoringOptions(kernel_filter=lambda name: name.startswith("nccl"))
    report = ReportGenerator("all", False, options=chosen).generate_report({}, kernels)
    assert list(report.local_kernel_summaries) == names[:2]


def test_tables_are_bounded():
    """Too many kernels leave out those with the least time, and the report counts them."""
    options = ScoringOptions(max_kernels=4)
    generator = ReportGenerator("all", gather_on_rank0=False, options=options)
    for window in range(5):
        kernels = {f"w{window}k{i}": summary(1.0 + i) for i in range(6)}
        report = generator.generate_report({}, kernels)
        assert [name[-1] for name in report.local_kernel_summaries] == ["2", "3", "4", "5"]
        assert report.details[0].evicted_kernels == 2
    assert len(generator._best_kernels) == 4
    best = BestTimes(2)
    weights = np.array([1.0, 5.0, 3.0])
    best.update(["a", "b", "c"], np.array([1.0, 1.0, 1.0]), weights)
    assert best.update(["b", "c"], np.array([9.0, 9.0]), weights[:2]).tolist() == [1.0, 1.0]
    assert best.update(["a"], np.array([9.0]), weights[:1]).tolist() == [9.0]


def test_decay_and_least_samples():
    """A lucky window is forgotten with decay, and few samples are not compared."""
    options = ScoringOptions(best_decay=0.5, min_samples=5)
    generator = ReportGenerator("individual_perf_scores", False, options=options)
    generator.generate_report({}, {"k": summary(1.0)})
    report = generator.generate_report({}, {"k": summary(3.0), "few": summary(1.0, count=4)})
    assert report.gpu_individual_perf_scores[0] == pytest.approx(0.5)


def report_of(scores, **more):
    nodes = {rank: f"node{rank}" for rank in scores}
    return Report(scores, {}, {}, {}, nodes, {}, {}, 1.0, True, 0, **more)


@pytest.mark.parametrize("kind", [dict, lambda scores: RankScores(np.array([*scores.values()]))])
def test_thresholds_are_strict_and_nan_is_nobody(kind):
    """A rank is a straggler below the threshold, not at it, and never for a NaN score."""
    report = Report(
        kind({0: 0.75, 1: 0.74, 2: NAN}),
        {"s": kind({0: 1.0, 1: 0.5, 2: NAN}), "t": kind({0: 1.0, 1: 1.0, 2: 1.0})},
        kind({0: 0.1}),
        {"s": kind({0: 0.2})},
        {0: "a", 1: "b", 2: "c"},
        {},
        {},
        1.0,
        True,
    )
    one = StragglerId(rank=1, node="b")
    assert report.identify_stragglers() == {
        "straggler_gpus_relative": {one},
        "straggler_gpus_individual": {StragglerId(0, "a")},
        "straggler_sections_relative": {"s": {one}},
        "straggler_sections_individual": {"s": {StragglerId(0, "a")}},
    }
    assert repr(one) == "StragglerId(rank=1, node='b')"
    assert report.identify_stragglers(gpu_rel_threshold=0.5)["straggler_gpus_relative"] == set()


@pytest.mark.parametrize(
    ("scores", "named"),
    [
        ([1.0, 0.91], {1}),
        ([1.0, 0.99, 0.985, 0.895, 0.99], {3}),
        ([0.96, 0.95, 0.97, 0.95 / 1.1, 0.96, NAN, 1.0], {3}),
        ([1.0, 0.98, 0.96, 0.94, 0.92, 0.90], set()),
        ([1.0], set()),
        ([NAN, NAN], set()),
        ([], set()),
    ],
)
def test_the_suggested_threshold_names_ranks_ten_percent_slower(scores, named):
    """It follows the median rank and how much ranks differ; without scores it is the job's own."""
    report = report_of(dict(enumerate(scores)))
    limit = report.suggest_threshold()
    found = report.identify_stragglers(gpu_rel_threshold=limit)["straggler_gpus_relative"]
    assert {item.rank for item in found} == named
    if not any(math.isfinite(score) for score in scores):
        assert limit == report.thresholds["gpu_rel_threshold"]
    with pytest.raises(ValueError, match="slowdown"):
        report.suggest_threshold(0.0)


def test_summary_names_the_extremes():
    """The summary has least, median, greatest, worst and best ranks, and counts missing ones."""
    report = report_of({0: 0.9, 1: 0.5, 2: 1.0, 3: NAN})
    found = report.summary(k=1)["gpu_relative"]
    assert (found["min"], found["median"], found["max"]) == (0.5, 0.9, 1.0)
    assert found["worst"] == [(1, "node1", 0.5)]
    assert found["best"] == [(2, "node2", 1.0)]
    assert found["without_score"] == 1
    assert json.loads(report.to_json())["gpu_relative_perf_scores"]["3"] is None


def test_windows_in_a_row_are_counted():
    """A rank below the threshold in consecutive windows is counted until it recovers."""
    generator = ReportGenerator("all")
    seen = []
    for _ in range(3):
        report = generator.generate_report({}, {"k": summary(1.0)})
        seen.append(report.consecutive_windows_below[0])
    assert seen == [0, 0, 0]
    generator._count_windows(np.array([0.5]), report.thresholds, 0)
    assert generator._count_windows(np.array([0.5]), report.thresholds, 0)[0] == 2
    assert generator._count_windows(np.array([0.9]), report.thresholds, 0)[0] == 0


def test_explanation_names_kernels_sections_and_communication():
    """Explanations say which kernels and sections cost time, the table and picture show them."""
    generator = ReportGenerator("individual_perf_scores")
    generator.generate_report({"fw": summary(1.0)}, {"gemm": summary(1.0), "nccl": summary(1.0)})
    report = generator.generate_report(
        {"fw": summary(2.0)}, {"gemm": summary(4.0), "ncclDevK": summary(2.0)}
    )
    (found,) = report.explain()
    assert (found.rank, found.gpu_score, found.reason) == (0, 0.25, "")
    assert [kernel.name for kernel in found.kernels] == ["gemm"]
    assert found.kernels[0].share == 1.0
    assert found.sections == (("fw", 0.5),)
    assert (found.compute_us, found.communication_us) == (40.0, 20.0)
    text = report.table()
    assert "straggler" in text
    assert "kernel gemm: 4.00 times the reference, 100% of its compute time" in text
    assert "section fw: slowest is rank 0 on <notset>, score 0.500  straggler" in text
    assert str(report.explain()) == str(found)
    assert str(found).startswith("rank 0 on <notset>: GPU score 0.25\n  compute 0.0 ms")
    assert str(report_of({0: 1.0}).explain()) == "no rank is below a threshold"
    with pytest.raises(KeyError):
        report.explain(rank=9)


def test_the_kernels_that_cost_most_come_first():
    """Of many slow kernels the three that lose the most time are named, the costliest first."""
    generator = ReportGenerator("individual_perf_scores")
    kernels = {f"k{i}": summary(1.0) for i in range(6)}
    generator.generate_report({}, kernels)
    slow = {f"k{i}": summary(1.0 + cost) for i, cost in enumerate((0.1, 5, 0, 3, 4, 2))}
    (found,) = generator.generate_report({}, slow).explain()
    assert [kernel.name for kernel in found.kernels] == ["k1", "k4", "k3"]


@pytest.mark.parametrize("call", [Report.table, Report.summary, lambda r, k: r.explain(k=k)])
def test_counts_of_what_to_show_are_checked(call):
    """A negative number of ranks is an error that names it; none and too many are fine."""
    report = report_of({0: 1.0, 1: 0.5})
    for count in (-1, -9):
        with pytest.raises(ValueError, match=f"k={count}"):
            call(report, k=count)
    assert call(report, k=0)
    assert call(report, k=99)


@pytest.mark.parametrize("name", Report({}, {}, {}, {}, {}, {}, {}, 0.0, True).thresholds)
def test_thresholds_are_numbers(name):
    """A threshold of NaN is an error that names it; any other number is compared."""
    with pytest.raises(ValueError, match=f"{name}=nan"):
        report_of({0: 1.0}).identify_stragglers(**{name: NAN})
    for threshold, named in ((-math.inf, 0), (-3, 0), (0, 0), (1, 0), (5, 1), (math.inf, 1)):
        report = report_of({0: 1.0, 1: NAN})
        found = report.identify_stragglers(**{"gpu_rel_threshold": 0, name: threshold})
        expected = named if name == "gpu_rel_threshold" else 0
        assert len(found["straggler_gpus_relative"]) == expected


def test_the_table_says_what_was_measured():
    """The table counts one rank as one, and names the slowest rank of each section."""
    report = report_of({0: 1.0, 1: 0.9})
    assert report.table().startswith("2 ranks, ")
    report = Report(
        {}, {"fw": {0: 1.0, 1: 0.4}, "x": {0: NAN}}, {}, {}, {0: "a"}, {}, {}, 1.0, True
    )
    lines = report.table().splitlines()
    assert lines[0].startswith("1 rank, ")
    assert "section fw: slowest is rank 1 on ?, score 0.400  straggler" in lines
    assert not [line for line in lines if line.startswith("section x")]


def test_picture_is_written(tmp_path):
    """The picture is an image file."""
    pytest.importorskip("matplotlib")
    generator = ReportGenerator("all")
    generator.generate_report({"fw": summary(1.0)}, {"gemm": summary(1.0)})
    report = generator.generate_report({"fw": summary(2.0)}, {"gemm": summary(4.0)})
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    report.plot(tmp_path / "without")
    assert (tmp_path / "without").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_picture_names_the_slow_ranks(tmp_path):
    """The picture names ranks below the threshold with their nodes, and its sections, no others."""
    pytest.importorskip("matplotlib")
    scores = {0: 1.0, 1: 0.5, 2: 0.9, 3: NAN}
    nodes = {rank: f"node{rank}" for rank in scores}
    Report(scores, {"fw": scores}, {}, {}, nodes, {}, {}, 1.0, True).plot(tmp_path / "r.svg")
    drawn = (tmp_path / "r.svg").read_text()  # texts are in it as comments
    assert "<!-- rank 1 on node1 -->" in drawn
    assert "<!-- threshold 0.75 -->" in drawn
    assert "<!-- fw -->" in drawn
    assert drawn.count(" on node") == 1


def test_a_picture_needs_its_extra(tmp_path, monkeypatch):
    """Without matplotlib the error names what to install, and no file is made."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"'nvrx-straggler\[plot\]'"):
        report_of({0: 1.0}).plot(tmp_path / "r.png")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    """A directory, an unknown format and a full disk are errors, and no file is left or changed."""
    pytest.importorskip("matplotlib")
    report = report_of({0: 1.0, 1: 0.5})
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError):
        report.plot(folder)
    with pytest.raises(ValueError, match="nonsense"):
        report.plot(tmp_path / "report.nonsense")
    old = tmp_path / "old.svg"
    old.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r"too large|File"):
            report.plot(old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert old.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "old.svg"]
