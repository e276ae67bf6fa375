# SPDX-License-Identifier: Apache-2.0
"""Cycle information and attribution where torch's agent runs the workers."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attribution_service import LIMIT_S, STOP, AttributionService, attribution_service

from nvidia_resiliency_ext.fault_tolerance._hosting.services import (
    CoordinatorServices,
    ServicesPlan,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Arrival
from nvidia_resiliency_ext.fault_tolerance._report import cycle_files
from nvidia_resiliency_ext.fault_tolerance._torch.settings import services_of
from nvidia_resiliency_ext.shared_utils.clock import SystemClock


def node(index: int) -> Arrival:
    """Return a node."""
    return Arrival(f"h{index}_1_0", f"host{index}", f"a{index}", infra_rank=index)


ACTIVE, WAITING = (node(0), node(1)), (node(2),)


@contextlib.contextmanager
def services(**conf: Any) -> Iterator[tuple[CoordinatorServices, list[str]]]:
    """Run what a rendezvous configuration asks for, as the handler does; also give its STOPs."""
    stops: list[str] = []
    where = {"address": "", "host": "n", "run_dir": ""}
    plan, clock = services_of(conf), SystemClock()
    made = CoordinatorServices(plan, {}, None, clock, **where, is_shared=True)
    made.follow_attribution(stops.append, lambda *_: None)
    try:
        yield made, stops
    finally:
        made.close()


@pytest.fixture
def service() -> Iterator[AttributionService]:
    """Give a service that says STOP."""
    with attribution_service() as made:
        made.decides(STOP)
        yield made


def test_files_about_cycles_are_written_and_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each closed round has a file with its nodes; the end of it is written, too."""
    monkeypatch.setattr(cycle_files, "SHUTDOWN_S", LIMIT_S)  # a busy disk takes longer
    with services(cycle_info_dir=str(tmp_path)) as (made, _):
        made.begins(0, ACTIVE, WAITING)
        # The store host may be a spare that sees rounds close only.
        made.begins(1, ACTIVE, WAITING)
        made.end_cycle_info()
        made.end_cycle_info()
        first, second = (json.loads((tmp_path / f"cycle_info..0.{i}").read_text()) for i in (0, 1))
    assert (first["active_nodes"], first["standby_nodes"]) == ("a[0-1]", "a2")
    assert first["cycle_end_time"]
    assert second["active_ranks"] == "0-1"


@pytest.mark.parametrize("enforces", [True, False])
def test_stop_is_known_where_it_is_to_be_obeyed(
    service: AttributionService, enforces: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The logs of cycles go to the service; its STOP is reported where that was asked for."""
    with services(
        attribution_endpoint=service.url,
        attribution_enforce_stop=enforces,
        cycle_log_prefix="/l/job.log",
    ) as (made, stops):
        made.begins(4, ACTIVE, WAITING)
        made.ended(4)
        made.ended(4)
        deadline = time.monotonic() + LIMIT_S
        while "STOP" not in caplog.text or (enforces and not stops):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert bool(stops) is enforces
    assert service.posts[-1] == ("terminal", "/l/job_cycle4.log")


def test_nothing_asked_for_is_nothing() -> None:
    """Without parameters there is nobody to tell, and no STOP."""
    assert services_of({}) == ServicesPlan()
    with services() as (made, stops):
        made.begins(0, ACTIVE, WAITING)
    assert not stops


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
        services_of(conf)
