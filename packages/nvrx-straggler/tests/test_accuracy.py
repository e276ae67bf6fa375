# SPDX-License-Identifier: Apache-2.0
"""Whom the scores name on generated data with known slow ranks."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
from campaign import Job, campaign


@pytest.mark.parametrize("scope", ["all", "present"])
@pytest.mark.parametrize("threshold", [0.93, None])
@pytest.mark.parametrize("slowdown", [0.10, 0.50])
def test_slow_ranks_are_named(slowdown, threshold, scope):
    """At 10 % slowdown and more, precision and recall are at least 0.99 with one silent rank."""
    job = Job(largest=256, threshold=threshold, scope=scope)
    found = campaign(seed=7, trials=25, slowdown=slowdown, job=job)
    assert found["precision"] >= 0.99
    assert found["recall"] >= 0.99


@pytest.mark.parametrize("ranks", [16, 64])
def test_small_jobs_of_gpus_that_differ_have_a_threshold(ranks):
    """Where GPUs differ by a percent, the suggestion names ranks 10 % slower in small jobs, too."""
    job = Job(largest=ranks, least=ranks, spread=0.01)
    found = campaign(seed=11, trials=60, slowdown=0.10, job=job)
    assert found["precision"] >= 0.99
    assert found["recall"] >= 0.99


@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_healthy_jobs_name_nobody(spread):
    """A healthy job has no straggler, in any trial, also where GPUs differ by a percent."""
    found = campaign(seed=8, trials=60, slowdown=0.0, job=Job(largest=256, spread=spread))
    assert found["false_names"] == 0


def test_the_default_threshold_names_what_takes_a_third_longer():
    """At 0.75 a rank that is 20 % slower is not named, one that is 50 % slower is."""
    job = Job(largest=64, threshold=0.75)
    assert campaign(seed=9, trials=10, slowdown=0.20, job=job)["recall"] == 0
    assert campaign(seed=9, trials=10, slowdown=0.50, job=job)["recall"] == 1
