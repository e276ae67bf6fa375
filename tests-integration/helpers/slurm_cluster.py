# SPDX-License-Identifier: Apache-2.0
"""A real Slurm whose nodes are hosts made of namespaces: one slurmd in each.

    with Network(3, keep=[folder]) as network, SlurmCluster(network, folder / "slurm") as slurm:
        slurm.run("srun", "-N3", "hostname")

The first host is the controller as well. The daemons are processes of the hosts, so they and their
jobs end with the network, whatever happens.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

    from hosts import Host, HostProcess, Network

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "slurm.sh"
SBIN = ":/usr/sbin:/sbin"
LIMIT_S = 60.0


def why_no_slurm() -> str | None:
    """Say why no cluster can be made here, or nothing when it can."""
    path = os.environ.get("PATH", os.defpath) + SBIN
    for name in ("slurmctld", "slurmd", "munged", "srun"):
        if shutil.which(name, path=path) is None:
            return f"no {name} here: tools/slurm.sh install"
    if os.geteuid():
        return "Slurm's daemons need root"
    return None


class SlurmCluster:
    """The daemons on the hosts, and commands for them."""

    def __init__(self, network: Network, folder: Path) -> None:
        """Start the daemons and wait until all nodes are idle."""
        self.network = network
        self.folder = folder
        folder.mkdir(parents=True)
        self.controller = network[0]
        self._call("config", self.controller.name, *(f"{h.name}={h.address}" for h in network))
        self._call("controller")
        for host in network:
            self.start_node(host)
        self._call("wait")

    def _call(self, command: str, *words: str, host: Host | None = None) -> None:
        """Run the script on a host, the controller by default."""
        argv = [str(SCRIPT), command, str(self.folder), *words]
        on = host or self.controller
        on.run(argv, env=self.environment(), cwd="/", timeout=LIMIT_S)

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of Slurm's commands; jobs inherit it."""
        kept = ("HOME", "LANG", "USER", "LD_LIBRARY_PATH")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment["PATH"] = os.environ.get("PATH", os.defpath) + SBIN
        return {**environment, "SLURM_CONF": str(self.folder / "slurm.conf"), **(more or {})}

    def start_node(self, host: Host) -> None:
        """Start the daemon of a node, also after the host has booted anew."""
        self._call("node", host.name, host=host)

    def set_down(self, host: Host) -> None:
        """Tell Slurm that a node is lost, as an operator does; it finds out by itself in 30 s."""
        self.run("scontrol", "update", f"nodename={host.name}", "state=down", "reason=lost")

    def run(
        self, *argv: str, env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands on the controller and return what it printed."""
        return self.controller.run(
            argv, env=self.environment(env), **{"cwd": self.folder, "timeout": LIMIT_S, **more}
        )

    def start(self, *argv: str, env: Mapping[str, str] | None = None, **more: Any) -> HostProcess:
        """Start one of Slurm's commands on the controller."""
        return self.controller.start(
            argv, env=self.environment(env), **{"cwd": self.folder, **more}
        )

    def submit(self, script: str, *flags: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a batch script, its text, and return the job's id."""
        path = self.folder / f"batch-{len(list(self.folder.glob('batch-*')))}.sh"
        path.write_text("#!/bin/sh\n" + script)
        shown = self.run(
            *("sbatch", "--parsable", "--output", f"{self.folder}/job-%j.log"),
            *(*flags, str(path)),
            env=env,
        )
        return shown.stdout.strip().split(";")[0]

    def states(self, job: str) -> list[str]:
        """Return the states of a job, one for each task of an array, or nothing once forgotten."""
        shown = self.run("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%T", check=False)
        return shown.stdout.split()

    def node_states(self) -> dict[str, str]:
        """Return the state of each node."""
        shown = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout
        return dict(line.split() for line in shown.splitlines())

    def logs(self) -> str:
        """Return the ends of the daemons' and jobs' logs, for messages."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in paths)

    def close(self) -> None:
        """End all jobs and the daemons."""
        self.run("scancel", "-u", "root", check=False)
        for host in self.network:
            if host.is_up:
                host.kill_all()
