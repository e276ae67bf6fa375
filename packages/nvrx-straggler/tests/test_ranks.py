# SPDX-License-Identifier: Apache-2.0
"""Reports of several ranks over gloo."""

import itertools
import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import straggler_ranks as ranks
import torch
import torch.distributed as dist

from nvidia_resiliency_ext.attribution.straggler import dist_utils
from nvidia_resiliency_ext.attribution.straggler.name_mapper import (
    NameMapper,
    decode_names,
    encode_names,
)

# The first test starts the server that all ranks are forked from, which imports torch.
pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


@pytest.mark.parametrize("gather", [True, False])
def test_scores_of_three_ranks(tmp_path, gather):
    """Rank r with medians (r+1) times as long scores 1/(r+1); others' sections are NaN."""
    found = ranks.run(ranks.slower_by_rank, 3, tmp_path, gather)
    assert found[0][2] == found[1][2] == found[2][2]
    assert sorted(found[0][2].values()) == [0, 1, 2, 3]
    if not gather:
        for rank, (report, again, _) in enumerate(found):
            assert report.gpu_relative_perf_scores == {rank: pytest.approx(1 / (rank + 1))}
            assert sorted(report.section_relative_perf_scores) == [f"section{rank}", "step"]
            assert report.rank_to_node == {rank: f"node{rank}"}
            assert again["rank"] == rank
        return
    report, again, _ = found[0]
    assert [report_ for report_, _, _ in found[1:]] == [None, None]
    scores = report.gpu_relative_perf_scores
    assert scores == {0: 1.0, 1: pytest.approx(0.5), 2: pytest.approx(1 / 3)}
    assert len(scores) == 3
    assert next(iter(scores.items())) == (0, 1.0)
    assert report.gpu_individual_perf_scores == {0: 1.0, 1: 1.0, 2: 1.0}
    assert report.rank_to_node == {0: "node0", 1: "node1", 2: "node2"}
    sections = report.section_relative_perf_scores
    assert sorted(sections) == ["section0", "section1", "section2", "step"]
    assert sections["step"] == {0: 1.0, 1: pytest.approx(0.5), 2: pytest.approx(1 / 3)}
    assert all(math.isnan(score) for score in sections["section1"].values())
    assert "ncclDevKernel_AllReduce" not in report.local_kernel_summaries
    assert again["gpu_relative_perf_scores"][2] == pytest.approx(1 / 3)
    slow = report.identify_stragglers()
    assert {item.rank for item in slow["straggler_gpus_relative"]} == {1, 2}
    assert {item.rank for item in slow["straggler_sections_relative"]["step"]} == {1, 2}
    first, second = report.explain()
    assert (first.rank, second.rank) == (2, 1)
    assert first.kernels[0].name == "gemm"
    assert first.communication_ratio < 1 < first.compute_ratio


def test_nothing_is_pickled_between_ranks(tmp_path):
    """A report with new names works where pickle refuses everything."""
    found = ranks.run(ranks.without_pickle, 2, tmp_path)
    assert found == [{0: 1.0, 1: 0.5}, None]


@pytest.mark.parametrize("measured", [[0, 1], [0]])
def test_no_common_kernel_gives_nan_with_a_reason(tmp_path, measured):
    """Without a kernel that all ranks have, every rank's score is NaN, and the report says why."""
    for score, reasons in ranks.run(ranks.nothing_in_common, 2, tmp_path, measured):
        assert math.isnan(score)
        assert "measured on all ranks" in reasons["gpu"]


def test_steady_report_is_two_collectives(tmp_path):
    """A report with nothing new takes two collectives, one with a new name at most six.

    The first of ranks that run the same kernels takes three: the names of nodes are added.
    """
    for counts in ranks.run(ranks.collectives_of_reports, 2, tmp_path):
        assert counts[:3] == [3, 2, 2]
        assert counts[3] <= 6


def test_names_travel_once(tmp_path):
    """Of ranks with the same new names one sends them, and a new name goes without the others."""
    found = ranks.run(ranks.bytes_of_names, 3, tmp_path)
    (_, shared), _, (_, own) = found
    for (first, second), _ in found:
        assert first == shared + own
        assert second < 40


def test_individual_scores_alone_take_no_collective(tmp_path):
    """Without relative scores and gathering, ranks do not communicate, and number no names."""
    assert ranks.run(ranks.individual_alone, 2, tmp_path) == [(0, 0)] * 2


def test_collectives_of_the_ranks(tmp_path):
    """The helpers around torch.distributed give what they say, on each rank."""
    first, second = ranks.run(ranks.every_collective, 2, tmp_path)
    assert first == (2, "cpu", ["rank 0", "rank 1"], [3.0], [[1.0], [2.0]], (True, False))
    assert second == (2, "cpu", ["rank 0", "rank 1"], [3.0], None, (True, False))


def test_detector_starts_before_the_process_group(tmp_path):
    """`initialize` may come before `init_process_group`, and reports have a group of their own."""
    found = ranks.run(ranks.initialized_before_the_group, 2, tmp_path)
    assert found == [({0: "node0", 1: "node1"}, True), (None, True)]


def test_restarted_rank_gets_the_tables_back(tmp_path):
    """A rank without tables gets the numbers of the others, and scores are right at once."""
    (before, after, scores, nodes), (_, fresh, _, _) = ranks.run(ranks.restarted_rank, 2, tmp_path)
    assert {name: after[name] for name in before} == before
    assert fresh == after
    assert scores == {0: 1.0, 1: pytest.approx(0.5)}
    assert nodes == {0: "node0", 1: "moved"}


@pytest.mark.parametrize("part", ["summaries", "scores"])
def test_rank_with_broken_data_does_not_hold_up_the_others(tmp_path, part):
    """A rank that cannot build its window or scores has none, the others are compared without."""
    found = ranks.run(ranks.broken_data, 3, tmp_path, part)
    scores, explanation = found[0]
    assert (scores[0], scores[2]) == (1.0, 0.5)
    assert math.isnan(scores[1])
    assert "kernel timing is failed" in explanation


@pytest.mark.parametrize(
    ("options", "medians", "expected"),
    [
        ({}, [0.1, 1.0, 1.0, 2.0], [1.0, 0.1, 0.1, 0.05]),
        ({"reference": "median"}, [0.1, 1.0, 1.0, 2.0], [10.0, 1.0, 1.0, 0.5]),
        ({"reference": 1.0}, [0.1, 1.0, 1.0, 2.0], [20.0, 2.0, 2.0, 1.0]),
        ({}, [1.0, 1.0, None, 2.0], [None, None, None, None]),
        ({"reference_scope": "present"}, [1.0, 1.0, None, 2.0], [1.0, 1.0, None, 0.5]),
        ({"peer_groups": [[0, 1], [2, 3]]}, [1.0, 2.0, 8.0, 16.0], [1.0, 0.5, 1.0, 0.5]),
        ({"peer_groups": [[2, 3]]}, [1.0, 2.0, 8.0, None], [1.0, 0.5, None, None]),
        ({"peer_groups": np.array([[0, 1], [2, 3]])}, [1.0, 2.0, 8.0, 16.0], [1.0, 0.5, 1.0, 0.5]),
    ],
)
def test_reference_options(tmp_path, options, medians, expected):
    """Median, quantile, present ranks and peer groups choose what a rank is compared with."""
    found = ranks.run(ranks.with_options, 4, tmp_path, options, medians)
    for score, wanted in zip(found, expected, strict=True):
        assert math.isnan(score) if wanted is None else score == pytest.approx(wanted)


def test_more_names_than_one_collective_carries(tmp_path):
    """Five thousand kernels with names beyond ASCII are compared."""
    found = ranks.run(ranks.many_names, 2, tmp_path, 5000)
    assert found[0] == {0: 1.0, 1: 0.5}


@pytest.mark.parametrize("own", [0, 1])
def test_full_tables_begin_anew(tmp_path, own):
    """Names that change without end fill no memory, and scores stay right when tables begin anew.

    With names that one rank has alone, and without.
    """
    for scores, counts in ranks.run(ranks.names_without_end, 2, tmp_path, own):
        assert max(counts) <= 20 + 15 + own
        assert any(later < before for before, later in itertools.pairwise(counts))
        assert scores in ([{0: 1.0, 1: 0.5}] * 6, [None] * 6)


def test_malformed_names_are_refused_by_all(tmp_path):
    """A broken message of names is the same clear error on all ranks, not a hang."""
    assert ranks.run(ranks.malformed_names, 2, tmp_path) == ["MalformedNamesError"] * 2


def test_detector_reports_when_due_on_all_ranks(tmp_path):
    """All ranks agree when a report is due, and the slow rank is named on rank 0."""
    (due, named), (other_due, other_named) = ranks.run(ranks.detector_in_steps, 2, tmp_path, 24)
    assert due == other_due
    # The interval is known in the 17th call and is the profiling interval.
    assert [number for number, flag in enumerate(due, 1) if flag] == [18, 20, 22, 24]
    assert other_named == []
    assert [[item.rank for item in found["step"]] for found in named] == [[1]] * 4


def test_late_rank_costs_a_report_and_not_the_job(tmp_path):
    """A rank that misses a report is waited for in vain once; later reports are whole again."""
    zero, one = ranks.run(ranks.missing_peer, 2, tmp_path)
    assert zero == [True, False, True, True]
    assert one == [False] * 4


@pytest.mark.parametrize(
    ("late_step", "due", "intervals"),
    # At first 20 steps of 0.5 s are 10 s; from step 18 on it is 5 steps of 2 s.
    [(17, [*range(35, 81, 5)], [5]), (20, [20, *range(40, 81, 5)], [5, 20])],
)
def test_ranks_agree_when_reports_are_due(tmp_path, late_step, due, intervals):
    """A rank that misses the first estimate or a report has the same reports due as the others."""
    found = ranks.run(ranks.late_at, 2, tmp_path, late_step, 80, True)
    assert found == [(due, intervals, [])] * 2


@pytest.mark.parametrize(("late_step", "due"), [(17, []), (20, [20, 40, 60, 80])])
def test_rank_that_stays_away_stops_no_training(tmp_path, late_step, due):
    """Without the other rank, a rank runs to its end; the other then has the same reports due."""
    found = ranks.run(ranks.late_at, 2, tmp_path, late_step, 80, False)
    assert found[0] == found[1]
    assert found[0][::2] == (due, [])


@pytest.mark.parametrize(
    ("absent", "calls", "kind"),
    [([1], 2, "asked"), ([0], 2, "asked"), ([1, 2], 1, "asked"), ([1], 60, "scheduled")],
)
def test_ranks_that_never_report_are_named(tmp_path, absent, calls, kind):
    """Ranks that never report cost the others `exchange_timeout` once, and are named."""
    found = ranks.run(ranks.never_there, 3, tmp_path, absent, calls, kind)
    named = "rank 1 has" if absent == [1] else "rank 0 has" if absent == [0] else "ranks 1-2 have"
    for rank, (first, *others) in enumerate(lines or [None] for lines in found):
        if rank in absent:
            assert first is None
            continue
        assert f"{named} not joined the report within 5 s" in first
        assert ("interval is agreed on 16 iterations later" in first) == (kind == "scheduled")
        assert all("an earlier one still waits for other ranks" in line for line in others)


@pytest.mark.parametrize(
    "options",
    [
        [{}, {"gather_on_rank0": False}, {}],
        [{}, {}, {"scores_to_compute": "relative_perf_scores"}],
        [{"reference": "median"}, {}, {}],
        [{"report_time_interval": 5}, {}, {}],
        [{}, {"peer_groups": [[0, 1]]}, {}],
    ],
)
def test_different_options_are_said_on_all_ranks(tmp_path, options):
    """Options that ranks must have in common and have not are one line on each rank, and the end
    of reports.
    """
    name = next(name for item in options for name in item)
    for lines in ranks.run(ranks.different_options, 3, tmp_path, options):
        (line,) = lines
        assert f"different options, {name}: rank " in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("options", b"\xff"),
        ("options", b"[]"),
        ("options", b"[" * 100_000),
        ("options", b"{}"),
        ("options", b'{"reference": "\\u001b[2J\\n", "rank": ["\\u001b[2J\\n"]}'),
        ("difference", b"\xff\x1b[2J\n"),
    ],
)
def test_options_that_no_rank_has_written_are_one_line(tmp_path, key, value):
    """Whatever another client writes into the store, each rank ends reports with a plain line."""
    for lines in ranks.run(ranks.written_by_others, 2, tmp_path, key, value):
        (line,) = lines
        assert "straggler reports end here" in line
        assert line.isprintable()


def test_report_in_a_forked_child_is_refused(tmp_path):
    """A report in a forked child names the process whose detector it is; that one goes on."""
    ((said, _, has_report),) = ranks.run(ranks.in_a_forked_child, 1, tmp_path)
    assert (said, has_report) == ("", True)  # alone, there is nobody to confuse
    (said, parent, has_report), (_, _, has_other) = ranks.run(ranks.in_a_forked_child, 2, tmp_path)
    assert f"forked from process {parent}, to which the detector belongs" in said
    assert (has_report, has_other) == (True, False)


def test_detectors_find_together_in_new_process_groups(tmp_path):
    """Reports are whole in each world, with each detector, also after one that a rank missed."""
    found = ranks.run(ranks.new_process_groups, 2, tmp_path)
    assert found == [[False] + [True] * 5, [False] * 5]


def test_ranks_that_change_places_are_known(tmp_path):
    """A detector that goes on in a world with other numbers of its ranks names nodes rightly."""
    found = ranks.run(ranks.swapped_ranks, 3, tmp_path)
    nodes = [{0: "node0", 1: f"node{first}", 2: f"node{3 - first}"} for first in (1, 2)]
    assert found == [nodes, [None, None], [None, None]]


def test_detectors_of_a_group_do_not_count_for_others(tmp_path):
    """Ranks that have reported in a group of some ranks find together with all ranks."""
    found = ranks.run(ranks.group_then_all, 3, tmp_path)
    assert found == [[True, True], [False, False], [False]]


def test_groups_that_torch_names_alike_do_not_meet(tmp_path):
    """Each pair reports by itself: ranks are told apart by who is in a group, not by its name."""
    found = ranks.run(ranks.groups_of_one_name, 4, tmp_path)
    assert found == [True, False, True, False]


def test_a_group_on_gpus_is_met_like_any_other(tmp_path):
    """Ranks of a group that takes no CPU tensors meet, compare options and wait in bounded time."""
    zero, one = ranks.run(ranks.group_on_gpus, 2, tmp_path)
    assert (zero[:2], one[:2]) == (({0: 1.0, 1: 0.5}, True), (None, True))
    assert "rank 1 has not joined the report within 2 s" in zero[2]
    for line in (zero[3], one[3]):
        assert "different options, reference: rank " in line


def test_a_command_reaches_the_detector_that_it_names(tmp_path):
    """Of two detectors in one job a command reaches the one whose group begins with its rank."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("of the job")
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = ranks.run(ranks.steered_groups, 4, tmp_path, served.port, str(token))
    assert found == [([0, 0, 2], 3), ([], 3), ([], 5), ([], 5)]


def test_a_detector_leaves_no_descriptor(tmp_path):
    """The process group that detectors make for themselves ends with `shutdown`."""
    assert ranks.run(ranks.descriptors_of_a_detector, 2, tmp_path) == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("gloo", "cpu"),
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:gloo,cpu:gloo", "cpu"),
        ("cuda:gloo", "cuda"),
        ("straggler_gpu", "cuda"),
        ("cuda:straggler_gpu", "cuda"),
        ("cpu:gloo,cuda:straggler_gpu", "cpu"),
        (None, "cpu"),
    ],
)
def test_a_group_is_asked_which_tensors_it_takes(backend, device):
    """Collectives take CPU tensors wherever the group does, however its backend is written."""
    if not hasattr(dist.Backend, "STRAGGLER_GPU"):

        def make(store, rank, size, timeout):
            return dist.ProcessGroupGloo(store, rank, size, timeout)

        dist.Backend.register_backend("straggler_gpu", make, devices=["cuda"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0], backend=backend)
        assert dist_utils.get_device_for_backend(group) == torch.device(device)
        assert dist_utils.get_device_for_backend() == torch.device("cpu")
    finally:
        dist.destroy_process_group()


def test_the_walk_through_names_its_slow_rank(tmp_path):
    """The example with two nodes says which rank of which node is slow."""
    example = Path(__file__).resolve().parents[1] / "examples" / "two_nodes.py"
    result = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "section Trainer.forward: slowest is rank 3 on node-b, score 0.5" in result.stdout
    assert "straggler" in result.stdout


def test_long_names_are_shortened_and_not_a_hang(tmp_path):
    """A name that is too long to travel is numbered under a shorter one on all ranks."""
    (scores, count, digest), (_, other_count, other_digest) = ranks.run(
        ranks.long_name, 2, tmp_path
    )
    assert scores == {0: 1.0, 1: 0.5}
    assert (count, digest) == (other_count, other_digest)
    assert count == 5


def test_rank_0_of_a_group_changes_its_settings(tmp_path):
    """In a group of some ranks its own rank 0 requests settings, the others are refused."""
    none, first, second = ranks.run(ranks.subgroup_settings, 3, tmp_path)
    assert (none, first) == (None, ("accepted", 4))
    assert "rank 1" in second[0]
    assert second[1] == 4


def test_settings_change_on_all_ranks_at_one_report(tmp_path):
    """New settings are in force on every rank after the same report."""
    (seen, paused), (other_seen, other_paused) = ranks.run(ranks.changed_settings, 2, tmp_path, "0")
    assert seen == other_seen == [(0, 1), (1, 4), (1, 4), (1, 4)]
    assert (paused, other_paused) == (False, True)


def test_detector_starts_again_with_other_ranks(tmp_path):
    """After a restart with fewer ranks the report has the new ranks and no old section."""
    found = ranks.run(ranks.restart_with_fewer_ranks, 3, tmp_path)
    assert found == [None, ({0: "node1", 1: "node2"}, ["t"]), None]


@pytest.mark.parametrize(
    "data",
    [
        b"\x01",
        b"\x01\0\0\0\0\0\0\0",
        b"\x01\0\0\0\0\0\0\0\xff\xff\xff\x7f",
        b"\x01\0\0\0\0\0\0\0\x01\0\0\0\xff",
        b"\xff\xff\xff\xff\xff\xff\xff\xff",
        encode_names(["a"], []) + b"x",
    ],
)
def test_broken_messages_are_refused(data):
    """Messages that are cut, too long or no UTF-8 raise one kind of error."""
    with pytest.raises(ValueError, match=r"message|bytes"):
        decode_names(data)


def test_names_survive_the_message():
    """What is encoded is decoded, for any text; a single process numbers in the order given."""
    names = (["a", "", "é\udce9", "k" * 300], ["s"])
    assert decode_names(encode_names(*names)) == names
    mapper = NameMapper()
    mapper.gather_and_assign_ids(["b", "a", "b"], ["s"])
    mapper.gather_and_assign_ids(["c", "a"], [])
    assert mapper.kernel_name_to_id == {"b": 0, "a": 1, "c": 2}
    assert mapper.id_to_section_name == {0: "s"}
    for get, absent in (
        (mapper.get_kernel_id, "absent"),
        (mapper.get_section_id, "a"),
        (mapper.get_kernel_name, 3),
        (mapper.get_section_name, 1),
    ):
        with pytest.raises(KeyError):
            get(absent)
    kept = pickle.loads(pickle.dumps(mapper))
    assert (kept.get_kernel_id("c"), kept.get_section_name(0)) == (2, "s")


def test_collectives_of_one_process_change_nothing():
    """Without torch.distributed there is one rank, and every helper is the identity."""
    tensor = torch.tensor([5.0])
    assert (dist_utils.get_world_size(), dist_utils.get_rank()) == (1, 0)
    assert dist_utils.get_device_for_backend() == torch.device("cpu")
    assert dist_utils.all_reduce(tensor) is None
    assert dist_utils.gather_on_rank0(tensor)[0] is tensor
    assert dist_utils.all_gather_object("x") == ["x"]
    assert (dist_utils.is_all_true(True), dist_utils.is_all_true(False)) == (True, False)
    assert tensor.tolist() == [5.0]
