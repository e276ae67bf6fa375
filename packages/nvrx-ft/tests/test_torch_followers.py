# SPDX-License-Identifier: Apache-2.0
"""Cycle information and attribution where torch's agent runs the workers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attribution_service import LIMIT_S, STOP, AttributionService, attribution_service

from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import Candidate, Placement
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Entry, Phase
from nvidia_resiliency_ext.fault_tolerance._torch.followers import (
    CycleFollowers,
    FollowerSettings,
    follower_settings,
)


def node(index: int) -> Candidate:
    """Return a node."""
    return Candidate(node=f"h{index}_1_0", addr=f"host{index}", infra_rank=index)


PLACED = Placement(active=(node(0), node(1)), standby=(node(2),), excluded=())


def closed(round_: int) -> Entry:
    """Return a closed round."""
    return Entry(seq=round_, phase=Phase.CLOSED, round=round_, active=2)


@pytest.fixture
def service() -> Iterator[AttributionService]:
    """Give a service that says STOP."""
    with attribution_service() as made:
        made.decides(STOP)
        yield made


def test_files_about_cycles_are_written_and_finished(tmp_path: Path) -> None:
    """Each closed round has a file with its nodes; the end of it is written, too."""
    followers = CycleFollowers(FollowerSettings(cycle_info_dir=str(tmp_path)), "n")
    followers.closed(closed(0), PLACED, {f"h{i}_1_0": f"a{i}" for i in range(3)})
    # The store host may be a spare that sees rounds close only.
    followers.closed(closed(1), PLACED, {})
    followers.end_cycle_info()
    followers.end_cycle_info()
    first, second = (json.loads((tmp_path / f"cycle_info..0.{i}").read_text()) for i in range(2))
    assert (first["active_nodes"], first["standby_nodes"]) == ("a[0-1]", "a2")
    assert first["cycle_end_time"]
    assert second["active_ranks"] == "0-1"
    followers.close()


@pytest.mark.parametrize("enforces", [True, False])
def test_stop_is_known_where_it_is_to_be_obeyed(
    service: AttributionService, enforces: bool
) -> None:
    """The logs of cycles go to the service; its STOP is asked for, and is a look at memory."""
    conf = {
        "attribution_endpoint": service.url,
        "attribution_enforce_stop": enforces,
        "cycle_log_prefix": "/l/job.log",
    }
    followers = CycleFollowers(follower_settings(conf), "n")
    followers.closed(closed(4), PLACED, {})
    followers.ended()
    followers.ended()
    deadline = time.monotonic() + LIMIT_S
    assert followers._service is not None
    while not followers._service.stop_verdict_observed():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert followers.stop_requested is enforces
    assert service.posts[-1] == ("terminal", "/l/job_cycle4.log")
    followers.close()


def test_nothing_asked_for_is_nothing() -> None:
    """Without parameters there is nobody to tell, and no STOP."""
    assert follower_settings({}) == FollowerSettings()
    followers = CycleFollowers(FollowerSettings(), "n")
    followers.closed(closed(0), PLACED, {})
    assert not followers.stop_requested
    followers.close()


@pytest.mark.parametrize(
    ("conf", "why"),
    [
        ({"attribution_endpoint": "http://h:1"}, "needs cycle_log_prefix"),
        ({"attribution_endpoint": "h", "cycle_log_prefix": "/l/a"}, "'h': is not"),
        ({"attribution_enforce_stop": "perhaps"}, "attribution_enforce_stop"),
    ],
)
def test_parameters_that_cannot_be_are_refused(conf: dict[str, Any], why: str) -> None:
    """As the command line refuses them."""
    with pytest.raises(ValueError, match=why):
        follower_settings(conf)
