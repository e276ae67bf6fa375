# SPDX-License-Identifier: Apache-2.0
"""Trains a small model on CPU and survives a fault on any rank without leaving the process.

Start it with `torchrun --nproc-per-node 4 train.py`, or with `ft_launcher`. With `--fail 25` rank 1
raises in step 25 of the first try.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nvidia_resiliency_ext import inprocess

SAVE_EVERY = 10


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ.get("MASTER_PORT", "29500")) + 1},
    initialize=inprocess.initialize.RetryController(max_iterations=5),
    soft_timeout=dt.timedelta(seconds=20),
    hard_timeout=dt.timedelta(seconds=40),
    barrier_timeout=dt.timedelta(seconds=60),
    heartbeat_timeout=dt.timedelta(seconds=20),
)
def train(options: argparse.Namespace, call: inprocess.CallWrapper | None = None) -> float:
    """Train from the last checkpoint; called again after each fault.

    Args:
        options: The command line.
        call: Filled in by the wrapper.

    Returns:
        The sum of the weights.
    """
    assert call is not None
    # A prefix per iteration: keys of the interrupted one must not be met again.
    store = dist.PrefixStore(f"training/{call.iteration}", call.store)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    while step < options.steps:
        # Every rank takes its share of the same data, however many ranks there are.
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 8, generator=generator)[rank::world_size]
        optimizer.zero_grad()
        loss = (model(inputs).sum(dim=1) - inputs.sum(dim=1)).square().mean()
        loss.backward()
        if step == options.fail and rank == 1 and call.iteration == 0:
            raise RuntimeError("a fault for the example")
        optimizer.step()
        step += 1
        call.ping()
        if step % SAVE_EVERY == 0 and rank == 0:
            with call.atomic():
                part = options.checkpoint.with_suffix(".part")
                torch.save({"model": model.state_dict(), "step": step}, part)
                part.replace(options.checkpoint)
    weights = float(sum(parameter.detach().sum() for parameter in model.parameters()))
    dist.destroy_process_group()
    return weights


def main() -> None:
    """Train, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fail", type=int, default=-1)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    weights = train(parser.parse_args())
    if weights is not None and os.environ.get("RANK", "0") == "0":
        print(f"sum of the weights: {weights:.6f}")


if __name__ == "__main__":
    main()
