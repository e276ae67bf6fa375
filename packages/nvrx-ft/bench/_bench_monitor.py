# SPDX-License-Identifier: Apache-2.0
"""The node of the monitor's benchmark: eight ranks that beat, and the monitors that watch them.

It runs under the interpreter that is measured and prints one JSON object. Ours is one process for
all ranks; an install without it gets one public `RankMonitorServer` per rank.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorServer

RANKS = 8
BEAT_S = 0.001
WATCHED_S = 4.0
MIB = 2**20
HANDLES: list[Any] = []
"""Kept because dropping one ends its monitor."""
RANK_PROGRAM = f"""
import time
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
print("joined", flush=True)
while True:
    client.send_heartbeat()
    time.sleep({BEAT_S})
"""


def pss_mib(pid: int) -> float:
    """Return the PSS of a process in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / MIB


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_monitors(cfg: FaultToleranceConfig, paths: list[str], directory: str) -> list[Any]:
    """Start what watches the ranks; return objects with a process id."""
    try:
        from nvidia_resiliency_ext.fault_tolerance._monitor.handle import MonitorHandle
    except ImportError:
        method: Any = multiprocessing.get_context("fork")
        return [RankMonitorServer.run_in_subprocess(cfg, path, mp_ctx=method) for path in paths]
    os.chmod(directory, 0o700)
    # A run id of its own: its sweep at the end must find this run's processes only.
    run_id = f"bench-{os.getpid()}"
    HANDLES.append(
        MonitorHandle.launch(
            cfg.to_dict(), paths, ready_limit_s=30.0, run_id=run_id, run_dir=directory
        )
    )
    return [handle.child for handle in HANDLES]


def start_rank(rank: int, path: str) -> subprocess.Popen[str]:
    """Start a rank and wait until it has joined."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "FT_RANK_MONITOR_IPC_SOCKET": path}
    process = subprocess.Popen(
        [sys.executable, "-c", RANK_PROGRAM],
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def main() -> None:
    """Measure and print."""
    cfg = FaultToleranceConfig(initial_rank_heartbeat_timeout=100.0, rank_heartbeat_timeout=100.0)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        paths = [str(Path(directory) / f"rank{rank}.sock") for rank in range(RANKS)]
        before = time.perf_counter()
        monitors = start_monitors(cfg, paths, directory)
        started_s = time.perf_counter() - before
        ranks = [start_rank(rank, path) for rank, path in enumerate(paths)]
        used = sum(cpu_seconds(monitor.pid) for monitor in monitors)
        time.sleep(WATCHED_S)
        used = sum(cpu_seconds(monitor.pid) for monitor in monitors) - used
        found = {
            "PSS MiB": sum(pss_mib(monitor.pid) for monitor in monitors),
            "start ms": started_s * 1000,
            "percent of a core at 1 kHz per rank": 100 * used / WATCHED_S,
        }
        for rank in ranks:
            rank.kill()
            rank.wait()
    print(json.dumps(found), flush=True)
    for monitor in monitors:
        os.kill(monitor.pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
