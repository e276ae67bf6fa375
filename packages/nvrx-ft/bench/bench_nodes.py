# SPDX-License-Identifier: Apache-2.0
"""Measures recovery on four hosts made of namespaces: from the fault until all ranks train again.

    python bench_nodes.py [--python PY] [--case rank-ddp] [--repeats 5]

All faults of a case are made in one job, one after the other. The interpreter needs nothing but
nvrx-ft and torch; the hosts and what runs on them come from `tests-integration/`. It needs network
namespaces: root, or a user who may make them.

    rank-ddp         SIGKILL of a rank of a DDP job with standbys (gloo, one rank on each host)
    rank-light       the same without standbys, of ranks that need 50 ms to start
    host             a worker's link falls silent: three work, the fourth is a spare
    host-lease-1     the same with `--ft-lease 1`
    launcher         SIGKILL of a worker's launcher, three and a spare
    launcher-lease-1 the same with `--ft-lease 1`
    control          SIGKILL of nvrx-control, started again at once: all launchers have found it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests-integration" / "helpers"))

from chaos import Watch
from fault_jobs import wait_until
from hosts import Host, Network, why_not
from many_nodes import COUNTING_RANK, DDP_RANK, PORT, NodesJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    _OnHost: TypeAlias = Callable[[Host], None]

HOSTS = 4
NEVER = "1000000000"
LIMIT_S = 90.0
CONTROL = "nvidia_resiliency_ext.fault_tolerance.control_plane"
COLD = ("--ft-prewarm", "off")


class Bench:
    """One job, its launchers, and the times of its faults."""

    def __init__(self, network: Network, folder: Path, *, spares: int = 0) -> None:
        """Prepare a job with one rank on each of its working hosts."""
        self.network = network
        self.job = NodesJob(network, folder)
        self.hosts = list(network)[-HOSTS:]
        self.world = HOSTS - spares
        self.watch = Watch(self.job, self.world)
        self._nnodes = f"{self.world}:{HOSTS}" if spares else str(HOSTS)

    def start(self, hosts: list[Host], *flags: str, program: Path = COUNTING_RANK) -> None:
        """Start launchers."""
        self.job.start(
            *("--steps", NEVER, "--step-ms", "20"),
            hosts=hosts,
            nnodes=self._nnodes,
            max_restarts=1000,
            flags=flags,
            program=program,
        )

    def wait(self, condition: Callable[[], object], what: str) -> float:
        """Wait for a condition, reading the ranks' record meanwhile."""

        def looked() -> object:
            self.watch.update()
            return condition()

        value = wait_until(looked, lambda: f"{what}\n{self.job.tails()}", LIMIT_S)
        return float(value) if isinstance(value, (int, float)) else 0.0

    def trains(self, since: float, cycle: int) -> float:
        """Wait until all ranks train, and return when the last one had done its first step."""
        return self.wait(lambda: self.watch.trains_since(since, cycle), "training")

    def settle(self) -> int:
        """Wait until all have trained for a while; return the cycle."""
        self.trains(time.monotonic() + 1.0, 0)
        return self.watch.cycle

    def rank_killed(self) -> float:
        """Kill a rank of a host without the store."""
        cycle = self.settle()
        host, pid = self.watch.starts[cycle][self.world - 1]
        began = time.monotonic()
        next(one for one in self.hosts if one.name == host).signal(pid, signal.SIGKILL)
        return self.trains(began, cycle + 1) - began

    def lost(self, fault: _OnHost, mend: _OnHost, *flags: str) -> float:
        """Lose a worker's host and wait for the spare to train; then start it anew as a spare."""
        cycle = self.settle()
        names = {name for name, _ in self.watch.starts[cycle].values()}
        victim = next(host for host in self.hosts[1:] if host.name in names)
        began = time.monotonic()
        fault(victim)
        took = self.trains(began, cycle + 1) - began
        mend(victim)
        launcher = self.job.launchers[victim.name]
        self.wait(lambda: launcher.poll() is not None, "the lost launcher has left")
        mark = len(self.job.log(victim))
        self.start([victim], *flags)
        self.wait(lambda: "waits as a spare" in self.job.log(victim)[mark:], "a spare")
        return took

    def have_found_it(self, marks: dict[Host, int]) -> bool:
        """Say whether all launchers have found the new store since their logs were so long."""
        return all("the store is back" in self.job.log(one)[mark:] for one, mark in marks.items())

    def standbys_ready(self) -> bool:
        """Say whether the standby of every host is ready."""
        files = self.job.events_folder.glob("events-*.jsonl")
        standbys = [[e for e in _events(path) if e["kind"] == "standby"] for path in files]
        ready = [events[-1]["state"] == "ready" for events in standbys if events]
        return len(ready) == HOSTS and all(ready)


def _events(path: Path) -> list[dict[str, str]]:
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rank_ddp(bench: Bench) -> Iterator[float]:
    """Kill ranks of a DDP job with standbys."""
    bench.start(bench.hosts, program=DDP_RANK)
    while True:
        bench.settle()
        bench.wait(bench.standbys_ready, "standbys")
        yield bench.rank_killed()


def rank_light(bench: Bench) -> Iterator[float]:
    """Kill ranks that start fast."""
    bench.start(bench.hosts, *COLD)
    while True:
        yield bench.rank_killed()


def host(bench: Bench, *flags: str) -> Iterator[float]:
    """Cut hosts off."""
    bench.start(bench.hosts, *COLD, *flags)
    while True:
        yield bench.lost(lambda one: one.cut(silently=True), Host.mend, *COLD, *flags)


def launcher(bench: Bench, *flags: str) -> Iterator[float]:
    """Kill launchers."""
    bench.start(bench.hosts, *COLD, *flags)
    while True:
        kill = lambda one: bench.job.launchers[one.name].kill()  # noqa: E731
        yield bench.lost(kill, lambda _: None, *COLD, *flags)


def control(bench: Bench) -> Iterator[float]:
    """Kill the control plane, which has a host of its own."""
    at = bench.network[0]
    command = [sys.executable, "-m", CONTROL, "--nnodes", str(HOSTS), "--rdzv-id", bench.job.id]
    command += ["--rdzv-endpoint", f"{at.name}:{PORT}"]
    plane = bench.job.start_other(at, command, "control")
    bench.start(bench.hosts, *COLD)
    while True:
        bench.settle()
        marks = {one: len(bench.job.log(one)) for one in bench.hosts}
        began = time.monotonic()
        plane.kill()
        plane.wait(10)
        plane = bench.job.start_other(at, command, "control")
        bench.wait(lambda marks=marks: bench.have_found_it(marks), "all have found it")
        yield time.monotonic() - began


CASES: dict[str, tuple[Callable[[Bench], Iterator[float]], int, int]] = {
    # what is done, hosts, spares
    "rank-ddp": (rank_ddp, HOSTS, 0),
    "rank-light": (rank_light, HOSTS, 0),
    "host": (host, HOSTS, 1),
    "host-lease-1": (lambda bench: host(bench, "--ft-lease", "1"), HOSTS, 1),
    "launcher": (launcher, HOSTS, 1),
    "launcher-lease-1": (lambda bench: launcher(bench, "--ft-lease", "1"), HOSTS, 1),
    "control": (control, HOSTS + 1, 0),
}


def measure(case: str, repeats: int) -> None:
    """Measure one case and print its line."""
    faults, hosts, spares = CASES[case]
    load_before = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="nvrx-bench-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        network = stack.enter_context(Network(hosts, keep=[folder], clocks_apart=True))
        found = faults(Bench(network, folder, spares=spares))
        values = [next(found) for _ in range(repeats)]
    line = {
        "figure": f"nodes: {case}",
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "unit": "s",
        "repeats": repeats,
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--python", type=Path, help="the interpreter that has nvrx-ft")
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.python is not None and options.python.absolute() != Path(sys.executable):
        words = [word for word in sys.argv if word != "--python" and word != str(options.python)]
        os.execv(options.python, [str(options.python), *words])  # noqa: S606
    if reason := why_not():
        raise SystemExit(reason)
    for case in options.case or CASES:
        measure(case, options.repeats)


if __name__ == "__main__":
    main()
