# SPDX-License-Identifier: Apache-2.0
"""A training program that sends a heartbeat per step, so that a hang ends in a restart.

The first run starts with generous timeouts. After a while the ranks agree on better ones, made
from the intervals they saw; the checkpoint keeps them, so that a restarted job has them at once.
The steps here take milliseconds, and a busy machine delays one by more than the usual safety
factor of 5.

    ft_launcher --standalone --nproc-per-node 2 --max-restarts 3 \
        --ft-initial-rank-heartbeat-timeout 120 --ft-rank-heartbeat-timeout 60 \
        --ft-safety-factor 200 heartbeats.py --checkpoint /tmp/heartbeats.pt

While it runs, stop a rank (``kill -STOP`` with a pid that it prints). The others wait for it; the
monitor misses its heartbeat, kills it, and the launcher starts all ranks again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

CHECKPOINT_EVERY = 50
LEARN_TIMEOUTS_AFTER = 100  # steps of this process: its first ones are slower than usual


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets; they depend on step and rank alone, so a step can be repeated."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(64, 16, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True)


def save(path: Path, state: dict[str, object]) -> None:
    """Write a checkpoint so that a crash leaves the old one or the new one, never half."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def train(path: Path, steps: int, client: RankMonitorClient) -> None:
    """Train from the last checkpoint to the last step."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    first = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        client.load_state_dict(state["timeouts"])
        first = state["step"]
    print(f"rank {rank} (pid {os.getpid()}) starts at step {first}", flush=True)
    parallel_model = DistributedDataParallel(model)
    for step in range(first, steps):
        inputs, targets = batch(step, rank)
        loss = nn.functional.mse_loss(parallel_model(inputs), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        client.send_heartbeat()
        if step + 1 == first + LEARN_TIMEOUTS_AFTER:
            client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)  # every rank calls it
        if rank == 0 and (step + 1) % CHECKPOINT_EVERY == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(path, {**states, "timeouts": dict(client.state_dict()), "step": step + 1})
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


def leave_together() -> None:
    """Leave the process group when every rank is done.

    Two rounds: gloo's two threads may still hold work of the last backward pass, and some versions
    of torch abort or deadlock when the process group goes before that work does.
    """
    dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    client = RankMonitorClient()
    client.init_workload_monitoring()
    dist.init_process_group("gloo")
    train(options.checkpoint, options.steps, client)
    client.shutdown_workload_monitoring()
    leave_together()


if __name__ == "__main__":
    main()
