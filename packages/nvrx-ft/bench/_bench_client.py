# SPDX-License-Identifier: Apache-2.0
"""The rank of the client's benchmark: prints one JSON object of latencies in microseconds.

It runs under the interpreter that is measured and uses only public names.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance import (
    FaultToleranceConfig,
    RankMonitorClient,
    RankMonitorServer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS = 3000
LIMIT_S = 100.0


def latencies(call: Callable[[], None], pause_s: float) -> dict[str, float]:
    """Return median and 99th percentile of a call, in microseconds."""
    taken = []
    clock = time.perf_counter_ns
    for _ in range(CALLS):
        before = clock()
        call()
        taken.append(clock() - before)
        if pause_s:
            time.sleep(pause_s)
    cuts = statistics.quantiles(taken, n=100)
    return {"p50": statistics.median(taken) / 1000, "p99": cuts[98] / 1000}


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(directory: str, *, is_one_way: bool) -> dict[str, float]:
    """Measure one mode of the client."""
    path = str(Path(directory) / f"monitor{int(is_one_way)}.sock")
    cfg = FaultToleranceConfig(
        rank_section_timeouts={"step": LIMIT_S},
        rank_out_of_section_timeout=LIMIT_S,
        initial_rank_heartbeat_timeout=LIMIT_S,
        rank_heartbeat_timeout=LIMIT_S,
    )
    # Older versions know no one-way calls: every call of theirs is answered.
    if hasattr(cfg, "skip_section_response"):
        cfg.skip_section_response = is_one_way
    before = time.perf_counter()
    # The reference wants a start method here; ours ignores it.
    method: Any = multiprocessing.get_context("fork")
    monitor = RankMonitorServer.run_in_subprocess(cfg, path, mp_ctx=method)
    found = {"monitor start ms": (time.perf_counter() - before) * 1000}
    os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = path
    client = RankMonitorClient()
    client.init_workload_monitoring()

    def pair() -> None:
        client.start_section("step")
        client.end_section("step")

    mode = "one-way" if is_one_way else "answered"
    for name, call in (("heartbeat", client.send_heartbeat), ("section pair", pair)):
        for pause_s, rhythm in ((0.0, "back to back"), (0.001, "every ms")):
            used = cpu_seconds(monitor.pid)
            for part, value in latencies(call, pause_s).items():
                found[f"{mode} {name}, {rhythm}, {part} us"] = value
            if pause_s:
                cost = (cpu_seconds(monitor.pid) - used) / CALLS
                found[f"{mode} {name}, monitor's cpu per call us"] = cost * 1e6
    if is_one_way and hasattr(client, "should_checkpoint"):
        for part, value in latencies(client.should_checkpoint, 0.0).items():
            found[f"should_checkpoint, nothing announced, {part} us"] = value
    client.shutdown_workload_monitoring()
    monitor.terminate()
    monitor.join()
    return found


def main() -> None:
    """Measure and print."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.pop("FT_LAUNCHER_IPC_SOCKET", None)
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(directory, is_one_way=True) | measure(directory, is_one_way=False)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
