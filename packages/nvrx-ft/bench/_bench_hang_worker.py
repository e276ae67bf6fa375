# SPDX-License-Identifier: Apache-2.0
"""The rank of the hang benchmark: works, then stops itself in cycle 0; uses public names only."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

STEPS = 3
STEP_S = 0.1


def main() -> None:
    """Run one rank: `<out> <rule> <rank that hangs>`."""
    out, rule, victim = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank, cycle = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    with (out / f"events_{cycle}_{rank}").open("a", buffering=1) as file:
        client = RankMonitorClient()
        client.init_workload_monitoring()
        for step in range(STEPS):
            hangs = step == STEPS - 1 and rank == victim and cycle == 0
            if rule == "section":
                client.start_section("step")
            else:
                client.send_heartbeat()
            if hangs:
                (out / f"pid_{rank}").write_text(str(os.getpid()))
                file.write(f"{time.monotonic():.6f} stopped\n")
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(STEP_S)
            if rule == "section":
                client.end_section("step")
        # The others wait for the one that hangs, as they would in a collective, but are not found
        # hanging themselves: whoever stopped first by a millisecond would end the cycle.
        while cycle == 0:
            if rule == "heartbeat":
                client.send_heartbeat()
            time.sleep(STEP_S)
        client.shutdown_workload_monitoring()
        file.write(f"{time.monotonic():.6f} last_line\n")


if __name__ == "__main__":
    main()
