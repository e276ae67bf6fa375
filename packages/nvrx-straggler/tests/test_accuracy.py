# SPDX-License-Identifier: Apache-2.0
"""Whom the scores name on generated data with known slow ranks."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
import campaign


@pytest.mark.parametrize("slowdown", [0.10, 0.50])
def test_slow_ranks_are_named(slowdown):
    """At 10 % slowdown and more, precision and recall are at least 0.99 with one silent rank."""
    found = campaign.campaign(seed=7, trials=25, slowdown=slowdown, largest=256, threshold=0.93)
    assert found["precision"] >= 0.99
    assert found["recall"] >= 0.99


def test_healthy_jobs_name_nobody():
    """A healthy job has no straggler, in any trial."""
    found = campaign.campaign(seed=8, trials=60, slowdown=0.0, largest=256, threshold=0.93)
    assert found["false_names"] == 0
