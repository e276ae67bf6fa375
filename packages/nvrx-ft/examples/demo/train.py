# SPDX-License-Identifier: Apache-2.0
"""Train a small network on handwritten digits, so that any rank may die or hang at any moment.

An ordinary data-parallel program on CPU with three additions: it loads its last checkpoint when it
starts, it writes one every few steps, and it tells its rank monitor what it is doing. Everything
it computes depends on the step number alone, so a run that was interrupted ends with exactly the
weights of a run that was not.

    ft_launcher --standalone --nproc-per-node 4 --max-restarts 3 \
        --ft-rank-section-timeouts setup:60,step:5,checkpoint:30 \
        train.py --output /tmp/digits
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from nvidia_resiliency_ext.shared_utils.events import CkptSave, EventLog

DATA = Path(__file__).with_name("data") / "digits.csv.gz"
TRAINING_IMAGES = 1536
BATCH_PER_RANK = 32
SEED = 1998


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images, scaled to 0..1, and the digits they show."""
    with gzip.open(DATA, "rt", encoding="ascii") as lines:
        values = bytearray(map(int, ",".join(lines).split(",")))
    # 65 small numbers a row: 64 pixels of 0 to 16, and the digit.
    rows = torch.frombuffer(values, dtype=torch.uint8).reshape(-1, 65).long()
    return (rows[:, :64].float() / 16).reshape(-1, 1, 8, 8), rows[:, 64]


def make_model() -> nn.Sequential:
    """Return the network with the same first weights on every rank and in every run."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batch_of(step: int, rank: int, world_size: int) -> torch.Tensor:
    """Return the row numbers that one rank trains on in one step: a function of its arguments."""
    per_epoch = TRAINING_IMAGES // (BATCH_PER_RANK * world_size)
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(TRAINING_IMAGES, generator=torch.Generator().manual_seed(SEED + epoch))
    start = (place * world_size + rank) * BATCH_PER_RANK
    return order[start : start + BATCH_PER_RANK]


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of all weights, name by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        # Not numpy(): torch does not bring it.
        digest.update(bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def replace_file(path: Path, write: Any) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one, never half."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class Trainer:
    """One rank's training: model, optimizer, step number and where they are kept."""

    def __init__(self, output: Path, rank: int, world_size: int) -> None:
        """Build the model and go on from the last checkpoint, if there is one."""
        self.rank, self.world_size = rank, world_size
        self.checkpoint_path = output / "checkpoint.pt"
        self.events = EventLog.join(src="ckpt")
        self.images, self.digits = load_digits()
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.step = 0
        if self.checkpoint_path.exists():
            saved = torch.load(self.checkpoint_path, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step = saved["step"]
        self.parallel_model = DistributedDataParallel(self.model)
        # DDP lays out its gradient buckets anew after the first backward pass, and with them the
        # order in which gradients are added. One pass thrown away puts every run, resumed or not,
        # into the final order.
        self._gradients(step=0)

    def _gradients(self, step: int) -> float:
        """Leave the averaged gradients of one step in the model and return this rank's loss."""
        rows = batch_of(step, self.rank, self.world_size)
        self.optimizer.zero_grad()
        scores = self.parallel_model(self.images[rows])
        loss = nn.functional.cross_entropy(scores, self.digits[rows])
        torch.autograd.backward(loss)
        return float(loss.detach())

    def train_step(self) -> float:
        """Do one step and return this rank's loss."""
        loss = self._gradients(self.step)
        self.optimizer.step()
        self.step += 1
        return loss

    def save(self) -> None:
        """Write the checkpoint; one rank is enough, for all hold the same.

        The record learns of it, so that the report can tell how much work a fault has cost.
        """
        if self.rank != 0:
            return
        began = time.monotonic()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        replace_file(self.checkpoint_path, lambda file: torch.save(state, file))
        saved = CkptSave(
            iteration=self.step,
            bytes=self.checkpoint_path.stat().st_size,
            stall_s=time.monotonic() - began,
            result="ok",
        )
        self.events.record(
            saved,
            cycle=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            rank=self.rank,
        )

    def accuracy(self) -> float:
        """Return the share of the images kept aside that the model reads correctly."""
        with torch.no_grad():
            scores = self.model(self.images[TRAINING_IMAGES:])
        return float((scores.argmax(1) == self.digits[TRAINING_IMAGES:]).float().mean())


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="train on handwritten digits")
    parser.add_argument("--output", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--progress", type=Path, help="named pipe that gets a line per step")
    parser.add_argument(
        "--device-ms",
        type=float,
        default=0,
        help="time per step in which the CPU is idle, as when a device computes",
    )
    parser.add_argument(
        "--pause", type=Path, help="before a checkpoint, wait while this file exists"
    )
    return parser.parse_args()


def wait_while_paused(pause: Path, rank: int) -> None:
    """Wait, all ranks together, as long as a file is there."""
    while rank == 0 and pause.exists():
        time.sleep(0.05)
    dist.barrier()


def train(options: argparse.Namespace, client: RankMonitorClient) -> None:
    """Train to the last step from wherever the last checkpoint is, and write the result."""
    progress = os.open(options.progress, os.O_WRONLY) if options.progress else None
    cycle = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with client.section("setup"):
        dist.init_process_group("gloo")
        trainer = Trainer(options.output, dist.get_rank(), dist.get_world_size())
    loss = float("nan")
    while trainer.step < options.steps:
        with client.section("step"):
            if progress is not None:
                line = f"{cycle} {trainer.rank} {trainer.step} {os.getpid()}\n"
                os.write(progress, line.encode())
            time.sleep(options.device_ms / 1000)
            loss = trainer.train_step()
        client.send_heartbeat()
        if trainer.step % options.checkpoint_every == 0 or trainer.step == options.steps:
            if options.pause is not None:
                wait_while_paused(options.pause, trainer.rank)
            with client.section("checkpoint"):
                trainer.save()
    result = {
        "step": trainer.step,
        "loss": loss,
        "accuracy": trainer.accuracy(),
        "weights_sha256": fingerprint(trainer.model),
    }
    if trainer.rank == 0:
        text = json.dumps(result).encode()
        replace_file(options.output / "result.json", lambda file: file.write(text))


def main() -> None:
    """Run one rank."""
    options = parse_arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    client = RankMonitorClient()
    client.init_workload_monitoring()
    train(options, client)
    # The model is gone by now: some versions of torch deadlock when it outlives the process group,
    # or when a rank leaves while gloo's threads still hold work of the last backward pass.
    dist.barrier()
    dist.barrier()
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
