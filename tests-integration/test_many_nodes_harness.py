# SPDX-License-Identifier: Apache-2.0
"""What scenarios of many nodes stand on: payloads, their record, the search for leftovers.

Plain torchrun runs the payloads here, so that a fault of the launcher is not taken for one of the
harness.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from fault_jobs import wait_until
from many_nodes import COUNTING_RANK, DDP_RANK, _counting, counted, overlaps, read_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from hosts import Host, HostProcess
    from many_nodes import NodesJob

TORCHRUN = "torch.distributed.run"
# torchrun's agent listens at the ranks' MASTER_PORT unless this is set.
OWN_PORT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
STEPS = 60
NEVER = 10**9


def entry(t: float, cycle: int, what: str, **more: Any) -> dict[str, Any]:
    """Return an entry of the record."""
    known = {"attempt": 0, "rank": 0, "host": "a", "pid": cycle}
    return {**known, "t": t, "cycle": cycle, "what": what, **more}


@pytest.mark.parametrize(
    ("entries", "wrong"),
    [
        ([entry(1, 0, "step"), entry(2, 1, "step")], 0),
        ([entry(1, 1, "start"), entry(2, 0, "step"), entry(3, 1, "step")], 0),
        ([entry(1, 0, "step"), entry(2, 1, "step"), entry(3, 0, "step")], 1),
        ([entry(1, 0, "save"), entry(2, 1, "step"), entry(3, 0, "saved")], 1),
        ([entry(1, 0, "step"), entry(2, 1, "save"), entry(3, 0, "end")], 0),
        ([entry(2, 0, "step", attempt=1), entry(1, 3, "step"), entry(3, 3, "step")], 1),
        ([entry(1, 0, "start"), entry(2, 0, "start", host="b")], 1),
        ([entry(1, 0, "start"), entry(2, 0, "start", rank=1, host="b")], 0),
        ([entry(1, 0, "foreign_rank")], 1),
    ],
)
def test_two_groups_at_once_are_found(entries: list[dict[str, Any]], wrong: int) -> None:
    """Foreign ranks, and steps of an earlier cycle after those of a later one, are found."""
    assert len(overlaps(entries)) == wrong


def test_the_count_does_not_depend_on_the_number_of_ranks() -> None:
    """However many ranks share the samples of a step, they come to the same."""
    share_of = _counting().share_of
    totals = {sum(share_of(3, rank, world) for rank in range(world)) for world in (1, 2, 3, 7, 64)}
    assert len(totals) == 1
    assert counted(3) != counted(4)


def alone(
    job: NodesJob, host: Host, *, rank: int = 0, world: int = 1, cycle: int = 0, steps: int = 40
) -> HostProcess:
    """Start one counting rank on a host, as a launcher would."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": job.network[0].name,
        "MASTER_PORT": "7001",
        "TORCHELASTIC_RESTART_COUNT": str(cycle),
    }
    command = [sys.executable, COUNTING_RANK, job.shared, "--steps", str(steps), "--step-ms", "5"]
    with job.log_path(host).open("ab") as log:
        return host.start(
            command,
            env=job.environment(variables),
            cwd=job.folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.netns
def test_a_second_group_at_work_fails_the_check(nodes_job: Callable[..., NodesJob]) -> None:
    """Two groups that really train at once on two hosts with clocks apart are told apart."""
    job = nodes_job(2)
    processes = []
    for cycle, host in enumerate(job.network):
        processes.append(alone(job, host, cycle=cycle, steps=NEVER))
        wait_until(lambda cycle=cycle: job.entries("step", cycle), job.tails)
    job.let_end()
    assert [process.wait(60) for process in processes] == [0, 0], job.tails()
    with pytest.raises(AssertionError, match="is after"):
        job.assert_fenced()


@pytest.mark.netns
def test_a_rank_of_another_cycle_is_foreign(nodes_job: Callable[..., NodesJob]) -> None:
    """A rank that comes to rank 0 of another cycle is refused, and the record says so."""
    job = nodes_job(2)
    first = alone(job, job.network[0], world=2, cycle=1)
    second = alone(job, job.network[1], rank=1, world=2, cycle=0)
    assert first.wait(20) == 1, job.tails()
    assert second.wait(20) == 1, job.tails()
    assert [found["who"]["cycle"] for found in job.entries("foreign_rank")] == ["0"]
    with pytest.raises(AssertionError, match="foreign_rank"):
        job.assert_fenced()


@pytest.mark.netns
def test_a_half_written_line_is_not_read(nodes_job: Callable[..., NodesJob]) -> None:
    """The record is read up to its last whole line; times are by one clock."""
    job = nodes_job(2)
    assert [alone(job, host, cycle=n, steps=1).wait(20) for n, host in enumerate(job.network)] == [
        0,
        0,
    ], job.tails()
    before = job.record()
    with (job.shared / "record.jsonl").open("a") as file:
        file.write('{"half')
    assert job.record() == before
    assert read_record(job.shared)[0]["t"] > before[0]["t"]
    assert abs(job.entries("start", 0)[0]["t"] - job.entries("start", 1)[0]["t"]) < 20


@pytest.mark.netns
def test_leftovers_are_found(nodes_job: Callable[..., NodesJob]) -> None:
    """A process, a listener, a socket and files that stay on a host are each told."""
    job = nodes_job(2)
    assert job.leftovers() == []
    code = (
        "import socket, time\n"
        "one = socket.create_server(('', 7002))\n"
        "two = socket.socket(socket.AF_UNIX); two.bind('/tmp/left'); two.listen()\n"
        "open('/dev/shm/left', 'w')\n"
        "time.sleep(1000)\n"
    )
    job.network[1].start([sys.executable, "-c", code])
    wait_until(lambda: len(job.leftovers()) >= 5, lambda: str(job.leftovers()))
    job.network[1].kill_all()
    assert sorted(job.leftovers()) == ["node2: file /dev/shm/left", "node2: file /tmp/left"]
    for path in ("/dev/shm/left", "/tmp/left"):
        os.unlink(job.network[1].has(path))


@pytest.mark.netns
@pytest.mark.timeout(150)
@pytest.mark.slow
def test_counting_ranks_under_torchrun(nodes_job: Callable[..., NodesJob]) -> None:
    """Ranks on three hosts find each other by name and come to the right count."""
    job = nodes_job(3, launcher=TORCHRUN)
    job.start("--steps", str(STEPS), environment=OWN_PORT)
    assert set(job.wait(90).values()) == {0}, job.tails()
    job.assert_counted(STEPS)
    job.assert_fenced()
    assert {entry["host"] for entry in job.entries("end")} == {"node1", "node2", "node3"}


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ddp_under_torchrun(nodes_job: Callable[..., NodesJob]) -> None:
    """Gloo works between hosts; a job that lost all its processes ends as a peaceful one does.

    It is started again by hand: torchrun's own restarts on several nodes get into each other's
    way, and its nodes count them each by itself.
    """
    results = []
    for disturbed in (False, True):
        job = nodes_job(3, launcher=TORCHRUN)
        job.start("--steps", str(STEPS), "--step-ms", "40", program=DDP_RANK)
        if disturbed:
            job.wait_for_step(0, 11, ranks=3, limit_s=90)  # 10 is saved; two seconds are left
            for host in job.network:
                host.kill_all()
            assert set(job.wait().values()) == {-signal.SIGKILL}
            assert 0 < max(entry["step"] for entry in job.entries("saved")) < STEPS
            job.start("--steps", str(STEPS), program=DDP_RANK)
        assert set(job.wait(120).values()) == {0}, job.tails()
        results.append(job.result())
        job.network.close()
    assert results[0] == results[1]
    assert len(results[0]["losses"]) == results[0]["step"] == STEPS


@pytest.mark.netns
def test_counting_ranks_under_the_launcher(nodes_job: Callable[..., NodesJob]) -> None:
    """On one host of its own, the launcher recovers the count from a kill and leaves nothing."""
    job = nodes_job(1)
    job.start("--steps", str(NEVER), "--client", nproc=3)
    job.wait_for_step(0, STEPS // 2, ranks=3)
    job.signal_rank(0, 1, signal.SIGKILL)
    job.wait_for_step(1, ranks=3)
    job.let_end()
    assert job.wait() == {"node1": 0}, job.tails()
    job.assert_counted()
    job.assert_fenced()
    assert job.cycles() == [0, 1]
    assert job.first_step(1) > job.first_step(0)
    assert len(job.events("cycle_start")) == 2
