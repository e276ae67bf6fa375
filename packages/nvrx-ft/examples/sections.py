# SPDX-License-Identifier: Apache-2.0
"""A training program that says what it is doing: each part of the work has a timeout of its own.

Setting up may take minutes where a step takes seconds. With sections (``sections.yaml`` names them
and their timeouts) a rank that hangs in a step is found after the step's timeout, and the report
says in which section it was.

    ft_launcher --standalone --nproc-per-node 2 --max-restarts 3 --ft-cfg-path sections.yaml \
        sections.py --output /tmp/sections

While it runs, stop a rank (``kill -STOP`` with a pid that it prints). The timeouts that the ranks
have learnt lie in ``timeouts.json``, beside the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

CHECKPOINT_EVERY = 50
LEARN_TIMEOUTS_AFTER = 100  # steps of this process


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets; they depend on step and rank alone, so a step can be repeated."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(64, 16, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True)


class Training:
    """Model and optimizer of one rank, and the folder that keeps them."""

    def __init__(self, output: Path) -> None:
        """Build the model and go on from the last checkpoint."""
        torch.manual_seed(0)
        self.path = output / "checkpoint.pt"
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)
        self.step = 0
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        self.parallel_model = DistributedDataParallel(self.model)

    def train_step(self, rank: int) -> float:
        """Do one step and return the loss."""
        inputs, targets = batch(self.step, rank)
        loss = nn.functional.mse_loss(self.parallel_model(inputs), targets)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def save(self) -> None:
        """Write a checkpoint so that a crash leaves the old one or the new one, never half."""
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        partial = self.path.with_suffix(".partial")
        torch.save({**states, "step": self.step}, partial)
        partial.replace(self.path)


def train(output: Path, steps: int, client: RankMonitorClient) -> None:
    """Train from the last checkpoint to the last step."""
    timeouts_path = output / "timeouts.json"
    with client.section("setup"):
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        output.mkdir(parents=True, exist_ok=True)
        if timeouts_path.exists():
            client.load_state_dict(json.loads(timeouts_path.read_text(encoding="utf-8")))
        training = Training(output)
    first = training.step
    print(f"rank {rank} (pid {os.getpid()}) starts at step {first}", flush=True)
    while training.step < steps:
        with client.section("step"):
            loss = training.train_step(rank)
        if training.step % CHECKPOINT_EVERY == 0:
            with client.section("checkpoint"):
                if rank == 0:
                    training.save()
                    print(f"step {training.step}: loss {loss:.4f}", flush=True)
        if training.step == first + LEARN_TIMEOUTS_AFTER:
            client.calculate_and_set_section_timeouts(  # every rank calls it
                selected_sections=["step"], calc_out_of_section=False, skip_if_not_ready=True
            )
            if rank == 0:
                text = json.dumps(dict(client.state_dict()))
                partial = timeouts_path.with_suffix(".partial")
                partial.write_text(text, encoding="utf-8")
                partial.replace(timeouts_path)


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
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    client = RankMonitorClient()
    client.init_workload_monitoring()
    train(options.output, options.steps, client)
    client.shutdown_workload_monitoring()
    leave_together()


if __name__ == "__main__":
    main()
