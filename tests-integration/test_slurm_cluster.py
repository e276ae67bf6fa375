# SPDX-License-Identifier: Apache-2.0
"""The Slurm on which scenarios run is a real one: steps, arrays, requeues, lost nodes.

Run them with `python3 tools/dev.py slurm`, as root, after `tools/slurm.sh install`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from fault_jobs import is_running, wait_until
from many_nodes import COUNTING_RANK
from slurm_cluster import SBIN, SCRIPT, SlurmCluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from many_nodes import NodesJob

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(150)]

LIMIT_S = 60.0


def lines(path: Path) -> list[list[str]]:
    """Return a file's lines as words."""
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.netns
def test_a_step_runs_on_every_host(nodes_job: Callable[..., NodesJob]) -> None:
    """`srun` over three hosts starts one task on each, which know who they are and each other."""
    job = nodes_job(3)
    slurm = SlurmCluster(job.network, job.folder / "slurm")
    job.accept_present()
    shown = slurm.run("srun", "-N3", "sh", "-c", "echo $(hostname) $SLURMD_NODENAME $SLURM_PROCID")
    told = sorted(line.split() for line in shown.stdout.splitlines())
    assert [words[:2] for words in told] == [[f"node{n}", f"node{n}"] for n in (1, 2, 3)]
    assert sorted(words[2] for words in told) == ["0", "1", "2"]
    variables = (
        "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NNODES MASTER_ADDR=node1 MASTER_PORT=7001 exec"
        f" {sys.executable} {COUNTING_RANK} {job.shared} --steps 20 --step-ms 1"
    )
    slurm.run("srun", "-N3", "--ntasks-per-node=1", "sh", "-c", variables, env=job.environment())
    job.assert_counted(20)
    assert len({entry["host"] for entry in job.entries("end")}) == 3
    job.assert_nothing_left()
    slurm.close()


@pytest.mark.netns
def test_an_array_job_has_a_task_on_each_host(nodes_job: Callable[..., NodesJob]) -> None:
    """The tasks of an array job run on hosts of their own, with the array's variables."""
    job = nodes_job(3)
    slurm = SlurmCluster(job.network, job.folder / "slurm")
    out = job.folder / "out"
    script = f"echo $SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID $SLURM_NNODES $(hostname) >> {out}\n"
    number = slurm.submit(script, "--array=0-2", "-N1", "--exclusive")
    wait_until(lambda: len(lines(out)) == 3, slurm.logs, LIMIT_S)
    assert {words[0] for words in lines(out)} == {number}
    assert {words[1] for words in lines(out)} == {"0", "1", "2"}
    assert {words[3] for words in lines(out)} == {"node1", "node2", "node3"}
    slurm.close()


@pytest.mark.netns
def test_a_requeued_job_starts_again(nodes_job: Callable[..., NodesJob]) -> None:
    """`scontrol requeue` ends a job's processes, and it starts again knowing that it did."""
    job = nodes_job(2)
    slurm = SlurmCluster(job.network, job.folder / "slurm")
    job.accept_present()
    out = job.folder / "out"
    script = f"echo ${{SLURM_RESTART_COUNT:-0}} >> {out}\nexec srun -N2 sleep 1000\n"
    number = slurm.submit(script, "--requeue", "-N2")
    wait_until(lambda: slurm.states(number) == ["RUNNING"] and lines(out), slurm.logs, LIMIT_S)
    slurm.run("scontrol", "requeue", number)
    wait_until(lambda: lines(out) == [["0"], ["1"]], slurm.logs, LIMIT_S)
    slurm.run("scancel", number)
    job.assert_nothing_left(LIMIT_S)
    slurm.close()


@pytest.mark.netns
@pytest.mark.slow
def test_a_job_that_lost_a_host_goes_on_elsewhere(nodes_job: Callable[..., NodesJob]) -> None:
    """When a host loses power its job is requeued on others; the host may come back."""
    job = nodes_job(3)
    slurm = SlurmCluster(job.network, job.folder / "slurm")
    out = job.folder / "out"
    script = f"echo ${{SLURM_RESTART_COUNT:-0}} $(hostname) >> {out}\nexec sleep 1000\n"
    slurm.submit(script, "--requeue", "-N1", "-x", "node1")
    wait_until(lambda: lines(out), slurm.logs, LIMIT_S)
    lost = next(host for host in job.network if host.name == lines(out)[0][1])
    lost.power_off()
    wait_until(lambda: len(lines(out)) == 2, slurm.logs, 90)
    assert lines(out)[1][0] == "1"
    assert lines(out)[1][1] not in ("node1", lost.name)
    lost.boot()
    slurm.start_node(lost)
    wait_until(lambda: slurm.node_states()[lost.name] == "idle", slurm.logs, LIMIT_S)
    slurm.close()


def test_several_nodes_on_one_machine(tmp_path: Path) -> None:
    """The script alone gives a cluster of two nodes on this machine, and takes it away again."""
    folder = tmp_path / "slurm"
    port = str(20000 + os.getpid() % 2000 * 5)
    environment = os.environ | {
        "SLURM_PORT": port,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": os.environ["PATH"] + SBIN,
    }

    def call(*argv: str) -> str:
        shown = subprocess.run(
            argv, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    try:
        call(str(SCRIPT), "start", str(folder), "2")
        assert sorted(call("srun", "-N2", "printenv", "SLURMD_NODENAME").split()) == [
            "node1",
            "node2",
        ]
        pids = [int(path.read_text()) for path in [*folder.glob("*.pid"), folder / "munge/pid"]]
        assert len(pids) == 4
        call("sbatch", "--output=/dev/null", "--wrap", "sleep 1000")
    finally:
        began = time.monotonic()
        call(str(SCRIPT), "stop", str(folder))
    assert not any(is_running(pid) for pid in pids)
    assert time.monotonic() - began < LIMIT_S
