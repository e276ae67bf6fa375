# SPDX-License-Identifier: Apache-2.0
"""Drive asynchronous saves the way Megatron-LM and Megatron-Bridge do, on the CPU.

torchrun --nproc-per-node 2 megatron_style.py /path/to/checkpoints
"""

import inspect
import os
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint import load as dcp_load

import nvidia_resiliency_ext
from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async
from nvidia_resiliency_ext.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
    FileSystemWriterAsync,
    get_write_results_queue,
)
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)


class DecentralizedPlanner(DefaultSavePlanner):
    """A planner whose plans need no changes by one rank, as Megatron's own."""

    can_run_decentralized_global_plan = True

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return local_plan


def detect() -> None:
    """Make sure that everything is there by which Megatron-LM decides to use this package."""
    assert Version(nvidia_resiliency_ext.__version__) >= Version("0.6.0")
    for function, name in (
        (AsyncCallsQueue.__init__, "cpu_shm_mode"),
        (AsyncCallsQueue.warmup_persistent_caller, "cpu_shm_mode"),
        (get_write_results_queue, "mp_mode"),
        (FileSystemWriterAsync.__init__, "use_cpu_shm_for_gpu_tensors"),
    ):
        assert name in inspect.signature(function).parameters, name
    assert hasattr(filesystem_async, "_results_queue")


def schedule(
    queue: AsyncCallsQueue,
    cache: CheckpointMetadataCache,
    folder: str,
    state: dict[str, Any],
    log: list[str],
) -> None:
    """Schedule a save, and one more request right behind it that takes the finalize functions."""
    writer = FileSystemWriterAsync(
        folder, separation_hint="optimizer", thread_count=2, use_msc=False,
        use_cached_data_structure=True, use_cpu_shm_for_gpu_tensors=True,
    )  # fmt: skip
    planner = DecentralizedPlanner()
    ret = save_state_dict_async_plan(
        state, writer, None, 0, planner=planner, enable_cache=True, metadata_cache=cache
    )
    function, preload, args = writer.get_save_function_and_args()
    finalize = partial(save_state_dict_async_finalize, *ret)
    request = AsyncRequest(function, args, [finalize], async_fn_kwargs={}, preload_fn=preload)
    request.add_finalize_fn(lambda: log.append(os.path.basename(folder)))
    moved = request.finalize_fns.copy()
    request.finalize_fns.clear()
    queue.schedule_async_request(request)
    extra = AsyncRequest(async_fn=print, async_fn_args=("sidecar", folder), finalize_fns=moved)
    queue.schedule_async_request(extra)


def main(root: str) -> None:
    """Save three times, abort a fourth save as an in-process restart does, and save again."""
    detect()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    AsyncCallsQueue.warmup_persistent_caller(
        rank, cpu_priority=10, io_priority=3, cpu_shm_mode=True
    )
    queue = AsyncCallsQueue(persistent=True, cpu_shm_mode=True)
    get_write_results_queue(mp_mode="fork")
    cache, log = CheckpointMetadataCache(), []

    def state_at(step: int) -> dict[str, Any]:
        weight = torch.full((300 + rank, 10), float(step))
        return {f"model.{rank}": weight, f"optimizer.{rank}": weight / 2, "step": step}

    for step in range(3):
        state = state_at(step)
        schedule(queue, cache, os.path.join(root, f"iter_{step}"), state, log)
        state[f"model.{rank}"].fill_(-1)
        while queue.get_num_unfinalized_calls():
            queue.maybe_finalize_async_calls(False, no_dist=False)
    schedule(queue, cache, os.path.join(root, "aborted"), state_at(7), log)
    queue.close(abort=True)
    filesystem_async._results_queue._manager.shutdown()  # noqa: SLF001 - as Megatron does
    filesystem_async._results_queue = None  # noqa: SLF001 - as Megatron does
    CachedMetadataFileSystemReader.clear_metadata_cache()
    dist.barrier()
    schedule(queue, cache, os.path.join(root, "iter_9"), state_at(9), log)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert log == ["iter_0", "iter_1", "iter_2", "iter_9"], log
    for step in (0, 1, 2, 9):
        state = state_at(-5)
        reader = CachedMetadataFileSystemReader(os.path.join(root, f"iter_{step}"), verify=True)
        dcp_load(state, storage_reader=reader)
        assert state["step"] == step
        assert torch.equal(state[f"model.{rank}"], state_at(step)[f"model.{rank}"])
    assert not os.path.exists(os.path.join(root, "aborted", ".metadata"))
    print(f"rank {rank} has loaded what it saved", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
