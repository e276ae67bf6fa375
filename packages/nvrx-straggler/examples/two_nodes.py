# SPDX-License-Identifier: Apache-2.0
"""Two nodes with two ranks each, one of them slow: what a report says about it.

The ranks are processes on this machine that call themselves node-a and node-b. Rank 3 takes twice
as long for its forward pass. Prints the report of rank 0 and writes `report.png` if
matplotlib is installed.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.attribution.straggler import CallableId, Detector

RANKS_PER_NODE = 2
NODES = ("node-a", "node-b")
SLOW_RANK = 3
STEPS = 30


class Trainer:
    """A training step that does nothing but take time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def forward(self) -> None:
        """Take the given time, asleep: ranks that share cores do not slow each other then."""
        time.sleep(self.seconds)


def train(rank: int, store: str) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    world_size = len(NODES) * RANKS_PER_NODE
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    node = NODES[rank // RANKS_PER_NODE]
    trainer = Trainer(0.04 if rank == SLOW_RANK else 0.02)
    Detector.initialize(node_name=node, cuda_profiling="off", report_time_interval=0)
    Detector.wrap_callables([CallableId(trainer, "forward")])
    for _ in range(STEPS):
        trainer.forward()
        # Ranks of a real job wait for each other here.
        dist.barrier()
    report = Detector.generate_report()
    if report is not None:
        sys.stdout.write(report.table())
        if importlib.util.find_spec("matplotlib") is not None:
            report.plot("report.png")
    Detector.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks and wait for them; exit code 1 when one fails."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        ranks = [
            context.Process(target=train, args=(rank, store))
            for rank in range(len(NODES) * RANKS_PER_NODE)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return 1 if any(process.exitcode for process in ranks) else 0


if __name__ == "__main__":
    sys.exit(main())
