# SPDX-License-Identifier: Apache-2.0
"""A rank that works in lock-step with the others and saves and leaves when it is told to.

    saving_rank.py OUT STEPS [--ask every|never] [--catch] [--late RANK] [--pause STEP]

In each step all ranks wait for each other, through files: what a collective does. A rank that would
save at another step than the others leaves them waiting. The last step saved is the first one of
the next start.
"""

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

LIMIT_S = 60.0


def wait_for(condition):
    """Wait a little at a time, as a collective's progress thread does."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(3)
        time.sleep(0.0005)


def wait_for_all(paths):
    """Wait until all of the files are there."""
    wait_for(lambda: all(path.exists() for path in paths))


def main():
    """Run the rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--ask", default="every")
    parser.add_argument("--catch", action="store_true")
    parser.add_argument("--late", type=int, default=-1)
    parser.add_argument("--pause", type=int, default=-1)
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cycle = os.environ["NVRX_CYCLE"]
    steps_done = options.out / f"cycle_{cycle}"
    steps_done.mkdir(exist_ok=True)
    if options.catch:
        caught = options.out / f"caught_{cycle}_{rank}"
        signal.signal(signal.SIGUSR1, lambda *_: caught.write_text("SIGUSR1"))
    client = RankMonitorClient()
    client.init_workload_monitoring()
    saved = options.out / "checkpoint"
    step = int(saved.read_text()) if saved.exists() else 0
    if rank == options.late:
        wait_for((options.out / "go").exists)
    written = options.out / f"new_{cycle}_{rank}"
    written.write_text(str(os.getpid()))
    written.replace(options.out / f"works_{cycle}_{rank}")
    while step < options.steps:
        step += 1
        time.sleep(random.uniform(0.0, 0.004))
        (steps_done / f"{step}_{rank}").touch()
        wait_for_all([steps_done / f"{step}_{other}" for other in range(world)])
        if step == options.pause:
            (options.out / f"pause_{rank}").touch()
            wait_for((options.out / f"go_{rank}").exists)
        if options.ask == "every" and client.should_checkpoint():
            (options.out / f"saved_{cycle}_{rank}").write_text(str(step))
            wait_for(lambda: len(list(options.out.glob(f"saved_{cycle}_*"))) == world)
            if rank == 0:
                saved.write_text(str(step))
            client.shutdown_workload_monitoring()
            return
    (options.out / f"done_{cycle}_{rank}").write_text(str(step))
    client.shutdown_workload_monitoring()


if __name__ == "__main__":
    main()
