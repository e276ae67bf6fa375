# SPDX-License-Identifier: Apache-2.0
"""What a save costs: stall of the trainer, write rate, memory; beside its peers, in one run.

    python packages/nvrx-ckpt/bench/bench_save.py [--python PY] [--mb 512] [--root /dev/shm/bench]

One JSON line per figure; seconds are medians. `stall_s` is the time in calls, `next_step_s` the
time of the first update of all tensors after them.
"""

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

MB = 1 << 20
CASES = ("memcpy", "clone", "plain_write", "nvrx_dcp", "nvrx_torch", "dcp_process", "torch_save")


def emit(**values: Any) -> None:
    """Print one line."""
    print(json.dumps({**values, "load": os.getloadavg()[0]}), flush=True)


class Case:
    """A way to save: `save` returns when the trainer may go on, `finish` when it is written."""

    def __init__(self, root: str, state: dict[str, Any]) -> None:
        self.root, self.state = root, state

    def save(self, number: int) -> None:
        """Save."""

    def finish(self) -> None:
        """Wait until it is written."""

    def close(self) -> None:
        """Stop what runs."""


class Memcpy(Case):
    """The lower bound of a stall: a copy into memory that was used before."""

    def save(self, number: int) -> None:  # noqa: ARG002 - writes nothing
        """Copy."""
        if not hasattr(self, "copy"):
            self.copy = {name: value.clone() for name, value in self.state.items()}
        for name, value in self.state.items():
            self.copy[name].copy_(value)


class Clone(Case):
    """A copy into fresh memory."""

    def save(self, number: int) -> None:  # noqa: ARG002 - writes nothing
        """Clone."""
        self.copy = {name: value.clone() for name, value in self.state.items()}


class PlainWrite(Case):
    """What the file system takes: large writes from one buffer, one file."""

    def save(self, number: int) -> None:
        """Write."""
        with open(f"{self.root}/{number}", "wb", buffering=0) as file:
            file.writelines(memoryview(value.numpy()).cast("B") for value in self.state.values())
            os.fsync(file.fileno())


class NvrxDcp(Case):
    """A DCP checkpoint of this package."""

    def save(self, number: int) -> None:
        """Schedule."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt import state_dict_saver as saver
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import (
            AsyncCallsQueue,
            AsyncRequest,
        )
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
            FileSystemWriterAsync,
        )

        if not hasattr(self, "queue"):
            self.queue, self.cache = AsyncCallsQueue(), saver.CheckpointMetadataCache()
        writer = FileSystemWriterAsync(f"{self.root}/{number}", thread_count=1)
        ret = saver.save_state_dict_async_plan(
            self.state, writer, None, 0, enable_cache=True, metadata_cache=self.cache
        )
        function, preload, args = writer.get_save_function_and_args()
        finalize = functools.partial(saver.save_state_dict_async_finalize, *ret)
        request = AsyncRequest(function, args, [finalize], preload_fn=preload)
        self.queue.schedule_async_request(request)

    def finish(self) -> None:
        """Wait."""
        self.queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        """Stop the worker."""
        self.queue.close()


class NvrxTorch(Case):
    """A file of torch.save of this package."""

    def save(self, number: int) -> None:
        """Schedule."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt import TorchAsyncCheckpoint

        if not hasattr(self, "checkpoint"):
            self.checkpoint = TorchAsyncCheckpoint()
        self.checkpoint.async_save(self.state, f"{self.root}/{number}")

    def finish(self) -> None:
        """Wait."""
        self.checkpoint.finalize_async_save(blocking=True)

    def close(self) -> None:
        """Stop the worker."""
        self.checkpoint.close()


class DcpProcess(Case):
    """torch's own asynchronous save: a process, with staging in shared memory."""

    def save(self, number: int) -> None:
        """Schedule."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if not hasattr(self, "stager"):
            self.stager = DefaultStager(StagingOptions(False, True, True, False))
        self.done = dcp.async_save(
            self.state,
            storage_writer=dcp.FileSystemWriter(f"{self.root}/{number}"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self.stager,
        )
        self.done.staging_completion.result()

    def finish(self) -> None:
        """Wait."""
        self.done.upload_completion.result()

    def close(self) -> None:
        """Stop what stages."""
        self.stager.close()


class TorchSave(Case):
    """torch.save, and fsync."""

    def save(self, number: int) -> None:
        """Write."""
        import torch

        with open(f"{self.root}/{number}", "wb") as file:
            torch.save(self.state, file)
            os.fsync(file.fileno())


def run(case: str, mb: int, root: str, repeats: int) -> None:
    """Measure one case in this process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.makedirs(root, exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = {f"layer{i}": torch.rand(mb * MB // 4 // 64) for i in range(64)}
    kinds: dict[str, Callable[..., Case]] = dict(
        zip(
            CASES,
            (Memcpy, Clone, PlainWrite, NvrxDcp, NvrxTorch, DcpProcess, TorchSave),
            strict=True,
        )
    )
    one = kinds[case](root, state)
    rows = []
    for number in range(repeats + 1):
        begin = time.perf_counter()
        one.save(number)
        stall = time.perf_counter()
        for value in state.values():
            value.add_(1e-3)
        stepped = time.perf_counter()
        one.finish()
        end = time.perf_counter()
        rows.append((stall - begin, stepped - stall, end - begin))
        for name in os.listdir(root):
            path = os.path.join(root, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    one.close()
    dist.destroy_process_group()
    first, *later = rows
    medians = [statistics.median(row[column] for row in later) for column in range(3)]
    emit(
        case=case, mb=mb, first_stall_s=round(first[0], 4), stall_s=round(medians[0], 4),
        next_step_s=round(medians[1], 4), total_s=round(medians[2], 4),
        gbps=round(mb / 1024 / medians[2], 3),
    )  # fmt: skip


def main() -> None:
    """Run all cases, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", default="/dev/shm/nvrx-bench-save")  # noqa: S108
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--case", choices=CASES, help="run one case here")
    options = parser.parse_args()
    if options.case:
        run(options.case, options.mb, options.root, options.repeats)
        return
    for case in options.cases.split(","):
        words = ["--mb", str(options.mb), "--repeats", str(options.repeats), "--root", options.root]
        command = [options.python, os.path.abspath(__file__), "--case", case, *words]
        subprocess.run(command, check=False, timeout=600)
    shutil.rmtree(options.root, ignore_errors=True)


if __name__ == "__main__":
    main()
