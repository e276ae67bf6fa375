# SPDX-License-Identifier: Apache-2.0
"""Scenarios: a service reads the cycle logs; its STOP ends the job, its failures do nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import ports
import pytest
from attribution_service import NOBODY, STOP, AttributionService, attribution_service
from fault_jobs import WATCHED_SECTIONS

from nvidia_resiliency_ext.fault_tolerance.attribution_manager import DEFAULT_ATTRIBUTION_PORT

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


# Computes with a checkpoint at each step, and is killed in each of the first three cycles.
SUMS = """
import os, signal, sys
from pathlib import Path
state, cycle = Path(sys.argv[1]) / "state", int(os.environ["TORCHELASTIC_RESTART_COUNT"])
first, value = map(int, state.read_text().split()) if state.exists() else (0, 1)
for step in range(first, 40):
    if step == 10 * (cycle + 1):
        os.kill(os.getpid(), signal.SIGKILL)
    value = (value * 6364136223846793005 + step) % 2**64
    state.with_suffix(".new").write_text(f"{step + 1} {value}")
    state.with_suffix(".new").rename(state)
"""


@pytest.fixture
def service() -> Iterator[AttributionService]:
    """Give a service that says STOP."""
    with attribution_service() as made:
        made.decides(STOP)
        yield made


FAILING_RANK = Path(__file__).parent / "programs" / "attributed_rank.py"
# What is injected, and what the real service has to say about it.
FAULTS = (
    ("nan", "RESTART", "num.nan"),
    ("allocation", "RESTART", "host.oom"),
    ("segfault", "RESTART", "host.segfault"),
    ("hang", "RESTART", "hang.heartbeat"),
    ("killed", "RESTART", "host.sigkill"),
    ("bad-data", "RESTART", "data.corrupt"),
    ("bad-data", "STOP", "data.corrupt"),
)


@pytest.fixture
def managed() -> Iterator[None]:
    """Let no other test run a managed service meanwhile: its port is fixed."""
    with ports.turn_at(DEFAULT_ATTRIBUTION_PORT):
        yield


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
    job.wait(50.0)  # a request to the service that hangs ends after 60 s
    assert job.cycles() == [0, 1, 2, 3], job.log()


def test_a_service_that_hangs_changes_no_result(job: Job, service: AttributionService) -> None:
    """After three killed ranks the result is that of a run without faults and without a service."""
    service.mode = "hangs"
    program = job.folder / "rank.py"
    program.write_text(SUMS)
    flags = flags_of(job, service.url, "no-restart")
    job.start(str(job.out), program=program, nproc=1, max_restarts=3, flags=flags)
    assert job.wait(60.0) == 0, job.log()
    value = 1
    for step in range(40):
        value = (value * 6364136223846793005 + step) % 2**64
    assert (job.out / "state").read_text() == f"40 {value}"


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


@pytest.mark.usefixtures("managed")
def test_the_managed_service_stops_a_job_that_cannot_run(job: Job) -> None:
    """The real service reads the log of a rank without its module: 93, not twenty restarts."""
    program = job.folder / "rank.py"
    program.write_text(IMPORTS_NOTHING)
    flags = flags_of(job, "localhost", "no-restart")
    job.start(program=program, nproc=1, max_restarts=20, flags=flags)
    assert job.wait() == 93, said_by(job)
    assert "user.import_error" in job.log()


def said_by(job: Job) -> str:
    """Return what launcher and managed service have written."""
    log = job.folder / "logs" / "nvrx" / "job_attribution.log"
    return job.log() + (log.read_text() if log.exists() else "")


def verdicts(job: Job) -> list[tuple[str, str]]:
    """Return action and code of each verdict that the launcher has logged, in order."""
    return re.findall(r"verdict ([A-Z]+) for \S+?_cycle\d+\.log: ([a-z_]+\.[a-z_]+)", job.log())


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("managed")
def test_each_real_fault_gets_its_verdict(job: Job) -> None:
    """Six faults of six kinds are restarted, the second of the same bad file ends the job."""
    names = [name for name, _, _ in FAULTS]
    flags = (*flags_of(job, "localhost", "no-restart"), *WATCHED_SECTIONS)
    arguments = (str(job.out), str(job.folder / "log"), *names, "none")
    job.start(*arguments, program=FAILING_RANK, max_restarts=20, flags=flags)
    assert job.wait(120.0) == 93, said_by(job)
    assert verdicts(job) == [(action, code) for _, action, code in FAULTS], job.log()


@pytest.mark.parametrize("action", ["log", "no-restart"])
@pytest.mark.usefixtures("managed")
def test_a_device_without_room_before_the_first_step(job: Job, action: str) -> None:
    """STOP after the first cycle: it ends the job with 93, or is a line and the job goes on."""
    ends = ["none"] if action == "no-restart" else []
    arguments = (str(job.out), str(job.folder / "log"), "device-allocation", *ends)
    flags = flags_of(job, "localhost", action)
    job.start(*arguments, program=FAILING_RANK, max_restarts=20, flags=flags)
    assert job.wait(60.0) == {"log": 0, "no-restart": 93}[action], job.log()
    assert verdicts(job) == [("STOP", "gpu.oom")], job.log()
    assert "a restart is useless (1 so far)" in job.log()
