# SPDX-License-Identifier: Apache-2.0
"""Trains a small model for some steps on gloo and writes what every rank has at the end."""

import json
import os
import sys
import time

loaded_before = "torch" in sys.modules

import torch  # noqa: E402 - the order is the point
import torch.distributed as dist  # noqa: E402


def main():
    """Train; the first argument is the folder for results, the second a rendezvous file."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    unseeded = torch.initial_seed()
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=world
    )
    torch.manual_seed(11)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first_step_at = None
    for step in range(3):
        optimizer.zero_grad()
        inputs = torch.arange(8.0).reshape(2, 4) / 8 + rank + step
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        if first_step_at is None:
            first_step_at = time.monotonic()
    # A gloo thread that still holds the last step's tensors when the group or the interpreter ends
    # makes torch 2.13 hang or abort, in fresh workers too; that is not what is tested here.
    time.sleep(0.3)
    weights = [parameter.tolist() for parameter in model.parameters()]
    dist.destroy_process_group()
    reported = {
        "loaded_before": loaded_before,
        "same_object": __import__("torch") is torch is sys.modules["torch"],
        "seed": unseeded,
        "weights": weights,
        "first_step_at": first_step_at,
        "pid": os.getpid(),
    }
    with open(os.path.join(sys.argv[1], f"{rank}.json"), "w", encoding="utf-8") as file:
        json.dump(reported, file)


main()
