# SPDX-License-Identifier: Apache-2.0
"""Agreement on measured times between real ranks."""

import json

import pytest
from ft_workers import run_ranks

pytestmark = pytest.mark.slow

MANY = {f"s{number}": 1.0 for number in range(300)}
RISING = {f"s{number:03}": float(number) for number in range(400)}
FALLING = {name: 400 - value for name, value in RISING.items()}


def order(sections, times=(-1, -1, -1)):
    """What one rank is told to bring along."""
    return {"sections": sections, "times": times}


def agreed(directory, *groups):
    """Let the same ranks form one group after the other; return the results of each group.

    A group is a backend and what each of its ranks brings.
    """
    ranks = [[] for _ in range(max(len(orders) for _, orders in groups))]
    for backend, orders in groups:
        about = {"backend": backend, "world_size": len(orders)}
        for rank, told in enumerate(ranks):
            told.append(orders[rank] | about if rank < len(orders) else None)
    said = run_ranks("synchronize_timeouts.py", [json.dumps(told) for told in ranks], directory)
    return [
        [results[number] for results in said[: len(orders)]]
        for number, (_, orders) in enumerate(groups)
    ]


DIFFERENT = [
    order({"a": 1.5, "b": 2.5, "c": -1}, (1, 9, -1)),
    order({"c": -1, "b": 0.5, "a": 7.5}, (4, 2, 6)),
]
LARGEST = {"error": "", "times": [4, 9, 6], "sections": {"a": 7.5, "b": 2.5, "c": -1}}


def test_all_ranks_get_the_largest_times(tmp_path):
    """Ranks agree on every maximum, whatever the order of their sections and the backend string.

    Values beyond the fixed first part of the reduction arrive too. Ranks with other sections get an
    error that names them; nobody hangs or mixes values.
    """
    plain, fake, hundreds, other = agreed(
        tmp_path,
        ("gloo", DIFFERENT),
        ("cpu:gloo,cuda:fake", DIFFERENT),
        ("gloo", [order(RISING), order(FALLING)]),
        (
            "gloo",
            [order({"a": 1.0, "b": 2.0}), order({"a": 1.0, "bee": 2.0}), order({"a": 5.0, **MANY})],
        ),
    )
    assert plain == fake == [LARGEST] * 2
    expected = {name: max(RISING[name], FALLING[name]) for name in RISING}
    assert [result["sections"] for result in hundreds] == [expected] * 2
    for result in other:
        assert "'b', 'bee'" in result["error"]
        assert "ranks 0 have ['a', 'b']" in result["error"]
        assert "ranks 1 have ['a', 'bee']" in result["error"]
    assert other[0]["sections"] == {"a": 1.0, "b": 2.0}


@pytest.mark.gpu
def test_ranks_with_a_device_get_the_largest_times(tmp_path):
    """The same where the backend string names the device's backend, too."""
    assert agreed(tmp_path, ("cpu:gloo,cuda:nccl", DIFFERENT)) == [[LARGEST] * 2]


@pytest.mark.gpu
def test_device_only_backend(tmp_path):
    """Without a CPU side the device's backend is used."""
    [[result]] = agreed(tmp_path, ("nccl", [order({"a": 1.5}, (1, 2, 3))]))
    assert result == {"error": "", "times": [1, 2, 3], "sections": {"a": 1.5}}
