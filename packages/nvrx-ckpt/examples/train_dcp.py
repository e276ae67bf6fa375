# SPDX-License-Identifier: Apache-2.0
"""Train a small model with asynchronous DCP checkpoints; go on from the newest one.

torchrun --nproc-per-node 2 train_dcp.py /path/to/checkpoints
"""

import functools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from nvidia_resiliency_ext.checkpointing import publish_latest, read_latest, remove_old
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

STEPS, EVERY = 40, 10


def save(
    queue: AsyncCallsQueue,
    cache: CheckpointMetadataCache,
    root: str,
    step: int,
    state: dict[str, Any],
) -> None:
    """Schedule a checkpoint of this step; training may go on when it returns."""
    folder = os.path.join(root, f"{step:08d}")
    writer = FileSystemWriterAsync(folder)
    ret = save_state_dict_async_plan(state, writer, enable_cache=True, metadata_cache=cache)
    function, preload, args = writer.get_save_function_and_args()
    finalize = functools.partial(save_state_dict_async_finalize, *ret)
    request = AsyncRequest(function, args, [finalize], preload_fn=preload)
    if dist.get_rank() == 0:
        # Called after `finalize`, when the checkpoint is durable on all ranks.
        request.add_finalize_fn(functools.partial(tidy, root, os.path.basename(folder)))
    queue.schedule_async_request(request)


def tidy(root: str, newest: str) -> None:
    """Name the newest checkpoint, and keep two."""
    publish_latest(os.path.join(root, "latest"), newest)
    folders = sorted(os.path.join(root, name) for name in os.listdir(root) if name.isdigit())
    remove_old(folders, keep=2)


def main(root: str) -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model.state_dict(), "step": 0}
    newest = read_latest(os.path.join(root, "latest"))
    if newest is not None:
        dcp.load(state, checkpoint_id=os.path.join(root, newest))
        model.load_state_dict(state["model"])
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    for step in range(state["step"] + 1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).pow(2).mean().backward()
        optimizer.step()
        if step % EVERY == 0:
            save(queue, cache, root, step, {"model": model.state_dict(), "step": step})
        queue.maybe_finalize_async_calls()
    queue.close()
    print(f"rank {dist.get_rank()} is at step {STEPS}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
