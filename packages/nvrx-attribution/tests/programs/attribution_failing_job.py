# SPDX-License-Identifier: Apache-2.0
"""A small training job on CPU that fails in a known way: `torchrun ... FAULT STEP`."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    fault, at = sys.argv[1], int(sys.argv[2])
    if fault == "import":
        import a_module_that_is_missing  # noqa: F401
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 9):
        if step == at:
            strike(fault, rank, world)
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step: {step} loss: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def strike(fault: str, rank: int, world: int) -> None:
    if fault == "shape":
        torch.randn(4, 8) @ torch.randn(4, 8)
    if rank != world - 1:
        return
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "segfault":
        import ctypes

        ctypes.string_at(0)
    if fault == "hang":
        time.sleep(60)
    if fault == "nan":
        raise ValueError("loss is NaN at step 3, aborting")
    if fault == "data":
        open("/data/that/is/missing/part-7.bin", "rb")  # noqa: SIM115
    if fault == "ckpt":
        torch.nn.Linear(8, 9).load_state_dict(torch.nn.Linear(8, 8).state_dict())
    if fault == "exit":
        os._exit(7)
    if fault == "exception":
        raise RuntimeError("the sampler went away")
    if fault == "truncated":
        import io

        buffer = io.BytesIO()
        torch.save({"a": torch.ones(1000)}, buffer)
        torch.load(io.BytesIO(buffer.getvalue()[:900]))


if __name__ == "__main__":
    main()
