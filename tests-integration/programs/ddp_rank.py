# SPDX-License-Identifier: Apache-2.0
"""A rank of a small real training: DistributedDataParallel over gloo, with checkpoints.

    ddp_rank.py SHARED --steps N [--step-ms MS] [--save-every N] [--client]

Everything that it computes depends on the step number alone, so a run that was interrupted ends
with the weights and the losses of one that was not, bit for bit, as long as it has as many ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent))

from shared_record import Monitor, Record

CHECKPOINT = "checkpoint.pt"
RESULT = "result.json"
SEED = 2024
BATCH = 16


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what one rank trains on in one step."""
    generator = torch.Generator().manual_seed(SEED + 1009 * step + rank)
    inputs = torch.randn(BATCH, 32, generator=generator)
    return inputs, inputs.square().sum(1, keepdim=True).sin()


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of all weights, name by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy(force=True).tobytes())
    return digest.hexdigest()


def from_first_rank(path: Path) -> bytes:
    """Return what rank 0 finds in a file: the others may not see the same one yet."""
    data = path.read_bytes() if dist.get_rank() == 0 and path.exists() else b""
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=0)
    content = torch.zeros(int(size), dtype=torch.uint8)
    if data:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if int(size):
        dist.broadcast(content, src=0)
    return content.numpy(force=True).tobytes()


class Trainer:
    """One rank's training: model, optimizer, step number and the losses so far."""

    def __init__(self, shared: Path) -> None:
        """Build the model and go on from the last checkpoint, if there is one."""
        self.rank = dist.get_rank()
        torch.manual_seed(SEED)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.step = 0
        self.losses: list[float] = []
        data = from_first_rank(shared / CHECKPOINT)
        if data:
            saved = torch.load(io.BytesIO(data), weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.losses = saved["step"], saved["losses"]
        self.parallel = DistributedDataParallel(self.model)
        # DDP lays out its buckets anew after the first backward pass, and with them the order in
        # which gradients are added: one pass thrown away puts every run into the final order.
        self._gradients(0)

    def _gradients(self, step: int) -> torch.Tensor:
        inputs, wanted = batch_of(step, self.rank)
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.parallel(inputs), wanted)
        torch.autograd.backward(loss)
        return loss.detach()

    def train_step(self) -> None:
        """Do one step; its loss is that of all ranks together."""
        loss = self._gradients(self.step)
        self.optimizer.step()
        dist.all_reduce(loss)
        self.losses.append(float(loss) / dist.get_world_size())
        self.step += 1

    def checkpoint(self) -> bytes:
        """Return the state as bytes."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "losses": self.losses,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return buffer.getvalue()

    def result(self) -> bytes:
        """Return what a test compares."""
        outcome = {
            "step": self.step,
            "losses": self.losses,
            "weights_sha256": fingerprint(self.model),
            "world": dist.get_world_size(),
        }
        return json.dumps(outcome).encode()


def train(options: argparse.Namespace, record: Record, monitor: Monitor) -> None:
    """Train to the last step from wherever the last checkpoint is, and write the result."""
    with monitor.section("setup"):
        dist.init_process_group("gloo")
        trainer = Trainer(options.shared)
    record.say("resume", step=trainer.step)
    while trainer.step < options.steps:
        with monitor.section("step"):
            time.sleep(options.step_ms / 1000)
            trainer.train_step()
        record.say("step", step=trainer.step)
        monitor.beat()
        at_end = trainer.step == options.steps
        if trainer.rank == 0 and (trainer.step % options.save_every == 0 or at_end):
            with monitor.section("checkpoint"):
                record.save(CHECKPOINT, trainer.checkpoint(), step=trainer.step)
    if trainer.rank == 0:
        record.save(RESULT, trainer.result(), step=trainer.step)


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shared", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--client", action="store_true", help="sections and heartbeats")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    record = Record(options.shared)
    monitor = Monitor(options.client)
    train(options, record, monitor)
    # The model is gone by now; see the demo's training on why, and on the two barriers.
    dist.barrier()
    dist.barrier()
    monitor.close()
    record.say("end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
