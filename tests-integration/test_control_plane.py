# SPDX-License-Identifier: Apache-2.0
"""Scenarios of `nvrx-control` on a host of its own: what it runs for the whole job, and its end.

Log servers, files about cycles and the command for bad nodes are its, and survive it: it is
killed, or asked to leave, and another one takes the job up. No step and no line is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from attribution_service import attribution_service
from many_nodes import DDP_RANK, PORT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hosts import Host, HostProcess
    from many_nodes import NodesJob

pytestmark = pytest.mark.netns

CONTROL = "nvidia_resiliency_ext.fault_tolerance.control_plane"
STEP_MS = "20"
QUICK = ("--ft-prewarm", "off", "--ft-lease", "1")


class ControlledJob:
    """A job whose store, logs and files about cycles are on its first host."""

    def __init__(self, job: NodesJob, nnodes: str) -> None:
        self.job = job
        self.nnodes = nnodes
        self.logs = job.folder / "logs"
        self.info = job.folder / "info"
        self.reports = job.folder / "reports"
        self.planes: list[HostProcess] = []
        self.launcher_hosts = list(job.network)[1:]
        self.both = [
            *("--ft-per-cycle-applog-prefix", str(self.logs / "job.log")),
            *("--ft-enable-log-server", "true"),
            *("--ft-cycle-info-dir", str(self.info), "--ft-cycle-info-job-id", "j7"),
        ]

    def control(self, *flags: str) -> HostProcess:
        """Start a control plane."""
        host = self.job.network[0]
        words = [sys.executable, "-m", CONTROL, "--nnodes", self.nnodes, "--rdzv-id", self.job.id]
        words += ["--rdzv-endpoint", f"{host.name}:{PORT}", *self.both]
        words += ["--ft-bad-node-hook", f"sh -c 'cat >> {self.reports}; echo >> {self.reports}'"]
        self.planes.append(
            self.job.start_other(host, [*words, *flags], f"control-{len(self.planes)}")
        )
        return self.planes[-1]

    def start_training(self, steps: int) -> None:
        """Start launchers of a real training, one rank each, with standbys."""
        self.job.start(
            *("--steps", str(steps), "--step-ms", STEP_MS, "--save-every", "5"),
            hosts=self.launcher_hosts,
            nnodes=self.nnodes,
            flags=["--ft-lease", "1", *self.both],
            program=DDP_RANK,
        )

    def kill_control(self) -> None:
        """Kill the present control plane, and wait until ranks have done steps without it."""
        self.planes[-1].kill()
        self.planes[-1].wait(10)
        cycle = self.job.cycles()[-1]
        reached = max(entry["step"] for entry in self.job.entries("step", cycle))
        self.job.wait_for_step(cycle, reached + 3, ranks=2)

    @contextlib.contextmanager
    def ranks_stopped(self, cycle: int, count: int) -> Iterator[None]:
        """Let ranks do no step: a slow machine would have the job at its end before it is time."""
        for rank in range(count):
            self.job.signal_rank(cycle, rank, signal.SIGSTOP)
        yield
        for rank in range(count):
            self.job.signal_rank(cycle, rank, signal.SIGCONT)

    def start(
        self, *flags: str, steps: int, hosts: Sequence[Host] = (), nproc: int = 1, more: str = ""
    ) -> None:
        """Start launchers, on all hosts but the first; `more` is for the ranks."""
        self.job.start(
            *("--steps", str(steps), "--step-ms", STEP_MS, "--save-every", "5", "--client"),
            *("--talk", *more.split()),
            hosts=hosts or self.launcher_hosts,
            nnodes=self.nnodes,
            nproc=nproc,
            flags=[*QUICK, *self.both, *flags],
        )

    def log_of_control(self, number: int = -1) -> str:
        """Return what a control plane has printed."""
        number = range(len(self.planes))[number]
        return (self.job.folder / f"log-control-{number}").read_text()

    def wait_for_control(self, text: str) -> None:
        """Wait until the present control plane has said something."""
        self.job.wait_for(lambda: text in self.log_of_control(), f"control says {text!r}")

    def wait_until_back(self) -> None:
        """Wait until all launchers have found the present control plane."""
        times = len(self.planes) - 1
        running = [h for h in self.launcher_hosts if self.job.launchers[h.name].poll() is None]
        self.job.wait_for(
            lambda: all(self.job.log(h).count("the store is back") == times for h in running),
            "the store is back",
        )

    def cycle_log(self, cycle: int) -> Path:
        """Return where a cycle's log is."""
        return self.logs / f"job_cycle{cycle}.log"

    def cycle_info(self, cycle: int) -> dict[str, str]:
        """Return what the file about a cycle says."""
        said: dict[str, str] = json.loads((self.info / f"cycle_info.j7.0.{cycle}").read_text())
        return said

    def assert_lines(self, cycle: int, but: frozenset[int] = frozenset()) -> None:
        """Check that each step of a cycle has its one line, but for ranks killed on the way."""
        text = self.cycle_log(cycle).read_text()
        printed = re.findall(r"^ *(\d+): step (\d+)$", text, re.MULTILINE)
        found = sorted((int(rank), int(step)) for rank, step in printed if int(rank) not in but)
        done = self.job.entries("step", cycle)
        assert found == sorted((e["rank"], e["step"]) for e in done if e["rank"] not in but)

    def told(self) -> list[tuple[str, str]]:
        """Return of which nodes the command was told, and why."""
        text = self.reports.read_text() if self.reports.exists() else ""
        reports = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [(report["node"], report["reason"]) for report in reports]

    def assert_ended_well(self, steps: int, **codes: int) -> None:
        """Check exit codes, the result, and that never two groups worked."""
        expected = dict.fromkeys(self.job.launchers, 0) | codes
        assert self.job.wait() == expected, self.job.tails()
        assert self.planes[-1].wait(20) == 0, self.log_of_control()
        self.job.assert_counted(steps)
        self.job.assert_fenced()
        for host in self.launcher_hosts:
            assert "writes its logs itself" not in self.job.log(host)


@pytest.mark.slow
def test_logs_cycle_information_and_reports_come_from_the_control_plane(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """A launcher is lost and its spare works: one log a cycle, its file, and a report of the node.

    All of it is made on the host of the control plane, which has no launcher.
    """
    made = ControlledJob(nodes_job(3), "1:2")
    first, second = made.launcher_hosts
    made.control()
    made.start(steps=300, hosts=[first])
    made.job.wait_for_step(0, 3)
    with made.ranks_stopped(0, 1):
        made.start(steps=300, hosts=[second])
        made.job.wait_for(lambda: "as a spare" in made.job.log(second), "the spare")
    link = made.info / "cycle_info.j7.current"
    present = json.loads(made.job.wait_for(lambda: link.exists() and link.read_text(), "the file"))
    assert (present["cycle_number"], present["cycle_end_time"]) == (0, "")
    made.job.launchers[first.name].kill()
    made.assert_ended_well(300, **{first.name: -signal.SIGKILL})
    made.assert_lines(1)
    assert made.told() == [(first.name, "node_lost")]
    assert os.readlink(made.info / "cycle_info.j7.current") == "cycle_info.j7.0.1"
    for cycle, host in enumerate((first, second)):
        said = made.cycle_info(cycle)
        assert said["cycle_end_time"] >= said["cycle_start_time"] > ""
        assert (said["active_nodes"], said["active_ranks"]) == (host.name, "0")
        assert said["cycle_log_file"] == str(made.cycle_log(cycle))


@pytest.mark.slow
def test_the_store_host_stays_until_the_job_is_over(nodes_job: Callable[..., NodesJob]) -> None:
    """A launcher with the store that is left out has no ranks any more, and serves the others.

    They restart once more without it, their logs and files about cycles come from it, and it
    leaves, with 1, when they have.
    """
    made = ControlledJob(nodes_job(3), "2:3")
    host, *others = made.job.network
    made.start(steps=250, hosts=[host], more=f"--exclude {host.name}")
    made.job.wait_for(lambda: "needed: 2 nodes" in made.job.log(host), "the store")
    made.start(steps=250, hosts=others, more=f"--exclude {host.name}")
    made.job.wait_for(lambda: "stays because the job's store is here" in made.job.log(host), "it")
    made.job.wait_for_step(1, 3, ranks=2)
    made.job.signal_rank(1, 1)
    codes = made.job.wait()
    assert codes == {host.name: 1, **{other.name: 0 for other in others}}, made.job.tails()
    made.job.assert_counted(250)
    made.job.assert_fenced()
    assert made.job.cycles() == [0, 1, 2]
    for cycle in (1, 2):
        said = made.cycle_info(cycle)
        assert said["active_nodes"] == "node[2-3]"
        assert said["cycle_end_time"] >= said["cycle_start_time"] > ""
    made.assert_lines(2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "asked to leave"])
@pytest.mark.no_second_try
def test_a_control_plane_that_comes_back_goes_on_with_its_logs(
    nodes_job: Callable[..., NodesJob], how: str
) -> None:
    """Twice it goes while ranks print: no restart, each line once, one file about it."""
    made = ControlledJob(nodes_job(3), "2")
    plane = made.control()
    made.start(steps=600, nproc=2)
    made.job.wait_for_step(0, 5, ranks=4)
    for _ in range(2):
        if how == "killed":
            plane.kill()
        else:
            plane.terminate()
        code = plane.wait(10)
        assert code == (-signal.SIGKILL if how == "killed" else 143), made.log_of_control()
        assert made.cycle_info(0)["cycle_end_time"] == ""
        reached = max(entry["step"] for entry in made.job.entries("step"))
        made.job.wait_for_step(0, reached + 10, ranks=4)
        with made.ranks_stopped(0, 4):
            plane = made.control()
            made.wait_until_back()
    reached = max(entry["step"] for entry in made.job.entries("step"))
    made.job.wait_for_step(0, reached + 10, ranks=4)
    log = made.cycle_log(0)
    made.job.wait_for(lambda: log.exists() and f"step {reached}" in log.read_text(), "lines arrive")
    made.assert_ended_well(600)
    assert made.job.cycles() == [0]
    made.assert_lines(0)
    said = made.cycle_info(0)
    assert (said["active_nodes"], said["generation"]) == ("node[2-3]", "1")
    assert said["cycle_end_time"] > said["cycle_start_time"]


@pytest.mark.parametrize(
    "moment",
    [pytest.param("before anybody knows", marks=pytest.mark.slow), "while ranks wait"],
)
def test_a_drain_goes_on_with_another_control_plane(
    nodes_job: Callable[..., NodesJob], moment: str
) -> None:
    """A node must go, and the control plane dies: all ranks save at one step, the spare works.

    One restart, no step is done twice, and the node that went leaves with 0.
    """
    made = ControlledJob(nodes_job(4), "2:3")
    plane = made.control()
    # Nobody gives up while a loaded machine starts the other control plane.
    flags = ("--ft-preempt-signal", "SIGUSR2", "--ft-preempt-grace", "120", "--ft-lease", "30")
    made.start(*flags, steps=500)
    made.job.wait_for_step(0, 5, ranks=2)
    made.job.wait_for(
        lambda: any("as a spare" in made.job.log(h) for h in made.launcher_hosts), "a spare"
    )
    working = {entry["host"] for entry in made.job.entries("start", 0)}
    leaves, stays = (h for h in made.launcher_hosts if h.name in working)
    if moment == "before anybody knows":
        plane.send_signal(signal.SIGSTOP)
        made.job.launchers[leaves.name].send_signal(signal.SIGUSR2)
    else:
        made.job.launchers[stays.name].send_signal(signal.SIGSTOP)
        made.job.launchers[leaves.name].send_signal(signal.SIGUSR2)
        made.job.wait_for(lambda: "asked to save" in made.job.log(leaves), "it is known")
    plane.kill()
    plane.wait(10)
    made.control()
    made.wait_for_control("serves job")
    made.job.launchers[stays.name].send_signal(signal.SIGCONT)
    made.job.wait_for_step(1, ranks=2)
    assert made.job.launchers[leaves.name].wait(60) == 0, made.job.tails()
    made.assert_ended_well(500)
    assert made.job.cycles() == [0, 1]
    assert {entry["host"] for entry in made.job.entries("start", 1)} == {
        h.name for h in made.launcher_hosts if h is not leaves
    }
    steps = [(entry["rank"], entry["step"]) for entry in made.job.entries("step")]
    assert len(steps) == len(set(steps)) == 1000, "no step was done twice"
    for cycle in range(2):
        made.assert_lines(cycle)
        assert made.cycle_info(cycle)["cycle_end_time"] > ""


@pytest.mark.slow
def test_a_second_control_plane_and_a_wrong_token_do_no_harm(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """A second control plane at the endpoint leaves with 1 and one line, a launcher with another
    token too; the job and its logs know nothing of it.
    """
    made = ControlledJob(nodes_job(4), "2:3")
    for name, token in (("right", "a"), ("wrong", "b")):
        path = made.job.folder / name
        path.write_text(token * 40)
        path.chmod(0o600)
    right = ("--ft-rdzv-token-file", str(made.job.folder / "right"))
    first = made.control(*right)
    *workers, unsigned = made.launcher_hosts
    made.start(*right, steps=500, hosts=workers)
    made.job.wait_for_step(0, 3, ranks=2)
    wrong = ("--ft-rdzv-token-file", str(made.job.folder / "wrong"))
    with made.ranks_stopped(0, 2):
        made.start(*wrong, steps=500, hosts=[unsigned])
        second = made.control(*right)
        assert second.wait(60) == 1
        said = made.log_of_control()
        assert "Address already in use" in said
        assert said.count("\n") == 1, said
        assert made.job.launchers[unsigned.name].wait(60) == 1
        assert "the signature is wrong" in made.job.log(unsigned), made.job.tails()
    made.planes = [first]
    made.assert_ended_well(500, **{unsigned.name: 1})
    assert made.job.cycles() == [0]
    made.assert_lines(0)
    assert "token goes through" not in made.log_of_control()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.no_second_try
def test_a_real_training_ends_with_the_same_weights_over_control_planes(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """DDP over gloo: a control plane is killed while it trains, and comes back, and a rank is
    killed; another goes, and with it a launcher, and the spare works. No weight differs by a bit.
    """
    results = []
    for faults in (False, True):
        made = ControlledJob(nodes_job(4), "2:3")
        made.control()
        made.start_training(steps=200)
        made.job.wait_for_step(0, 5, ranks=2)
        if faults:
            made.kill_control()
            with made.ranks_stopped(0, 2):
                made.control()
                made.wait_until_back()
            made.job.signal_rank(0, 1)
            made.job.wait_for_step(1, ranks=2)
            # This time while there is no control plane.
            made.kill_control()
            host, _ = made.job.rank(1, 1)
            made.job.launchers[host.name].kill()
            made.control()
            made.job.wait_for_step(2, ranks=2)
        codes = made.job.wait(90)
        assert sorted(codes.values()) == ([-9, 0, 0] if faults else [0, 0, 0]), made.job.tails()
        assert made.job.cycles() == ([0, 1, 2] if faults else [0])
        assert made.planes[-1].wait(20) == 0, made.log_of_control()
        made.job.assert_fenced()
        results.append(made.job.result())
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["losses"] == results[1]["losses"]


@pytest.mark.slow
def test_a_node_that_attribution_names_makes_room_under_a_control_plane(
    nodes_job: Callable[..., NodesJob],
) -> None:
    """The service is asked by the control plane, which leaves out the node that it names."""
    made = ControlledJob(nodes_job(4), "2:3")
    job = made.job
    with attribution_service(str(job.folder / "analysis.sock")) as service:
        asks = ("--ft-attribution-endpoint", service.url)
        asks += ("--ft-attribution-node-action", "exclude")
        made.control(*asks)
        made.start(steps=500)
        job.wait_for_step(0, 5, ranks=2)
        job.wait_for(
            lambda: any("as a spare" in job.log(h) for h in made.launcher_hosts), "a spare"
        )
        named = job.rank(0, 1)[0]
        service.decides({"action": "RESTART", "reason": ""}, exclude_nodes=[named.name])
        job.signal_rank(0, 0)
        job.wait_for_step(1, ranks=2)
        made.wait_for_control("attribution names bad nodes")
        cycle = job.cycles()[-1]
        job.signal_rank(cycle, 0)
        job.wait_for_step(cycle + 1, ranks=2)
        started = {entry["host"] for entry in job.entries("start", cycle + 1)}
        assert named.name not in started, job.tails()
        made.assert_ended_well(500)
    assert (named.name, "attribution") in made.told()
    assert service.posts[0] == ("progressive", str(made.cycle_log(0)))
