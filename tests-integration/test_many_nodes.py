# SPDX-License-Identifier: Apache-2.0
"""Faults of a job on several hosts, one launcher on each; what counts is the job's result.

The hosts are network namespaces with clocks of their own. The ranks count instead of training,
except in the last scenario; every scenario ends with the result of an undisturbed run, with never
two groups of ranks at work at once, and with nothing left on any host.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
from fault_jobs import SCRIPTED_RANK
from many_nodes import DDP_RANK, PORT, RECORD

if TYPE_CHECKING:
    from collections.abc import Callable

    from hosts import Host, HostProcess
    from many_nodes import NodesJob

pytestmark = pytest.mark.netns

COLD = ("--ft-prewarm", "off")
QUICK = (*COLD, "--ft-lease", "1")
NEVER = 10**9
CONTROL = "nvidia_resiliency_ext.fault_tolerance.control_plane"


def start(
    job: NodesJob, nnodes: str, *flags: str, steps: int = NEVER, ranks: str = "", **more: object
) -> None:
    """Start launchers with two counting ranks each; `ranks` are words for these."""
    job.start(
        *("--steps", str(steps), "--step-ms", "40", *ranks.split()),
        **{"nnodes": nnodes, "nproc": 2, "flags": [*COLD, *flags], **more},
    )


def with_ranks(job: NodesJob, cycle: int = 0) -> list[Host]:
    """Return the hosts that have ranks in a cycle; the store host first, if it has."""
    names = {entry["host"] for entry in job.entries("start", cycle)}
    return [host for host in job.network if host.name in names]


def without_ranks(job: NodesJob, cycle: int = 0) -> list[Host]:
    """Return the hosts that only wait."""
    working = {host.name for host in with_ranks(job, cycle)}
    return [host for host in job.network if host.name not in working]


def victim_of(job: NodesJob) -> Host:
    """Return a host with ranks that does not hold the store."""
    return next(host for host in with_ranks(job) if host is not job.network[0])


def assert_ended_well(job: NodesJob, *, steps: int | None = None, **codes: int) -> None:
    """Check exit codes (0 where none is given), the result, and that never two groups worked.

    Ranks that are to do no certain number of steps are let end: so a fault comes while they work.
    """
    if steps is None:
        job.let_end()
    expected = dict.fromkeys(job.launchers, 0) | codes
    assert job.wait() == expected, job.tails()
    job.assert_counted(steps)
    job.assert_fenced()


def test_a_killed_rank_restarts_all_hosts_once(nodes_job: Callable[..., NodesJob]) -> None:
    """SIGKILL of one rank of three hosts: one restart for the whole job, its cause told on each."""
    job = nodes_job(3)
    # Or those that miss it would end by themselves, and their launchers tell of them.
    start(job, "3", ranks="--patient")
    job.wait_for_step(0, 3, ranks=6)
    victim = job.signal_rank(0, 3)
    assert_ended_well(job)
    assert job.cycles() == [0, 1]
    for host in job.network:
        assert f"rank 3 on host {victim.name} died by SIGKILL" in job.log(host), job.tails()


def test_ranks_of_two_hosts_dying_at_once_cost_one_restart(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """All ranks of two hosts die: two launchers open a round at the same moment, and it is one."""
    job = nodes_job(3)
    start(job, "3")
    job.wait_for_step(0, 3, ranks=6)
    # Found first: a launcher ends the rank beside one that is dead within milliseconds.
    for host, pid in [job.rank(0, rank) for rank in range(2, 6)]:
        host.signal(pid, signal.SIGKILL)
    assert_ended_well(job)
    assert job.cycles() == [0, 1]


def test_a_hung_rank_is_found_on_its_host_and_told_on_all(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """SIGSTOP of a rank: its monitor finds it, all hosts restart, the record names the rank."""
    job = nodes_job(3)
    flags = ("--ft-rank-heartbeat-timeout", "1.5", "--ft-initial-rank-heartbeat-timeout", "20")
    job.start(
        *("--steps", str(NEVER), "--step-ms", "40", "--client"),
        nnodes="3",
        nproc=2,
        flags=[*COLD, *flags],
    )
    job.wait_for_step(0, 3, ranks=6)
    job.signal_rank(0, 4, signal.SIGSTOP)
    assert_ended_well(job)
    assert job.cycles() == [0, 1]
    faults = [event for event in job.events("fault") if event["cycle"] == 0]
    assert any(fault.get("rank") == 4 for fault in faults), faults


def test_a_killed_launcher_is_replaced_by_the_spare(nodes_job: Callable[..., NodesJob]) -> None:
    """SIGKILL of a launcher: its ranks end with it, and the spare takes their place."""
    job = nodes_job(3)
    start(job, "2:3", "--ft-lease", "1")
    job.wait_for_step(0, 3, ranks=4)
    victim, spare = victim_of(job), without_ranks(job)[0]
    job.launchers[victim.name].kill()
    job.wait_for_step(1, ranks=4)
    assert spare in with_ranks(job, 1)
    assert_ended_well(job, **{victim.name: -signal.SIGKILL})


def scripted(job: NodesJob, nnodes: str, *words: str) -> None:
    """Start launchers of one scripted rank each; ranks follow the hosts' numbers."""
    for rank, host in enumerate(job.network):
        job.start(
            *words,
            hosts=[host],
            nnodes=nnodes,
            flags=[*QUICK, "--node-rank", str(rank)],
            program=SCRIPTED_RANK,
        )


def test_a_rank_excludes_its_host(nodes_job: Callable[..., NodesJob]) -> None:
    """After ExcludeThisNode the spare works in the host's place; the host leaves with 1."""
    job = nodes_job(3)
    scripted(job, "2:3", "--last-cycle", "1", "--client", "0:1:ask=ExcludeThisNode")
    codes = job.wait()
    assert sorted(codes.values()) == [0, 0, 1], job.tails()
    (excluded,) = (host for host in job.network if codes[host.name])
    assert "asked to exclude this node" in job.log(excluded), job.tails()
    # In cycle 0 the other rank may be ended before it has written anything.
    began = sorted(path.name for path in job.shared.glob("progress_*"))
    assert began[-3:] == ["progress_0_1", "progress_1_0", "progress_1_1"]


@pytest.mark.slow
def test_a_rank_shuts_the_workload_down_on_all_hosts(nodes_job: Callable[..., NodesJob]) -> None:
    """After ShutdownWorkload no launcher restarts, and each says who asked for it."""
    job = nodes_job(3)
    scripted(job, "3", "--last-cycle", "1", "--client", "0:2:ask=ShutdownWorkload")
    assert set(job.wait().values()) == {1}, job.tails()
    assert not list(job.shared.glob("progress_1_*"))
    for host in job.network:
        assert "asked to shut the workload down" in job.log(host), job.tails()


@pytest.mark.slow
def test_cycles_without_progress_end_all_hosts_with_93(nodes_job: Callable[..., NodesJob]) -> None:
    """When cycles bring the iteration no further all launchers leave with 93, the spare too."""
    job = nodes_job(3)
    iteration = job.folder / "iteration"
    iteration.write_text("7")
    flags = ("--ft-max-no-progress-cycles", "2", "--ft-checkpoint-iteration-file", str(iteration))
    start(job, "2:3", "--ft-lease", "1", *flags, steps=2000)
    job.wait_for_step(0, 3, ranks=4)
    job.wait_for(lambda: any("as a spare" in job.log(h) for h in job.network), "a spare")
    for cycle in (0, 1):
        job.wait_for_step(cycle, ranks=4)
        job.signal_rank(cycle, 1)
    assert set(job.wait().values()) == {93}, job.tails()


@pytest.mark.no_second_try
def test_a_host_that_is_cut_off_stops_before_the_spare_starts(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """A silent link: the lease expires, the spare trains, the cut host does nothing any more."""
    job = nodes_job(3)
    start(job, "2:3", "--ft-lease", "1")
    job.wait_for_step(0, 3, ranks=4)
    victim = victim_of(job)
    cut_at = time.time()
    victim.cut(silently=True)
    job.wait_for_step(1, ranks=4)
    assert job.workers_started(1) - cut_at < 15
    assert_ended_well(job, **{victim.name: 1})
    assert "stops before the others replace it" in job.log(victim)


@pytest.mark.slow
@pytest.mark.no_second_try
def test_a_launcher_that_is_stopped_does_not_train_beside_the_others(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """SIGSTOP of a launcher: its monitor kills its ranks in time; continued, it leaves with 1."""
    job = nodes_job(3)
    start(job, "2:3", "--ft-lease", "1")
    job.wait_for_step(0, 3, ranks=4)
    victim = victim_of(job)
    job.launchers[victim.name].send_signal(signal.SIGSTOP)
    job.wait_for_step(1, ranks=4)
    job.launchers[victim.name].send_signal(signal.SIGCONT)
    assert_ended_well(job, **{victim.name: 1})
    assert job.cycles() == [0, 1]


def test_a_link_that_flaps_within_the_lease_costs_nothing(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """Short interruptions, delay and loss: no restart, the same result."""
    job = nodes_job(3)
    start(job, "3", "--ft-lease", "3")
    job.wait_for_step(0, 3, ranks=6)
    victim = victim_of(job)
    for _ in range(3):
        victim.cut(silently=True)
        time.sleep(0.5)  # the length of the fault itself
        victim.mend()
        job.wait_for_step(0, max(e["step"] for e in job.entries("step")) + 1, ranks=6)
    victim.delay(20, 0.02)
    assert_ended_well(job)
    assert job.cycles() == [0]


def test_without_the_store_host_the_others_leave(nodes_job: Callable[..., NodesJob]) -> None:
    """The launcher with the store is killed: the others stop within 30 s and say why."""
    job = nodes_job(3)
    start(job, "3", steps=2000)
    job.wait_for_step(0, 3, ranks=6)
    job.launchers[job.network[0].name].kill()
    killed_at = time.monotonic()
    codes = job.wait()
    assert time.monotonic() - killed_at < 30
    assert [codes[host.name] for host in job.network] == [-signal.SIGKILL, 1, 1]
    assert "the rendezvous host of the job is gone or does not answer" in job.log(job.network[1])


def test_a_spare_that_comes_late_is_used(nodes_job: Callable[..., NodesJob]) -> None:
    """A launcher that is started in the middle of a round waits, and works when it is needed."""
    job = nodes_job(3)
    start(job, "2:3", "--ft-lease", "1", hosts=list(job.network)[:2])
    job.wait_for_step(0, 3, ranks=4)
    late = job.network[2]
    start(job, "2:3", "--ft-lease", "1", hosts=[late])
    job.wait_for(lambda: "waits as a spare" in job.log(late), "the spare is there")
    job.launchers[job.network[1].name].kill()
    job.wait_for_step(1, ranks=4)
    assert late in with_ranks(job, 1)
    assert_ended_well(job, **{job.network[1].name: -signal.SIGKILL})


def test_a_drained_host_is_replaced_at_once(nodes_job: Callable[..., NodesJob]) -> None:
    """SIGTERM to one launcher: its ranks get the signal, the spare takes over without a lease."""
    job = nodes_job(3)
    start(job, "2:3", ranks="--patient")
    job.wait_for_step(0, 3, ranks=4)
    (spare,) = without_ranks(job)
    job.wait_for(lambda: "waits as a spare" in job.log(spare), "the spare is there")
    victim = victim_of(job)
    job.launchers[victim.name].terminate()
    job.wait_for_step(1, ranks=4)
    assert_ended_well(job, **{victim.name: 1})
    assert job.cycles() == [0, 1]
    peers = [host for host in job.network[:3] if host is not victim]
    assert all("was ended by SIGTERM" in job.log(host) for host in peers), job.tails()


@pytest.mark.slow
def test_min_healthy_goes_on_with_the_nodes_that_are_left(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """Policy min-healthy, 2 of 3: all three work; with one broken for good the others end well."""
    job = nodes_job(3)
    flags = ("--ft-restart-policy", "min-healthy", "--rdzv-conf", "last_call_timeout=2")
    start(job, "2:3", *flags, "--ft-lease", "1")
    job.wait_for_step(0, 3, ranks=6)
    victim = victim_of(job)
    job.launchers[victim.name].kill()
    job.wait_for_step(1, ranks=4)
    assert len(with_ranks(job, 1)) == 2
    assert_ended_well(job, **{victim.name: -signal.SIGKILL})


def test_launchers_with_other_settings_are_told_apart(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """Different flags on two hosts: both say which, with both values, and nothing is started."""
    job = nodes_job(2)
    start(job, "2", hosts=[job.network[0]])
    start(job, "2:3", "--ft-lease", "7", hosts=[job.network[1]], max_restarts=7)
    assert set(job.wait().values()) == {1}
    for host in job.network:
        for flag, value in (("--max-restarts", 7), ("--nnodes", "2:3"), ("--ft-lease", "7.0")):
            assert f"{flag} is " in job.log(host), job.tails()
            assert f" {value} on node2" in job.log(host), job.tails()
    assert not (job.shared / RECORD).exists()


@pytest.mark.slow
def test_two_launchers_at_one_address_end_the_job(nodes_job: Callable[..., NodesJob]) -> None:
    """Two launchers that claim the same address: one clear line, no training."""
    job = nodes_job(2)
    start(job, "2", "--local-addr", "10.1.1.1")
    assert set(job.wait().values()) == {1}
    for host in job.network:
        assert "10.1.1.1" in job.log(host), job.tails()
    assert not (job.shared / RECORD).exists()


@pytest.mark.slow
def test_an_endpoint_that_resolves_nowhere_is_one_line(nodes_job: Callable[..., NodesJob]) -> None:
    """A wrong name: an error that names the endpoint, and nothing left."""
    job = nodes_job(2)
    start(job, "2", endpoint=f"nowhere.invalid:{PORT}")
    assert set(job.wait().values()) == {1}
    for host in job.network:
        assert "nowhere.invalid" in job.log(host), job.tails()
        assert "Traceback" not in job.log(host), job.tails()


@pytest.mark.slow
@pytest.mark.parametrize("truth", ["its own", "loopback", "nobody's"])
def test_an_endpoint_that_is_the_wrong_machine_is_told(
    nodes_job: Callable[..., NodesJob], truth: str
) -> None:
    """A host that takes the endpoint's name for another machine says which; all end in time."""
    job = nodes_job(2)
    first, second = job.network
    wrong = {"its own": second.address, "loopback": "127.0.1.1", "nobody's": "10.1.1.99"}[truth]
    liar = first if truth == "loopback" else second
    liar.set_names({first.name: wrong})
    start(job, "2", "--rdzv-conf", "join_timeout=6,store_connect_wait_seconds=6")
    assert set(job.wait().values()) == {1}, job.tails()
    assert wrong in job.log(liar), job.tails()
    assert ("cannot reach it" in job.log(first)) == (truth == "loopback"), job.tails()
    assert not (job.shared / RECORD).exists()


@pytest.mark.slow
def test_a_wrong_token_is_refused(nodes_job: Callable[..., NodesJob]) -> None:
    """A launcher with another token does not get in, and the job of the others is not harmed."""
    job = nodes_job(3)
    for name, token in (("right", "a"), ("wrong", "b")):
        path = job.folder / name
        path.write_text(token * 40)
        path.chmod(0o600)
    right = ("--ft-rdzv-token-file", str(job.folder / "right"))
    wrong = ("--ft-rdzv-token-file", str(job.folder / "wrong"))
    start(job, "2:3", *right, hosts=list(job.network)[:2])
    job.wait_for_step(0, 3, ranks=4)
    start(job, "2:3", *wrong, hosts=[job.network[2]])
    assert job.launchers[job.network[2].name].wait(60) == 1
    assert "the signature is wrong" in job.log(job.network[2]), job.tails()
    assert_ended_well(job, **{job.network[2].name: 1})


def control(job: NodesJob, name: str, nnodes: str = "2") -> HostProcess:
    """Start the control plane on the first host."""
    host = job.network[0]
    command = [sys.executable, "-m", CONTROL, "--nnodes", nnodes, "--rdzv-id", job.id]
    return job.start_other(host, [*command, "--rdzv-endpoint", f"{host.name}:{PORT}"], name)


def test_training_goes_on_while_the_control_plane_is_away(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """The control plane is killed and comes back after two leases: no restart, faults heal."""
    job = nodes_job(3)
    plane = control(job, "control")
    start(job, "2", "--ft-lease", "1", hosts=list(job.network)[1:])
    job.wait_for_step(0, 3, ranks=4)
    plane.kill()
    plane.wait(10)
    reached = max(entry["step"] for entry in job.entries("step"))
    job.wait_for_step(0, reached + 10, ranks=4)
    again = control(job, "control-again")
    hosts = list(job.network)[1:]
    job.wait_for(lambda: all("the store is back" in job.log(h) for h in hosts), "it is back")
    job.signal_rank(0, 1)
    job.wait_for_step(1, ranks=4)
    assert_ended_well(job)
    assert job.cycles() == [0, 1]
    assert again.wait(10) == 0


@pytest.mark.slow
def test_the_only_working_host_is_replaced_within_20_s(nodes_job: Callable[..., NodesJob]) -> None:
    """Nodes 1:2 at the default lease: within 20 s the spare starts its workers, and trains."""
    job = nodes_job(3)
    control(job, "control", nnodes="1:2")
    start(job, "1:2", hosts=list(job.network)[1:], steps=300)
    job.wait_for_step(0, 3, ranks=2)
    (working,) = with_ranks(job)
    (spare,) = (host for host in list(job.network)[1:] if host is not working)
    job.wait_for(lambda: "as a spare" in job.log(spare), "the spare is there")
    killed_at = time.time()
    job.launchers[working.name].kill()
    job.wait_for_step(1, ranks=2)
    assert job.workers_started(1) - killed_at < 20
    assert with_ranks(job, 1) == [spare]
    assert_ended_well(job, steps=300, **{working.name: -signal.SIGKILL})


@pytest.mark.slow
def test_a_fault_while_the_control_plane_is_away_heals_when_it_is_back(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """A rank dies without a control plane: its launchers wait for it, then restart."""
    job = nodes_job(3)
    plane = control(job, "control")
    start(job, "2", hosts=list(job.network)[1:])
    job.wait_for_step(0, 3, ranks=4)
    plane.kill()
    plane.wait(10)
    job.signal_rank(0, 1)
    hosts = list(job.network)[1:]
    job.wait_for(lambda: all("restarting because" in job.log(h) for h in hosts), "ranks stopped")
    again = control(job, "control-again")
    assert_ended_well(job)
    assert job.cycles() == [0, 1]
    assert again.wait(10) == 0


@pytest.mark.slow
def test_no_restart_left_ends_all_hosts_with_the_cause(nodes_job: Callable[..., NodesJob]) -> None:
    """A fault without budget: every launcher leaves with 1 and names the rank that died."""
    job = nodes_job(3)
    start(job, "2:3", max_restarts=0, steps=2000)
    job.wait_for_step(0, 3, ranks=4)
    job.signal_rank(0, 1)
    assert set(job.wait().values()) == {1}
    for host in job.network:
        assert "rank 1 on host" in job.log(host), job.tails()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.no_second_try
def test_a_real_training_on_three_hosts_ends_with_the_weights_of_an_undisturbed_run(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """DDP over gloo with standbys: a killed rank and a killed launcher change no weight."""
    results = []
    for faults in (False, True):
        job = nodes_job(3)
        job.start(
            *("--steps", "200", "--step-ms", "20", "--save-every", "5"),
            nnodes="2:3",
            flags=["--ft-lease", "1"],
            program=DDP_RANK,
        )
        if faults:
            job.wait_for_step(0, 10, ranks=2)
            job.signal_rank(0, 1)
            job.wait_for_step(1, 20, ranks=2)
            victims = [host for host in with_ranks(job, 1) if host is not job.network[0]]
            job.launchers[victims[0].name].kill()
        codes = job.wait(90)
        assert sorted(codes.values()) == ([-9, 0, 0] if faults else [0, 0, 0]), job.tails()
        job.assert_fenced()
        results.append(json.loads((job.shared / "result.json").read_text()))
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
