# SPDX-License-Identifier: Apache-2.0
"""Agreement on measured times between real ranks."""

import json

import pytest
from ft_workers import run_ranks

pytestmark = pytest.mark.slow


def order(sections, times=(-1, -1, -1), backend="gloo"):
    """What one rank is told to bring along."""
    return json.dumps({"backend": backend, "sections": sections, "times": times})


@pytest.mark.parametrize(
    "backend",
    ["gloo", "cpu:gloo,cuda:fake", pytest.param("cpu:gloo,cuda:nccl", marks=pytest.mark.gpu)],
)
def test_all_ranks_get_the_largest_times(tmp_path, backend):
    """Ranks agree on every maximum, whatever the order of their sections and the backend string."""
    results = run_ranks(
        "synchronize_timeouts.py",
        [
            order({"a": 1.5, "b": 2.5, "c": -1}, (1, 9, -1), backend),
            order({"c": -1, "b": 0.5, "a": 7.5}, (4, 2, 6), backend),
        ],
        tmp_path,
    )
    for result in results:
        assert result == {
            "error": "",
            "times": [4, 9, 6],
            "sections": {"a": 7.5, "b": 2.5, "c": -1},
        }


def test_differing_sections_are_named(tmp_path):
    """Ranks with other sections get an error that names them; nobody hangs or mixes values."""
    many = {f"s{number}": 1.0 for number in range(300)}
    results = run_ranks(
        "synchronize_timeouts.py",
        [order({"a": 1.0, "b": 2.0}), order({"a": 1.0, "bee": 2.0}), order({"a": 5.0, **many})],
        tmp_path,
    )
    for result in results:
        assert "'b', 'bee'" in result["error"]
        assert "ranks 0 have ['a', 'b']" in result["error"]
        assert "ranks 1 have ['a', 'bee']" in result["error"]
    assert results[0]["sections"] == {"a": 1.0, "b": 2.0}


def test_hundreds_of_sections(tmp_path):
    """Values beyond the fixed first part of the reduction arrive too."""
    results = run_ranks(
        "synchronize_timeouts.py",
        [
            order({f"s{number:03}": float(number) for number in range(400)}),
            order({f"s{number:03}": float(400 - number) for number in range(400)}),
        ],
        tmp_path,
    )
    expected = {f"s{number:03}": float(max(number, 400 - number)) for number in range(400)}
    assert [result["sections"] for result in results] == [expected, expected]


@pytest.mark.gpu
def test_device_only_backend(tmp_path):
    """Without a CPU side the device's backend is used."""
    [result] = run_ranks(
        "synchronize_timeouts.py", [order({"a": 1.5}, (1, 2, 3), "nccl")], tmp_path
    )
    assert result == {"error": "", "times": [1, 2, 3], "sections": {"a": 1.5}}
