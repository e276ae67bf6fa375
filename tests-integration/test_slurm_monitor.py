# SPDX-License-Identifier: Apache-2.0
"""The Slurm monitor and the attribution service with a real Slurm: failed jobs get verdicts.

Run it with `python3 tools/dev.py slurm`, as root, after `tools/slurm.sh install`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import ports
import pytest
from attribution_running import Service, running
from fault_jobs import wait_until
from slurm_cluster import SBIN, SCRIPT, why_no_slurm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

LIMIT_S = 90.0
MONITOR = [sys.executable, "-m", "nvidia_resiliency_ext.services.smonsvc"]
STEPS = "for n in 1 2 3; do echo 0: step: $n loss: 0.5; done\n"
IMPORTS_NOTHING = f"{sys.executable} -c 'import module_that_is_not_there'\n"
DIES = f"{STEPS}exec {sys.executable} -c 'import os; os.kill(os.getpid(), 11)'\n"


class OneMachine:
    """A Slurm of two nodes on this machine, and commands for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "SLURM_PORT": str(20000 + os.getpid() % 2000 * 5),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.environ["PATH"] + SBIN,
        }

    def call(self, *argv: str, text: str | None = None) -> str:
        """Run a program, and return what it printed."""
        shown = subprocess.run(
            argv,
            input=text,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert shown.returncode == 0, shown.stderr + self.logs()
        return shown.stdout

    def submit(self, script: str, *flags: str) -> str:
        """Queue a batch script, and return the job's number."""
        given = ("sbatch", "--parsable", *flags)
        return self.call(*given, text=f"#!/bin/bash\n{script}").strip()

    def logs(self) -> str:
        """Return what the daemons have written."""
        return "\n".join(path.read_text() for path in self.folder.glob("*.log"))


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[OneMachine]:
    """Give a cluster, and end its jobs and daemons."""
    reason = why_no_slurm()
    if reason is not None:
        pytest.skip(reason)
    made = OneMachine(tmp_path / "slurm")
    try:
        made.call(str(SCRIPT), "start", str(made.folder), "2")
        yield made
    finally:
        made.call(str(SCRIPT), "stop", str(made.folder))


def shown_by(port: int) -> dict[str, dict[str, Any]]:
    """Return the jobs that the monitor shows, by number; none while it does not answer."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(client), contextlib.suppress(OSError, http.client.HTTPException):
        client.request("GET", "/jobs")
        jobs = json.loads(client.getresponse().read())["jobs"]
        return {job["job_id"]: job for job in jobs}
    return {}


def test_failed_jobs_of_a_real_slurm_get_verdicts(slurm: OneMachine, tmp_path: Path) -> None:
    """An import error, a segfault of each task of an array, a cancelled job and a lost node."""
    with watched(slurm, tmp_path) as (service, root, port):
        jobs = evaluated_jobs(slurm, root, port)
        wanted = [
            *(("FAILED", "STOP", "user.import_error"),),
            *([("FAILED", "RESTART", "host.segfault")] * 2),
            *(("CANCELLED", "STOP", "sched.cancelled"),),
            *(("NODE_FAIL", "RESTART", "sched.node_fail"),),
        ]
        found = [(job["state"], job["action"], job["reason"].partition(":")[0]) for job in jobs]
        assert found == wanted
        lost = service.get(jobs[-1]["log_path"])[1]["attribution"]
        assert lost["suspect_nodes"] == ["node2"]


def test_a_fault_that_a_requeued_job_meets_again_is_a_repeat(
    slurm: OneMachine, tmp_path: Path
) -> None:
    """Each run of a requeued job is an attempt of its own, though all write to one log."""
    fault = "[rank1]: RuntimeError: CUDA error: an illegal memory access was encountered"
    ends = '[ "${SLURM_RESTART_COUNT:-0}" = 1 ] && exit 1'
    script = f"{STEPS}echo '{fault}'\n{ends}\nexec sleep 1000\n"
    with watched(slurm, tmp_path) as (_, root, port):
        log = root / "again.out"
        job = slurm.submit(script, "--requeue", "--open-mode=append", "-o", str(log))
        wait_until(
            lambda: shown_by(port).get(job, {}).get("is_submitted") and fault in log.read_text(),
            slurm.logs,
            LIMIT_S,
        )
        slurm.call("scontrol", "requeue", job)
        wait_until(
            lambda: (
                shown_by(port).get(job, {}).get("state") == "FAILED"
                and shown_by(port)[job]["action"] == "STOP"
            ),
            slurm.logs,
            LIMIT_S,
        )
        assert "retry_budget_exhausted" in shown_by(port)[job]["reason"]
        kept = (tmp_path / "state" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["attempt_index"] for line in kept] == [0, 1]


@contextlib.contextmanager
def watched(slurm: OneMachine, tmp_path: Path) -> Iterator[tuple[Service, Path, int]]:
    """Run service and monitor; give the service, the folder of logs, and the monitor's port."""
    pytest.importorskip("fastapi")
    root = tmp_path / "logs"
    root.mkdir()
    endpoint = f"unix://{tmp_path}/s"
    settings = {"RESTART_AGENT_LOG_QUIET_SECONDS": "1", "STATE_DIR": tmp_path / "state"}
    with ports.claimed() as port, running(root, endpoint, **settings) as service:
        flags = ("--attrsvc-endpoint", endpoint, "--interval", "0.5", "--partitions", "test")
        with subprocess.Popen(
            [*MONITOR, *flags, "--port", str(port)], env=slurm.environment, stderr=subprocess.PIPE
        ) as monitor:
            try:
                yield service, root, port
                monitor.send_signal(signal.SIGTERM)
                assert monitor.wait(30) == 0
            finally:
                monitor.kill()


def evaluated_jobs(slurm: OneMachine, root: Path, port: int) -> list[dict[str, Any]]:
    """Let jobs fail in five ways; return what the monitor shows of them when all are evaluated."""

    def state(job: str) -> dict[str, Any]:
        return shown_by(port).get(job, {})

    def is_followed(job: str) -> bool:
        return bool(state(job).get("is_submitted"))

    # Each waits until the monitor has seen it, as a job that trains would be seen.
    seen = root / "seen"
    waits = f"until [ -e {seen} ]; do sleep 0.1; done\n"
    plain = slurm.submit(waits + IMPORTS_NOTHING, "--no-requeue", "-o", f"{root}/plain-%j.out")
    array = slurm.submit(
        waits + DIES, "--no-requeue", "--array=0-1", "-o", f"{root}/array-%A_%a.out"
    )
    endless = f"{STEPS}exec sleep 1000\n"
    cancelled = slurm.submit(endless, "--no-requeue", "-o", f"{root}/cancelled-%j.out")
    lost = slurm.submit(endless, "--no-requeue", "-w", "node2", "-o", f"{root}/lost-%j.out")

    def numbers() -> list[str]:
        queue = slurm.call("squeue", "-h", "--array", "-o", "%A %F").split("\n")
        members = sorted(line.split()[0] for line in queue if line and line.split()[1] == array)
        return [plain, *members, cancelled, lost]

    wait_until(lambda: len(numbers()) == 5, slurm.logs, LIMIT_S)
    known = numbers()
    wait_until(lambda: all(map(is_followed, known)), slurm.logs, LIMIT_S)
    seen.touch()
    slurm.call("scancel", cancelled)
    slurm.call("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    deadline = time.monotonic() + LIMIT_S
    while not all(state(job).get("action") for job in known):
        assert time.monotonic() < deadline, shown_by(port)
        time.sleep(0.2)  # the monitor looks at the queue in its own time
    return [state(job) for job in known]
