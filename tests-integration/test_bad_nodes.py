# SPDX-License-Identifier: Apache-2.0
"""Scenarios of several hosts: one is unhealthy, or causes one restart after the other."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest
from attribution_service import attribution_service
from fault_jobs import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from many_nodes import NodesJob

pytestmark = pytest.mark.netns
STEPS = 400


def hosts_of(job: NodesJob, cycle: int) -> set[str]:
    """Return the hosts on which a cycle's ranks were started."""
    return {entry["host"] for entry in job.entries("start", cycle)}


@pytest.mark.slow
def test_an_unhealthy_node_is_replaced_by_the_spare(nodes_job: Callable[..., NodesJob]) -> None:
    """A node that fails its health check leaves with 1 and says why; the others go on."""
    job = nodes_job(3)
    report = job.folder / "report.json"
    first, second, third = job.network
    flags = ["--ft-lease", "1", "--ft-bad-node-hook", f"sh -c 'cat > {report}'"]
    for rank, host in enumerate((first, second, third)):
        job.start(
            *("--steps", str(STEPS), "--step-ms", "20"),
            hosts=[host],
            nnodes="2:3",
            flags=[*flags, "--node-rank", str(rank)],
            environment={"NVRX_INJECT_GPU_FAILURE": "1:1"},
        )
        if rank == 1:
            job.wait_for_step(0, 2, ranks=2)
    wait_until(
        lambda: "it is a spare" in job.log(third) or "as a spare" in job.log(third), job.tails
    )
    job.signal_rank(0, 0)
    codes = job.wait()
    assert codes == {first.name: 0, second.name: 1, third.name: 0}, job.tails()
    assert hosts_of(job, 1) == {first.name, third.name}
    assert "this node leaves the job" in job.log(second)
    told = json.loads(report.read_text())
    assert (told["node"], told["reason"]) == (second.name, "unhealthy")
    job.assert_counted(STEPS)
    job.assert_fenced()


@pytest.mark.slow
def test_an_excluded_array_task_is_left_out_of_the_next_round(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """Nobody looks at the file while ranks work; before the next round both nodes of task 1 go."""
    job = nodes_job(4)
    report = job.folder / "report.json"
    files = job.folder / "health"
    files.mkdir()
    hosts = list(job.network)
    flags = ["--ft-lease", "1", "--ft-segment-health-check-dir", str(files)]
    flags += ["--ft-bad-node-hook", f"sh -c 'cat > {report}'"]
    for number, host in enumerate(hosts):
        job.start(
            *("--steps", str(STEPS), "--step-ms", "20"),
            hosts=[host],
            nnodes="2:4",
            flags=flags,
            environment=_array_task(number // 2, number % 2),
        )
    job.wait_for_step(0, 2, ranks=2)
    wait_until(lambda: "as a spare" in job.log(hosts[3]), job.tails)
    assert hosts_of(job, 0) == {hosts[0].name, hosts[1].name}
    job.wait_for_step(0, 20, ranks=2)
    (files / "segment_health_check.77.0").write_text("node1 drained: fan broken")
    job.wait_for_step(0, 40, ranks=2)
    job.signal_rank(0, 1)
    job.wait_for_step(1, 2, ranks=2)
    assert hosts_of(job, 1) == {hosts[2].name, hosts[3].name}
    for host in hosts[:2]:
        assert "array task 0 of job 77" in job.log(host)
        assert "node1 drained: fan broken" in job.log(host)
    told = json.loads(report.read_text())
    assert (told["reason"], told["evidence"]["check"]) == ("unhealthy", "segment")
    assert "node1 drained: fan broken" in told["what"]
    codes = job.wait()
    assert [codes[host.name] for host in hosts[1:]] == [1, 0, 0], job.tails()
    job.assert_counted(STEPS)
    job.assert_fenced()


def _array_task(task: int, node: int) -> dict[str, str]:
    """Return what Slurm tells a launcher of an array whose tasks have two nodes."""
    return {
        "SLURM_JOB_ID": str(77 + task),
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_NNODES": "2",
        "SLURM_PROCID": str(node),
    }


@pytest.mark.slow
def test_a_node_that_attribution_names_makes_room(nodes_job: Callable[..., NodesJob]) -> None:
    """At the next round the spare works in its place; nobody is sent away."""
    job = nodes_job(3)
    first, second, third = job.network
    steps = ("--steps", str(STEPS), "--step-ms", "20", "--save-every", "5")
    with attribution_service(str(job.folder / "analysis.sock")) as service:
        verdict = {"action": "RESTART", "reason": "a GPU fell off the bus"}
        service.decides(verdict, exclude_nodes=[second.name])
        flags = [
            *("--ft-lease", "1", "--ft-per-cycle-applog-prefix"),
            *(str(job.folder / "log" / "job.log"), "--ft-attribution-endpoint", service.url),
            *("--ft-attribution-node-action", "exclude"),
        ]
        job.start(*steps, nnodes="2:3", hosts=[first, second], max_restarts=5, flags=flags)
        job.wait_for_step(0, 2, ranks=2)
        job.start(*steps, nnodes="2:3", hosts=[third], max_restarts=5, flags=flags)
        wait_until(lambda: "as a spare" in job.log(third), job.tails)
        job.signal_rank(0, 0, signal.SIGKILL)
        wait_until(lambda: "attribution names bad nodes" in job.log(first), job.tails)
        job.wait_for_step(1, 2, ranks=2)
        job.signal_rank(1, 0, signal.SIGKILL)
        job.wait_for_step(2, 2, ranks=2)
        assert hosts_of(job, 2) == {first.name, third.name}
        assert set(job.wait().values()) == {0}, job.tails()
    job.assert_counted(STEPS)
    job.assert_fenced()


@pytest.mark.slow
def test_a_store_host_that_only_serves_goes_when_it_is_told(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """It has left the round and stays for its store; when ranks have saved, it goes, and all do."""
    job = nodes_job(3)
    first, second, third = job.network
    for rank, host in enumerate((first, second, third)):
        job.start(
            *("--steps", "100000", "--step-ms", "20", "--client", "--talk"),
            hosts=[host],
            nnodes="2:3",
            flags=["--ft-lease", "1", "--ft-preempt-signal", "USR2", "--node-rank", str(rank)],
            environment={"NVRX_INJECT_GPU_FAILURE": "1:0"},
        )
        if rank == 1:
            job.wait_for_step(0, 2, ranks=2)
    wait_until(lambda: "as a spare" in job.log(third), job.tails)
    job.signal_rank(0, 1)
    job.wait_for_step(1, 2, ranks=2)
    wait_until(lambda: "stays because the job's store is here" in job.log(first), job.tails)
    job.launchers[first.name].send_signal(signal.SIGUSR2)
    assert job.wait(20) == {first.name: 1, second.name: 0, third.name: 0}, job.tails()
    for host in (second, third):
        assert f"host {first.name} must go: SIGUSR2 was received" in job.log(host), job.tails()


@pytest.mark.slow
def test_a_node_that_fails_again_and_again_makes_room(nodes_job: Callable[..., NodesJob]) -> None:
    """After its third failure a node works no more while there is a spare; nobody is sent away."""
    job = nodes_job(3)
    first, second, third = job.network
    steps = ("--steps", str(STEPS), "--step-ms", "20", "--save-every", "5")
    job.start(
        *steps, nnodes="2:3", hosts=[first, second], max_restarts=5, flags=["--ft-lease", "1"]
    )
    job.wait_for_step(0, 2, ranks=2)
    job.start(*steps, nnodes="2:3", hosts=[third], max_restarts=5, flags=["--ft-lease", "1"])
    wait_until(lambda: "as a spare" in job.log(third), job.tails)
    for cycle in range(3):
        job.wait_for_step(cycle, 2, ranks=2)
        assert hosts_of(job, cycle) == {first.name, second.name}
        rank = next(e["rank"] for e in job.entries("start", cycle) if e["host"] == second.name)
        job.signal_rank(cycle, rank, signal.SIGKILL)
    job.wait_for_step(3, 2, ranks=2)
    assert hosts_of(job, 3) == {first.name, third.name}
    assert f"host {second.name} caused 3 restarts" in job.log(first)
    assert set(job.wait().values()) == {0}, job.tails()
    job.assert_counted(STEPS)
    job.assert_fenced()
