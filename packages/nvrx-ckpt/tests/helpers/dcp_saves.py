# SPDX-License-Identifier: Apache-2.0
"""Saves and loads of small states, as users write them."""

import os
import threading
from pathlib import Path

import ports
import ranks_of_node
import torch
import torch.distributed.checkpoint as dcp
from results import no_second_try

from nvidia_resiliency_ext.checkpointing._verify import verify_checkpoint
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

PROGRAMS = Path(__file__).parents[1] / "programs"
DEADLINE_S = 240
_PORTS = 3  # from MASTER_PORT on, that programs use


def state_of(value, count=5, prefix=""):
    """Return a state with tensors of several kinds, all of one value."""
    state = {f"{prefix}layer{i}": torch.full((17, 100 + i), float(value)) for i in range(count)}
    state[f"{prefix}half"] = torch.full((5,), value, dtype=torch.bfloat16)
    state[f"{prefix}view"] = torch.full((40, 3), float(value)).t()[1]
    state[f"{prefix}step"] = value
    return state


def request_for(state, folder, finalize=(), *, writer=None, group=None, **plan):
    """Return the request of a DCP save."""
    writer = writer or FileSystemWriterAsync(folder, thread_count=1)
    ret = save_state_dict_async_plan(state, writer, group, 0, **plan)
    function, preload, args = writer.get_save_function_and_args()
    functions = [lambda: save_state_dict_async_finalize(*ret), *finalize]
    return AsyncRequest(function, args, functions, {}, preload)


@no_second_try()
def load_like(state, folder):
    """Return the checkpoint that stock DCP reads for the keys of a state."""
    into = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        for key, value in state.items()
    }
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    return into


@no_second_try()
def assert_same(left, right):
    """Compare two flat states bit for bit."""
    assert left.keys() == right.keys()
    for key, value in left.items():
        same = torch.equal(value, right[key]) if torch.is_tensor(value) else value == right[key]
        assert same, key


@no_second_try()
def assert_whole(folder):
    """Check that every file of a checkpoint is complete and undamaged."""
    report = verify_checkpoint(folder)
    assert report.whole, report.problems


def run_ranks(fork_server, folder, world, program, *words):
    """Run a program of `programs` as ranks of one node; return what each printed.

    Ranks that do not end print the stacks of their threads and of their workers, and fail.
    """
    base = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "NVRX", "TORCH"))}
    base["PYTHONFAULTHANDLER"] = "1"
    with ports.claimed(_PORTS) as port:
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
        arguments = [str(folder), *words]
        with ranks_of_node.started_by(
            fork_server, folder, world, PROGRAMS / program, arguments, base
        ) as ranks:
            late = threading.Timer(DEADLINE_S, ranks.abort)
            late.start()
            try:
                codes = ranks.wait()
            finally:
                late.cancel()
                late.join()
    texts = [(folder / f"rank{rank}.log").read_text() for rank in range(world)]
    return list(zip(codes, texts, strict=True))
