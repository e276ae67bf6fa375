# SPDX-License-Identifier: Apache-2.0
"""Drives the wrapper as Megatron-LM does, on CPU: all its callbacks, a tree with reserves.

Start it with `torchrun --nproc-per-node 4 layered.py --active 3`: three ranks train, one stands by.
With `--fail-rank 1` that rank raises in the first try.
"""

from __future__ import annotations

import argparse
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nvidia_resiliency_ext import inprocess

STATE: dict[str, Any] = {}


class StopOwnHelpers(inprocess.abort.Abort):
    """Stands for what an application must stop itself before collectives are aborted."""

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        """Stop nothing; say that it was asked."""
        STATE["aborts"] = STATE.get("aborts", 0) + 1
        return state


def destroy_state() -> None:
    """Let go of what outlives the function: globals that hold models and process groups."""
    STATE.pop("model", None)


def wrapper(active: int) -> inprocess.Wrapper:
    """Return the wrapper, with the parameters that Megatron-LM passes."""
    restarter = inprocess.nested_restarter
    layer, flag = inprocess.rank_assignment.Layer, inprocess.rank_assignment.LayerFlag
    layers = [
        layer(min_ranks=active, max_ranks=active, flag=flag.RESERVE),
        layer(key_or_fn=lambda _state: socket.gethostname(), flag=flag.RESERVE),
    ]
    return inprocess.Wrapper(
        store_kwargs={
            "timeout": timedelta(seconds=300),
            "port": int(os.environ["MASTER_PORT"]) + 2,
        },
        initialize=inprocess.Compose(
            inprocess.initialize.RetryController(min_world_size=active),
            restarter.NestedRestarterHandlingCompleted(),
        ),
        abort=inprocess.Compose(
            inprocess.abort.AbortTransformerEngine(),
            inprocess.abort.AbortTorchDistributed(),
            StopOwnHelpers(),
            restarter.NestedRestarterHandlingStarting(),
        ),
        completion=restarter.NestedRestarterFinalized(),
        terminate=restarter.NestedRestarterAborted(),
        health_check=inprocess.health_check.CudaHealthCheck(timeout=timedelta(seconds=10)),
        rank_assignment=inprocess.rank_assignment.Tree(layers),
        finalize=inprocess.Compose(
            inprocess.finalize.ThreadedFinalize(timedelta(seconds=10), destroy_state),
        ),
        heartbeat_interval=timedelta(seconds=30),
        heartbeat_timeout=timedelta(seconds=60),
        barrier_timeout=timedelta(seconds=120),
        completion_timeout=timedelta(seconds=120),
        monitor_process_interval=timedelta(seconds=1),
        monitor_thread_interval=timedelta(seconds=1),
        last_call_wait=timedelta(seconds=1),
        soft_timeout=timedelta(seconds=60),
        hard_timeout=timedelta(seconds=90),
        termination_grace_time=timedelta(seconds=1),
        enabled=True,
    )


def train(options: argparse.Namespace, inprocess_call_wrapper: Any = None) -> float:
    """Add up over the active ranks; `inprocess_call_wrapper` is filled in by its name."""
    iteration = inprocess_call_wrapper.iteration
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = STATE.get("store")
    if store is None:
        # One store for all iterations, hosted by whoever was rank 0 at first.
        STATE["store"] = store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]) + 1,
            is_master=rank == 0,
            wait_for_workers=False,
        )
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(str(iteration), store), rank=rank, world_size=world_size
    )
    STATE["model"] = torch.nn.Linear(1, 1)
    if iteration == 0 and rank == options.fail_rank:
        raise RuntimeError("a fault for the example")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return float(total)


def main() -> None:
    """Call the wrapped function."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--active", type=int, default=3)
    parser.add_argument("--fail-rank", type=int, default=-1)
    options = parser.parse_args()
    total = wrapper(options.active)(train)(options)
    print(f"rank {os.environ['RANK']}: {total}, {STATE.get('aborts', 0)} aborts", flush=True)


if __name__ == "__main__":
    main()
