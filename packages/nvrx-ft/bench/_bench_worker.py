# SPDX-License-Identifier: Apache-2.0
"""The rank that the benchmarks launch: writes when it did what, and dies on order.

It uses nothing of the launchers under measurement. Times are those of the monotonic clock, which
all processes of a machine share.
"""

from __future__ import annotations

import time

FIRST_LINE = time.monotonic()

import argparse  # noqa: E402 - the first line is what is measured
import os  # noqa: E402
import signal  # noqa: E402
from pathlib import Path  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["bare", "ddp"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--kill-rank", type=int, default=-1, help="in cycle 0 only")
    parser.add_argument("--kill-after-s", type=float, default=0.0, help="after its first step")
    parser.add_argument("--kill-cycles", type=int, default=1, help="how many cycles end so")
    return parser.parse_args()


def train(options: argparse.Namespace, rank: int, cycle: int, imported: float) -> None:
    """Do the steps and write the events."""
    with (options.out / f"events_{cycle}_{rank}").open("a", buffering=1) as file:

        def event(name: str, at: float | None = None) -> None:
            file.write(f"{time.monotonic() if at is None else at:.6f} {name}\n")

        event("first_line", FIRST_LINE)
        event("imported", imported)
        (options.out / f"pid_{rank}").write_text(str(os.getpid()))
        step = make_ddp_step() if options.mode == "ddp" else do_nothing
        trained = FIRST_LINE
        for number in range(options.steps):
            step()
            if number == 0:
                event("first_step")
                trained = time.monotonic()
            if rank == options.kill_rank and cycle < options.kill_cycles:
                time.sleep(max(0.0, trained + options.kill_after_s - time.monotonic()))
                event("killed")
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(options.step_s)
        leave(options.mode)
        event("last_line")


def do_nothing() -> None:
    """Do a step without a model."""


def make_ddp_step() -> Callable[[], None]:
    """Return a function that does one step of data-parallel training."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.ones(8, 64)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(inputs).square().mean())
        optimizer.step()

    return step


def leave(mode: str) -> None:
    """Leave the process group, when gloo's threads have let go of the last backward pass."""
    if mode == "ddp":
        import torch.distributed as dist

        dist.barrier()
        dist.barrier()
        dist.destroy_process_group()


def main(imported: float = FIRST_LINE) -> None:
    """Run one rank, whose file had its imports at this time."""
    cycle = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    train(parse_arguments(), int(os.environ["RANK"]), cycle, imported)


if __name__ == "__main__":
    main()
