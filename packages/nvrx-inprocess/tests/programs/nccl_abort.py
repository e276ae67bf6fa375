# SPDX-License-Identifier: Apache-2.0
"""Two ranks on one node with NCCL; one stays away from a collective, the other is aborted.

With one device both use it only if NCCL allows that; else a single rank aborts an idle group.
"""

import multiprocessing
import os
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.state import State

LIMIT_S = 20.0


def run(rank: int, world_size: int, port: int) -> None:
    torch.cuda.set_device(rank)
    for iteration in range(2):
        store = dist.TCPStore("127.0.0.1", port + iteration, world_size, rank == 0)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
        group = dist.new_group(list(range(world_size)))
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total)
        dist.all_reduce(total, group=group)
        assert total.item() == world_size**2
        thread = threading.Thread(target=abort, args=(rank, world_size))
        thread.start()
        if rank == 0:
            dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=group)
            start = time.monotonic()
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                print("synchronize:", error)
            assert time.monotonic() - start < LIMIT_S
        thread.join()
        assert not dist.is_initialized()
        assert torch.ones(4, device="cuda").sum().item() == 4.0


def abort(rank: int, world_size: int) -> None:
    time.sleep(1.0)
    start = time.monotonic()
    AbortTorchDistributed()(State(rank, world_size).freeze())
    print(f"rank {rank} aborted in {time.monotonic() - start:.3f} s")


def main() -> None:
    os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] = "0"
    world_size = min(2, torch.cuda.device_count())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run, args=(rank, world_size, port)) for rank in range(world_size)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if any(each.exitcode for each in ranks):
        sys.exit(1)
    print("done")


if __name__ == "__main__":
    main()
