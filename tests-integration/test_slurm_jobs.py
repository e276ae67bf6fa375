# SPDX-License-Identifier: Apache-2.0
"""Jobs of launchers under a real Slurm, by the guide's commands; what counts is the job's result.

Run them with `python3 tools/dev.py slurm`, as root, after `tools/slurm.sh install`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from fault_jobs import LAUNCHER, Job
from many_nodes import COUNTING_RANK, counted
from slurm_cluster import SBIN, SCRIPT, SlurmCluster
from slurm_jobs import GUIDE, SlurmJobs, guide_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hosts import HostProcess
    from many_nodes import NodesJob

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(150)]

STEPS = 60
TRAINING = ("--steps", str(STEPS), "--step-ms", "40")
ENDLESS = ("--steps", "100000", "--step-ms", "40", "--save-every", "100000")


@pytest.fixture
def cluster(nodes_job: Callable[..., NodesJob]) -> Iterator[Callable[[int], SlurmJobs]]:
    """Give a maker of clusters of so many hosts; at the end no job may have left anything."""
    made: list[SlurmJobs] = []

    def make(count: int) -> SlurmJobs:
        job = nodes_job(count)
        slurm = SlurmCluster(job.network, job.folder / "slurm")
        job.accept_present()
        made.append(SlurmJobs(job, slurm))
        made[-1].write_training(*TRAINING)
        return made[-1]

    yield make
    for jobs in made:
        jobs.job.assert_nothing_left()
        jobs.slurm.close()


def rank_hosts(entries: list[dict]) -> list[str]:
    """Return the host of each rank."""
    return [entry["host"] for entry in entries]


@pytest.mark.netns
def test_a_step_of_launchers_restarts_and_ranks_follow_slurm(
    cluster: Callable[[int], SlurmJobs],
) -> None:
    """The guide's srun on three hosts: ranks follow SLURM_PROCID; a killed rank is one restart."""
    jobs = cluster(3)
    order = jobs.folder / "order"
    order.write_text("node3\nnode1\nnode2\n")
    env = {"SLURM_HOSTFILE": str(order), "SLURM_DISTRIBUTION": "arbitrary"}
    command = guide_command("One step of launchers")
    step = jobs.slurm.start(
        *("salloc", "--nodes=3", "sh", "-euc", command),
        env=jobs.environment(env),
        cwd=jobs.folder,
        stdout=jobs.folder / "step.out",
        stderr=subprocess.STDOUT,
    )
    begun = jobs.wait_for_ranks(0, 6, step=3)
    assert rank_hosts(begun) == ["node3", "node3", "node1", "node1", "node2", "node2"]
    jobs.job.signal_rank(0, 5)
    assert step.wait(60) == 0, jobs.logs()
    assert jobs.job.cycles() == [0, 1]
    jobs.job.assert_counted(STEPS)
    jobs.job.assert_fenced()


@pytest.mark.netns
def test_more_tasks_on_a_node_are_refused_with_the_fix(cluster: Callable[[int], SlurmJobs]) -> None:
    """Two tasks on each node: one line, exit code 2; the srun that the line tells works."""
    jobs = cluster(3)
    jobs.write_training("--steps", "10")
    text = guide_command("One step of launchers")
    wrong = re.sub(r"srun .*\\\n", "srun --ntasks-per-node=1 \\\n", text, count=1)
    allocation = "salloc --nodes=3 --ntasks-per-node=2 --overcommit sh -euc "
    said = jobs.shell(f"{allocation} '{wrong}' 2>&1 || echo code $?")
    assert "code 2" in said
    lines = [line for line in said.splitlines() if line.startswith("ft_launcher: error")]
    assert len(set(lines)) == 1, said
    fix = re.search(r"srun (--\S+(?: --\S+)*)", lines[0])
    assert fix is not None, lines
    jobs.shell(f"{allocation} '{wrong.replace('srun --ntasks-per-node=1', fix[0])}'")
    jobs.job.assert_counted(10)


@pytest.mark.netns
def test_a_cancelled_job_tells_its_workers_and_ends(cluster: Callable[[int], SlurmJobs]) -> None:
    """`scancel`: workers get SIGTERM and may save; the job is over, and nothing starts again."""
    jobs = cluster(3)
    jobs.write_training(*ENDLESS, "--leave-on-term")
    job = jobs.submit(guide_command("A job that starts again by itself"))
    jobs.wait_for_ranks(0, 6, step=3)
    jobs.shell(f"scancel {job}")
    jobs.wait_for_state(job, "CANCELLED")
    jobs.job.assert_nothing_left()
    assert {entry["rank"] for entry in jobs.job.entries("told")} == set(range(6))
    assert jobs.job.entries("saved"), jobs.logs()
    assert jobs.job.cycles() == [0]
    assert jobs.state(job).startswith("CANCELLED")


@pytest.mark.netns
def test_the_spare_takes_over_from_a_lost_host(cluster: Callable[[int], SlurmJobs]) -> None:
    """A host of 2:3 loses power: the spare works in its place, and Slurm's job ends well."""
    jobs = cluster(3)
    jobs.write_training("--steps", "150", "--step-ms", "40")
    job = jobs.submit(guide_command("Keep a spare node"))
    working = set(rank_hosts(jobs.wait_for_ranks(0, 4, step=3)))
    lost = next(host for host in jobs.job.network if host.name in working - {"node1"})
    lost.power_off()
    spare = ({"node2", "node3"} - {lost.name}).pop()
    begun = jobs.wait_for_ranks(1, 4)
    assert rank_hosts(begun) == ["node1", "node1", spare, spare]
    jobs.slurm.set_down(lost)
    jobs.wait_for_state(job, "COMPLETED 0:0", 60)
    assert "exit code 0" in jobs.log(job)
    jobs.job.assert_counted(150)
    jobs.job.assert_fenced()


@pytest.mark.netns
def test_a_job_whose_launcher_was_killed_is_not_started_again(
    cluster: Callable[[int], SlurmJobs],
) -> None:
    """A launcher that died, with the job done by the others, does not queue the job again."""
    jobs = cluster(3)
    job = jobs.submit(guide_command("Keep a spare node"))
    jobs.wait_for_ranks(0, 4, step=3)
    victim = jobs.job.rank(0, 3)[0]
    victim.run(["pkill", "-KILL", "-f", "/bin/ft_launcher "], cwd="/")
    jobs.wait_for_ranks(1, 4)
    jobs.wait_for_state(job, "COMPLETED 0:0", 60)
    jobs.job.assert_counted(STEPS)


@pytest.mark.netns
def test_a_requeued_job_goes_on_from_what_it_saved_at_sigterm(
    cluster: Callable[[int], SlurmJobs],
) -> None:
    """`scontrol requeue`: ranks save at SIGTERM, and the next start goes on from there."""
    jobs = cluster(3)
    jobs.write_training(
        "--steps", "200", "--step-ms", "30", "--save-every", "1000", "--leave-on-term"
    )
    job = jobs.submit(guide_command("A job that starts again by itself"))
    jobs.wait_for_ranks(0, 6, step=5)
    jobs.shell(f"scontrol requeue {job}")
    jobs.wait_for_ranks(0, 6, attempt=1)
    saved = [e for e in jobs.job.entries("saved") if e["attempt"] == 0]
    resumed = [e for e in jobs.job.entries("resume") if e["attempt"] == 1]
    assert saved, jobs.logs()
    assert {entry["step"] for entry in resumed} == {saved[-1]["step"]}
    jobs.wait_for_state(job, "COMPLETED 0:0", 60)
    jobs.job.assert_counted(200)
    jobs.job.assert_fenced()


@pytest.mark.netns
def test_a_job_without_progress_is_not_queued_again(cluster: Callable[[int], SlurmJobs]) -> None:
    """Exit code 93 of the launchers is that of the job, and it is not queued again."""
    jobs = cluster(3)
    (jobs.folder / "train.py").write_text("raise SystemExit(1)\n")
    (jobs.folder / "iteration").write_text("7")
    job = jobs.submit(
        guide_command("A job that starts again by itself").replace(
            "--max-restarts 10",
            "--max-restarts 10 --ft-max-no-progress-cycles 2"
            " --ft-checkpoint-iteration-file iteration",
        )
    )
    jobs.wait_for_state(job, "FAILED 93:0", 60)
    assert jobs.log(job).count("start 0: exit code 93") == 1
    assert not list(jobs.folder.glob("failed-*"))


@pytest.mark.netns
def test_a_failed_job_is_queued_again_and_not_for_ever(
    cluster: Callable[[int], SlurmJobs],
) -> None:
    """A plain failure queues the job again; REQUEUES says how often."""
    jobs = cluster(2)
    (jobs.folder / "train.py").write_text("raise SystemExit(1)\n")
    command = guide_command("A job that starts again by itself").replace("=3", "=2")
    command = command.replace("--nnodes 3", "--nnodes 2").replace("--max-restarts 10", "")
    job = jobs.submit(f"REQUEUES=1 {command}")
    jobs.wait_for_state(job, "FAILED 1:0", 90)
    assert "start 0: exit code 1" in jobs.log(job)
    assert "start 1: exit code 1" in jobs.log(job)


@pytest.mark.netns
def test_a_job_that_lost_its_first_host_is_queued_again(
    cluster: Callable[[int], SlurmJobs],
) -> None:
    """The host of the batch script and the store is lost: the job goes on elsewhere."""
    jobs = cluster(4)
    command = guide_command("A job that starts again by itself").replace("--nnodes 3", "--nnodes 2")
    job = jobs.submit(command.replace("--nodes=3", "--nodes=2 -x node1"), env={"WATCH_S": "1"})
    begun = jobs.wait_for_ranks(0, 4, step=3)
    assert rank_hosts(begun) == ["node2", "node2", "node3", "node3"]
    lost = jobs.job.network[1]
    lost.power_off()
    jobs.slurm.set_down(lost)
    again = jobs.wait_for_ranks(0, 4, attempt=1)
    assert rank_hosts(again) == ["node3", "node3", "node4", "node4"]
    jobs.wait_for_state(job, "COMPLETED 0:0", 60)
    jobs.job.assert_counted(STEPS)
    jobs.job.assert_fenced()


@pytest.mark.netns
def test_a_job_saves_and_leaves_before_its_time_is_over(
    cluster: Callable[[int], SlurmJobs],
) -> None:
    """Slurm's signal to the batch script makes all ranks save; the job is queued and goes on."""
    jobs = cluster(3)
    jobs.write_training(
        *("--steps", "150", "--step-ms", "30", "--save-every", "1000"),
        *("--client", "--ignore-usr1"),
    )
    job = jobs.submit(guide_command("Leave before the time is over"))
    jobs.wait_for_ranks(0, 6, step=5)
    jobs.shell(f"scancel --batch --signal=USR1 {job}")
    jobs.wait_for_ranks(0, 6, attempt=1)
    saved = [e for e in jobs.job.entries("saved") if e["attempt"] == 0]
    resumed = [e for e in jobs.job.entries("resume") if e["attempt"] == 1]
    assert {entry["step"] for entry in resumed} == {entry["step"] for entry in saved}
    jobs.wait_for_state(job, "COMPLETED 0:0", 60)
    jobs.job.assert_counted(150)
    jobs.job.assert_fenced()


@pytest.mark.netns
def test_slurm_replaces_the_lost_host_of_an_array(cluster: Callable[[int], SlurmJobs]) -> None:
    """A task of an array loses its host: it is started on another one and the job goes on there."""
    jobs = cluster(4)
    jobs.write_training("--steps", "100", "--step-ms", "40")
    plane = start_array(jobs, nodes=1, nnodes=2)
    begun = jobs.wait_for_ranks(0, 2, step=3)
    victim = jobs.job.rank(0, 1)[0]
    victim.power_off()
    jobs.slurm.set_down(victim)
    again = jobs.wait_for_ranks(1, 2)
    assert again[0]["host"] == begun[0]["host"]
    assert again[1]["host"] not in rank_hosts(begun)
    assert plane.wait(60) == 0, jobs.logs()
    jobs.wait_for(lambda: not jobs.shell("squeue -h"))
    jobs.job.assert_counted(100)
    jobs.job.assert_fenced()


@pytest.mark.netns
def test_the_nodes_of_an_array_task_are_replaced_together(
    cluster: Callable[[int], SlurmJobs],
) -> None:
    """One host of a task of two is lost: both of its nodes begin anew; the other task's do not."""
    jobs = cluster(5)
    jobs.write_training("--steps", "100", "--step-ms", "40")
    plane = start_array(jobs, nodes=2, nnodes=4)
    begun = jobs.wait_for_ranks(0, 4, step=3)
    assert rank_hosts(begun) == ["node2", "node3", "node4", "node5"]
    victim = jobs.job.network[3]
    launchers = {name: launcher_of(jobs, name) for name in ("node2", "node3", "node5")}
    victim.power_off()
    jobs.slurm.set_down(victim)
    victim.boot()
    jobs.slurm.start_node(victim)
    jobs.job.accept_present(victim)
    again = jobs.wait_for_ranks(1, 4)
    assert rank_hosts(again) == ["node2", "node3", "node4", "node5"]
    assert {name: launcher_of(jobs, name) == pid for name, pid in launchers.items()} == {
        "node2": True,
        "node3": True,
        "node5": False,
    }
    assert plane.wait(60) == 0, jobs.logs()
    jobs.wait_for(lambda: not jobs.shell("squeue -h"))
    jobs.job.assert_counted(100)
    jobs.job.assert_fenced()


@pytest.mark.netns
def test_a_drained_node_is_left_out_of_the_next_round(cluster: Callable[[int], SlurmJobs]) -> None:
    """The publisher tells launchers of a drained node; its task makes room and comes back anew."""
    jobs = cluster(5)
    jobs.write_training("--steps", "300", "--step-ms", "40")
    health = jobs.folder / "health"
    health.mkdir()
    published = {"HEALTH_DIR": str(health), "HEALTH_S": "0.2"}
    plane = start_array(jobs, nodes=1, nnodes=2, tasks="0-2", env=published)
    begun = jobs.wait_for_ranks(0, 2, step=3)
    assert list(health.glob("segment_*.state")) == []
    bad = begun[1]["host"]
    # A node that is drained ends no task: it makes room when there is a next round anyway.
    jobs.shell(f"scontrol update nodename={bad} state=drain reason='fan broken'")
    (path,) = jobs.wait_for(lambda: list(health.glob("segment_*.state")))
    assert "fan broken" in path.read_text()
    jobs.job.signal_rank(0, 0)
    again = jobs.wait_for_ranks(1, 2)
    assert begun[0]["host"] in rank_hosts(again)
    assert bad not in rank_hosts(again)
    # Its task is started again elsewhere, and nobody is excluded any more.
    jobs.wait_for(lambda: not list(health.glob("segment_*.state")))
    assert plane.wait(60) == 0, jobs.logs()
    jobs.wait_for(lambda: not jobs.shell("squeue -h"))
    assert "fan broken" in jobs.logs()
    jobs.job.assert_counted(300)
    jobs.job.assert_fenced()


@pytest.mark.netns
@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", ["jobs of one name", "tasks of an array"])
def test_the_next_allocation_takes_over_from_a_lost_rendezvous_host(
    cluster: Callable[[int], SlurmJobs], form: str
) -> None:
    """One runs at a time: the second goes on from the checkpoint elsewhere, a third has no work."""
    jobs = cluster(4)
    jobs.write_training("--steps", "120", "--step-ms", "40", "--save-every", "5")
    first, second = re.findall(
        r"^```sh\n(.*?)^```$", section("Let a second allocation"), re.MULTILINE | re.DOTALL
    )
    text = first.replace("in 1 2;", "in 1 2 3;") if "jobs" in form else second
    text = text.replace("0-1%1", "0-2%1").replace("--nodes=3", "--nodes=2 -x node1")
    said = jobs.shell(text.replace("2:3", "2"), env={"WATCH_S": "1"})
    begun = jobs.wait_for_ranks(0, 4, step=20)
    assert rank_hosts(begun) == ["node2", "node2", "node3", "node3"]
    assert jobs.shell("squeue -h -r -o %T").split().count("RUNNING") == 1
    lost = jobs.job.network[1]
    lost.power_off()
    jobs.slurm.set_down(lost)
    others = {"node3", "node4"}
    jobs.wait_for(lambda: others <= {entry["host"] for entry in jobs.job.entries("step")}, 90)
    jobs.wait_for(lambda: not jobs.shell("squeue -h"), 90)
    jobs.job.assert_counted(120)
    assert max(entry["step"] for entry in jobs.job.entries("resume")) >= 15
    assert len(list(jobs.folder.glob("over-*"))) == 1, said
    assert "another one has done the work" in jobs.logs()


def section(heading: str) -> str:
    """Return a section of the guide."""
    return GUIDE.read_text().split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]


def launcher_of(jobs: SlurmJobs, name: str) -> str:
    """Return the pid of the launcher on a host."""
    host = next(host for host in jobs.job.network if host.name == name)
    shown = host.run(["pgrep", "-f", "/bin/ft_launcher "], cwd="/", check=False)
    return shown.stdout.strip()


def start_array(
    jobs: SlurmJobs,
    *,
    nodes: int,
    nnodes: int,
    tasks: str = "0-1",
    env: Mapping[str, str] | None = None,
) -> HostProcess:
    """Submit the guide's array of tasks, away from the first host; return its control plane."""
    text = guide_command("Let Slurm replace nodes: job arrays")
    text = text.replace("--array=0-1", f"--array={tasks}")
    text = text.replace("--nodes=2", f"--nodes={nodes} --exclude=node1 --exclusive")
    return jobs.slurm.start(
        *("sh", "-euc", text.replace("--nnodes 4", f"--nnodes {nnodes}")),
        env=jobs.environment(env),
        cwd=jobs.folder,
        stdout=jobs.folder / "control.out",
        stderr=subprocess.STDOUT,
    )


def test_launchers_of_several_nodes_on_one_machine(job: Job, port: int) -> None:
    """Two slurmd on this machine: two launchers at one address, when that is said to be meant."""
    folder = job.folder / "slurm"
    environment = job.environment(
        {
            "SLURM_PORT": str(20000 + os.getpid() % 2000 * 5),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.environ["PATH"] + SBIN,
        }
    )

    def call(*argv: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            env={**environment, **more},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=job.folder,
        )

    shared = job.folder / "shared"
    shared.mkdir()
    try:
        assert call(str(SCRIPT), "start", str(folder), "2").returncode == 0
        command = (
            *("srun", "-N2", "--ntasks-per-node=1", sys.executable, "-m", LAUNCHER),
            *("--nnodes", "2", "--nproc-per-node", "2", "--ft-prewarm", "off"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", str(COUNTING_RANK), str(shared), *TRAINING),
        )
        refused = call(*command)
        assert refused.returncode == 1
        assert "NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE=1" in refused.stderr + refused.stdout
        ran = call(*command, NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE="1")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert counted(STEPS) in (shared / "result.json").read_text()
    finally:
        call(str(SCRIPT), "stop", str(folder))
