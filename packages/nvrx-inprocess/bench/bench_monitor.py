# SPDX-License-Identifier: Apache-2.0
"""What the monitor of a node costs: pings, idle CPU, memory, descriptors, threads; how quick it is.

Each figure is a JSON line. Ranks are processes without torch, so that only the monitor is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests-support"))

from fork_server import ForkServer
from monitor_lab import Lab

from nvidia_resiliency_ext.inprocess._monitor.page import ProgressPage
from nvidia_resiliency_ext.inprocess._protocol.iteration_store import IterationStore
from nvidia_resiliency_ext.shared_utils import procfs

_PINGS = 200_000
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_CASES = {
    "defaults": {},
    "10 ms": {
        "interval_s": 0.01,
        "heartbeat_interval_s": 0.01,
        "heartbeat_timeout_s": 5.0,
    },
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long idle CPU is counted")
    options = parser.parse_args()
    show("ping", "stamp_manual", ns=ping_ns(options.repeats))

    from torch.distributed import TCPStore

    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.closing(ForkServer(["monitor_modules"])) as server:
        for ranks in (1, 8):
            for name, settings in _CASES.items():
                figures = cost(server, host.port, ranks, settings, options)
                show("monitor", f"{ranks} ranks, {name}", **figures)
        delays = [death_s(server, host.port) * 1e3 for _ in range(options.repeats)]
    show("death", "SIGKILL to report in the store", ms=statistics.median(delays), max=max(delays))


def show(bench: str, case: str, **figures: float) -> None:
    """Print one line."""
    rounded = {name: round(value, 3) for name, value in figures.items()}
    load = round(os.getloadavg()[0], 1)
    print(json.dumps({"bench": bench, "case": case, **rounded, "load": load}), flush=True)


def ping_ns(repeats: int) -> float:
    """Return the median time of a ping, its call included, less that of an empty loop."""
    page = ProgressPage.create()
    found = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        for _ in range(_PINGS):
            page.stamp_manual()
        middle = time.perf_counter_ns()
        for _ in range(_PINGS):
            pass
        ended = time.perf_counter_ns()
        found.append((2 * middle - began - ended) / _PINGS)
    page.close()
    return statistics.median(found)


def cost(
    server: ForkServer,
    port: int,
    ranks: int,
    settings: dict[str, float],
    options: argparse.Namespace,
) -> dict[str, float]:
    """Return what a monitor of so many ranks holds and uses while nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(server, port, ranks, Path(folder), **{**settings, "log_file": ""})
        try:
            began = time.monotonic()
            lab.start(*range(ranks))
            [pid, *_] = lab.attach(*range(ranks))
            attach_s = time.monotonic() - began
            lab.begin(0)
            wait_for_leases(lab, 2)
            before_s = cpu_s(pid)
            threading.Event().wait(options.idle_s)
            idle_s = cpu_s(pid) - before_s
            memory = procfs.memory(pid)
            assert memory is not None
            return {
                "start_and_attach_s": attach_s,
                "idle_cpu_percent": 100 * idle_s / options.idle_s,
                "idle_cpu_percent_per_rank": 100 * idle_s / options.idle_s / ranks,
                "private_mb": (memory.uss or 0) / 1e6,
                "private_mb_per_rank": (memory.uss or 0) / 1e6 / ranks,
                "pss_mb": (memory.pss or 0) / 1e6,
                "fds_per_rank": len(os.listdir(f"/proc/{pid}/fd")) / ranks,
                "threads_per_rank": len(os.listdir(f"/proc/{pid}/task")) / ranks,
            }
        finally:
            lab.close()


def death_s(server: ForkServer, port: int) -> float:
    """Return the time from SIGKILL of a rank to the outcome in the store."""
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(server, port, 2, Path(folder), log_file="")
        try:
            lab.up()
            iteration_store = wait_for_leases(lab, 1)
            waiting = threading.Event()
            seen: list[float] = []

            def wait() -> None:
                waiting.set()
                assert iteration_store.outcome(0, 30.0) is not None
                seen.append(time.monotonic())

            thread = threading.Thread(target=wait)
            thread.start()
            waiting.wait()
            killed = time.monotonic()
            lab.ranks[1].kill()
            thread.join()
            return seen[0] - killed
        finally:
            lab.close()


def wait_for_leases(lab: Lab, count: int) -> IterationStore:
    """Wait until the monitor has renewed its lease so often; return the call's iteration store."""
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=30)
    iteration_store = IterationStore(
        TCPStore("127.0.0.1", lab.port, is_master=False, timeout=timeout), lab.prefix
    )
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        nodes = iteration_store.nodes()
        if nodes and iteration_store.leases([nodes[0].node_id])[nodes[0].node_id] > count:
            return iteration_store
        threading.Event().wait(0.05)
    raise TimeoutError("the monitor does not reach the store")


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


if __name__ == "__main__":
    main()
