# SPDX-License-Identifier: Apache-2.0
"""Scenarios: a service reads the cycle logs; its STOP ends the job, its failures do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attribution_service import NOBODY, STOP, AttributionService, attribution_service

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fault_jobs import Job


@pytest.fixture
def service() -> Iterator[AttributionService]:
    """Give a service that says STOP."""
    with attribution_service() as made:
        made.decides(STOP)
        yield made


def flags_of(job: Job, url: str, action: str) -> tuple[str, ...]:
    """Return the flags of a job whose cycle logs are read."""
    return (
        *("--ft-per-cycle-applog-prefix", str(job.folder / "logs" / "job.log")),
        *("--ft-attribution-endpoint", url, "--ft-attribution-stop-action", action),
    )


def test_stop_ends_the_job_with_93(job: Job, service: AttributionService) -> None:
    """After a fault the service says STOP: the cycle that has begun is ended, exit code 93."""
    job.start("--last-cycle", "9", "0:1:die", flags=flags_of(job, service.url, "no-restart"))
    assert job.wait() == 93, job.log()
    assert "the data set is empty" in job.log()
    asked = [intent for intent, path in service.posts if path.endswith("/job_cycle0.log")]
    # The rank may die before anybody is told that its log has begun.
    assert asked in (["progressive", "terminal"], ["terminal"])


def test_stop_is_only_logged_where_nothing_else_was_asked_for(
    job: Job, service: AttributionService
) -> None:
    """With the action `log` the job goes on after the verdict."""
    job.start("--last-cycle", "1", "0:1:die", flags=flags_of(job, service.url, "log"))
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1]


@pytest.mark.parametrize("mode", ["hangs", "garbage", "refuses"])
def test_a_service_that_misbehaves_neither_ends_nor_delays_a_job(
    job: Job, service: AttributionService, mode: str
) -> None:
    """Hanging, garbage or nobody there: restarts go on, and the job ends as it would."""
    service.mode = mode
    url = NOBODY if mode == "refuses" else service.url
    job.start("--last-cycle", "2", "*:1:die", flags=flags_of(job, url, "no-restart"))
    job.wait(20.0)
    assert job.cycles() == [0, 1, 2, 3], job.log()


def test_a_service_that_is_not_installed_is_one_message(job: Job) -> None:
    """Asking for the managed service without its package is said once, and the job runs."""
    job.start("--last-cycle", "0", flags=flags_of(job, "localhost", "log"))
    assert job.wait() == 0, job.log()
    assert job.log().count("attribution is off") == 1
