# SPDX-License-Identifier: Apache-2.0
"""Scenarios: a service reads the cycle logs; its STOP ends the job, its failures do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attribution_service import NOBODY, STOP, AttributionService, attribution_service

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fault_jobs import Job

# Fails once the service knows its log. The second cycle goes on: only the verdict ends it.
IMPORTS_NOTHING = """
import os, time, urllib.request
def is_known():
    try:
        with urllib.request.urlopen("http://127.0.0.1:50050/jobs", timeout=5) as reply:
            return b"job_cycle0.log" in reply.read()
    except OSError:
        return False
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while not is_known():
        time.sleep(0.1)
    import module_that_is_not_there
time.sleep(600)
"""


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
    """Asking for the managed service without its packages is said once, and the job runs."""
    hidden = job.folder / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['fastapi'] = None\n")
    environment = {"PYTHONPATH": str(hidden), "PATH": "/usr/bin:/bin"}
    flags = flags_of(job, "localhost", "log")
    job.start("--last-cycle", "0", flags=flags, environment=environment)
    assert job.wait() == 0, job.log()
    assert job.log().count("attribution is off") == 1


def test_the_managed_service_stops_a_job_that_cannot_run(job: Job) -> None:
    """The real service reads the log of a rank without its module: 93, not twenty restarts."""
    program = job.folder / "rank.py"
    program.write_text(IMPORTS_NOTHING)
    flags = flags_of(job, "localhost", "no-restart")
    job.start(program=program, nproc=1, max_restarts=20, flags=flags)
    assert job.wait(50.0) == 93, job.log()
    assert "user.import_error" in job.log()
