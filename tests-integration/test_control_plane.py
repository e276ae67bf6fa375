# SPDX-License-Identifier: Apache-2.0
"""Scenarios of `nvrx-control` on a host of its own: what it runs for the whole job, and its end.

Log servers, files about cycles and the command for bad nodes are its, and survive it: it is
killed, or asked to leave, and another one takes the job up. No step and no line is lost.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from many_nodes import PORT

if TYPE_CHECKING:
    from collections.abc import Callable
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

    def start(self, *flags: str, steps: int, hosts: list[Host] | None = None, nproc: int = 1) -> None:
        """Start launchers, on all hosts but the first."""
        self.job.start(
            *("--steps", str(steps), "--step-ms", STEP_MS, "--save-every", "5", "--client"),
            "--talk",
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
        """Check that each step of a cycle's ranks has its one line, but for those killed with
        their launcher."""
        printed = re.findall(r"^ *(\d+): step (\d+)$", self.cycle_log(cycle).read_text(), re.M)
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
    made.start(steps=300, hosts=[second])
    made.job.wait_for(lambda: "as a spare" in made.job.log(second), "the spare")
    present = json.loads((made.info / "cycle_info.j7.current").read_text())
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
