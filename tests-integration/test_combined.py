# SPDX-License-Identifier: Apache-2.0
"""All packages in one training program: after faults it ends with the undisturbed weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fault_jobs import wait_until
from results import no_second_try

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fault_jobs import Job

PROGRAM = Path(__file__).resolve().parent / "examples" / "pretrain.py"
FAULT_AT = 14
# Local checkpoints are of 3, 6, 9, 12; the newest may still have been on its way to the disk, so no
# global checkpoint comes between the two.
NEWEST = {9, 12}
LIMIT_S = 180.0
LAUNCHER_FLAGS = ("--ft-rank-section-timeouts", "setup:120,step:60,checkpointing:60")


def results_in(text: str) -> list[dict[str, Any]]:
    """Return the results that ranks have printed."""
    return [
        json.loads(line.split("result: ")[1]) for line in text.splitlines() if "result: " in line
    ]


def all_switched_on(folder: Path, faults: str) -> tuple[str, ...]:
    """Return the program's arguments: all packages, and a fault on rank 1 in each cycle."""
    return (
        *("--save", str(folder / "run"), "--save-interval", "20"),
        *("--async-save", "--use-persistent-ckpt-worker"),
        *("--non-persistent-ckpt-type", "local", "--non-persistent-save-interval", "3"),
        *("--non-persistent-local-ckpt-dir", str(folder / "local")),
        *("--replication", "--replication-jump", "1", "--replication-factor", "2"),
        *("--enable-ft-package", "--calc-ft-timeouts", "--log-straggler"),
        *("--inprocess-restart", "--inprocess-active-world-size", "2"),
        *("--fault-injector-ranks", "1", "--fault-injector-fault-types", faults),
        *("--fault-injector-delay-start-iteration", str(FAULT_AT)),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of the same training without any package but torch, and without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {name: value for name, value in os.environ.items() if name[:5] != "NVRX_"}
    done = subprocess.run(
        [*command, str(PROGRAM), "--save", str(folder)],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    (result,) = results_in(done.stdout)
    return result


@pytest.fixture
def verdicts(job: Job) -> Iterator[str]:
    """Give the address of an attribution service that may read the job's logs."""
    socket_path = job.folder / "attrsvc.sock"
    logs = job.folder / "logs"
    logs.mkdir()
    settings = {"ALLOWED_ROOT": str(logs), "ENDPOINT": f"unix://{socket_path}"}
    environment = job.environment(
        {f"NVRX_ATTRSVC_{name}": value for name, value in settings.items()}
    )
    service = subprocess.Popen(
        [sys.executable, "-m", "nvidia_resiliency_ext.services.attrsvc"],
        env=environment, cwd=job.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(socket_path.exists, "the service listens")
        yield settings["ENDPOINT"]
    finally:
        service.terminate()
        service.wait(30)


@pytest.mark.timeout(400)
def test_the_result_is_that_of_an_undisturbed_training(
    job: Job, undisturbed: dict[str, Any], verdicts: str
) -> None:
    """Weights and loss equal plain torchrun's; the layer meant for a fault handled it, once.

    A killed rank is the launcher's, an exception in the next cycle is restarted in the processes.
    """
    logs = job.folder / "logs"
    flags = ("--ft-per-cycle-applog-prefix", str(logs / "job.log"))
    flags += ("--ft-attribution-endpoint", verdicts, *LAUNCHER_FLAGS)
    arguments = all_switched_on(job.folder, "sigkill,workload_exc")
    job.start(*arguments, nproc=3, program=PROGRAM, flags=flags)
    assert job.wait(LIMIT_S) == 0, job.log()
    text = "".join((logs / f"job_cycle{cycle}.log").read_text() for cycle in range(2))
    with no_second_try():
        assert results_in(text) == [undisturbed], text
    assert not (logs / "job_cycle2.log").exists()
    kinds = [event["kind"] for event in job.events()]
    assert kinds.count("cycle_start") == 2, kinds
    restarts = job.events("inproc_restart")
    assert len({(event["cycle"], event["iteration"]) for event in restarts}) == 1, restarts
    assert restarts[0]["cycle"] == 1
    assert "attribution: verdict RESTART for" in job.log()
    resumed = re.findall(r"rank 0 starts at (\d+) from local checkpoint", text)
    assert len(resumed) == 2, text
    assert {int(iteration) for iteration in resumed} <= NEWEST, text
    assert "relative" in text, "no report of slow ranks"
    learnt = json.loads((job.folder / "run" / "ft_state.json").read_text())
    assert learnt, "no timeouts were learnt"
