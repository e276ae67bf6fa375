# SPDX-License-Identifier: Apache-2.0
"""What a save costs: stall of the trainer, write rate, memory; beside its peers, in one run.

    python packages/nvrx-ckpt/bench/bench_save.py [--python PY] [--mb 512] [--root /dev/shm/bench]

With `--ranks 2` two ranks save a state of that size each, at the same time; rank 0 prints.
One JSON line per case; seconds are medians. `stall_s` is the time in calls, `next_step_s` the time
of the first update of all tensors after them, `write_s` the time from the end of the calls to the
end of the save (of a save that does not return before it is written: all of it). Modules are
imported and queues made before the first save, as training loops do. `extra_memory` is the largest
growth of memory over that before the first save, in sizes of the state, during two more saves;
pages that processes share count once. `worker_mb` is what the children hold besides shared memory.
The machine's free memory is touched once before, because the first touch costs several times as
much on virtual machines.
"""

import argparse
import contextlib
import functools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MB = 1 << 20
SYNCHRONOUS = ("memcpy", "clone", "plain_write", "torch_save")
THREADS = int(os.environ.get("BENCH_THREADS", "1"))
CASES = (*SYNCHRONOUS, "nvrx_dcp", "nvrx_torch", "dcp_process")


def emit(**values: Any) -> None:
    """Print one line."""
    print(json.dumps({**values, "load": os.getloadavg()[0]}), flush=True)


def family() -> list[int]:
    """Return the processes of this tree."""
    found, pids = [], [os.getpid()]
    while pids:
        pid = pids.pop()
        found.append(pid)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    pids += map(int, file.read().split())
    return found


def kib(pid: int, file: str, *names: str) -> int:
    """Return the sum of some lines of a file in /proc that count KiB."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{file}") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(names))
    return 0


class Peak(threading.Thread):
    """The largest memory of this tree while it runs."""

    def __init__(self, base: int) -> None:
        super().__init__(daemon=True)
        self.base = self.peak = base
        self.over = threading.Event()
        self.start()

    @staticmethod
    def look() -> int:
        """Return the memory now, in bytes."""
        return sum(kib(pid, "smaps_rollup", "Pss:") for pid in family()) * 1024

    def run(self) -> None:
        """Look until told to stop."""
        while not self.over.wait(0.05):
            self.peak = max(self.peak, self.look())

    def stop(self) -> int:
        """Return how much more there was than at the start."""
        self.over.set()
        self.join()
        return max(self.peak, self.look()) - self.base


class Case:
    """A way to save: `save` returns when the trainer may go on, `finish` when it is written."""

    def __init__(self, root: str, state: dict[str, Any], rank: int) -> None:
        self.root, self.state, self.rank = root, state, rank
        self.prepare()

    def prepare(self) -> None:
        """Do what a training loop does once, before the first save."""

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
    """What the file system takes: large writes, as many files at a time as the others write."""

    def save(self, number: int) -> None:
        """Write."""
        views = [memoryview(value.numpy()).cast("B") for value in self.state.values()]

        def write(part: int) -> None:
            with open(f"{self.root}/{number}-{self.rank}-{part}", "wb", buffering=0) as file:
                file.writelines(views[part::THREADS])
                os.fsync(file.fileno())

        helpers = [threading.Thread(target=write, args=(part,)) for part in range(1, THREADS)]
        for helper in helpers:
            helper.start()
        write(0)
        for helper in helpers:
            helper.join()


class NvrxDcp(Case):
    """A DCP checkpoint of this package."""

    def prepare(self) -> None:
        """Import, and make the queue."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt import state_dict_saver as saver
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import (
            AsyncCallsQueue,
            AsyncRequest,
        )
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
            FileSystemWriterAsync,
        )

        self.saver, self.request, self.writer = saver, AsyncRequest, FileSystemWriterAsync
        self.queue, self.cache = AsyncCallsQueue(), saver.CheckpointMetadataCache()

    def save(self, number: int) -> None:
        """Schedule."""
        writer = self.writer(f"{self.root}/{number}", thread_count=THREADS)
        ret = self.saver.save_state_dict_async_plan(
            self.state, writer, None, 0, enable_cache=True, metadata_cache=self.cache
        )
        function, preload, args = writer.get_save_function_and_args()
        finalize = functools.partial(self.saver.save_state_dict_async_finalize, *ret)
        request = self.request(function, args, [finalize], preload_fn=preload)
        self.queue.schedule_async_request(request)

    def finish(self) -> None:
        """Wait."""
        self.queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        """Stop the worker."""
        self.queue.close()


class NvrxTorch(Case):
    """A file of torch.save of this package."""

    def prepare(self) -> None:
        """Import, and make the queue."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        self.checkpoint = TorchAsyncCheckpoint()

    def save(self, number: int) -> None:
        """Schedule."""
        self.checkpoint.async_save(self.state, f"{self.root}/{number}-{self.rank}")

    def finish(self) -> None:
        """Wait."""
        self.checkpoint.finalize_async_save(blocking=True)

    def close(self) -> None:
        """Stop the worker."""
        getattr(self.checkpoint, "close", int)()  # the reference's releases have none


class DcpProcess(Case):
    """torch's own asynchronous save: a process, with staging in shared memory."""

    def prepare(self) -> None:
        """Import, and make what stages."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.dcp, self.kind = dcp, AsyncCheckpointerType.PROCESS
        self.stager = DefaultStager(StagingOptions(False, True, True, False))

    def save(self, number: int) -> None:
        """Schedule."""
        path = f"{self.root}/{number}"
        self.done = self.dcp.async_save(
            self.state,
            storage_writer=self.dcp.FileSystemWriter(path, thread_count=THREADS),
            async_checkpointer_type=self.kind,
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

        with open(f"{self.root}/{number}-{self.rank}", "wb") as file:
            torch.save(self.state, file)
            os.fsync(file.fileno())


def run(options: argparse.Namespace) -> None:
    """Measure one case in this process."""
    import torch
    import torch.distributed as dist

    case, mb, root, repeats = options.case, options.mb, options.root, options.repeats
    rank, ranks = options.rank, options.ranks
    torch.set_num_threads(1)
    os.makedirs(root, exist_ok=True)
    store = dist.FileStore(f"{root}.{case}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    state = {f"layer{rank}.{i}": torch.rand(mb * MB // 4 // 64) for i in range(64)}
    kinds: dict[str, Callable[..., Case]] = dict(
        zip(
            CASES,
            (Memcpy, Clone, PlainWrite, TorchSave, NvrxDcp, NvrxTorch, DcpProcess),
            strict=True,
        )
    )
    one = kinds[case](root, state, rank)
    rows = []
    base, peak = Peak.look(), None
    for number in range(repeats + 3):
        if number == repeats + 1:
            peak = Peak(base)  # looking at memory takes time: these rows do not count
        dist.barrier()
        begin = time.perf_counter()
        one.save(number)
        if case in SYNCHRONOUS:
            dist.barrier()
        stall = time.perf_counter()
        for value in state.values():
            value.add_(1e-3)
        stepped = time.perf_counter()
        one.finish()
        end = time.perf_counter()
        done = stall if case in SYNCHRONOUS else end
        write = done - (begin if case in SYNCHRONOUS else stall)
        rows.append((stall - begin, stepped - stall, write, done - begin))
        dist.barrier()
        for name in os.listdir(root) if rank == 0 else ():
            path = os.path.join(root, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    extra = peak.stop() / mb / MB if peak else 0.0
    workers = [kib(pid, "status", "RssAnon:", "RssFile:") // 1024 for pid in family()[1:]]
    one.close()
    dist.destroy_process_group()
    first, *later = rows[: repeats + 1]
    medians = [statistics.median(row[column] for row in later) for column in range(4)]
    if rank != 0:
        return
    emit(
        case=case, mb=mb, ranks=ranks, threads=THREADS, first_stall_s=round(first[0], 4),
        stall_s=round(medians[0], 4), next_step_s=round(medians[1], 4),
        write_s=round(medians[2], 4), total_s=round(medians[3], 4),
        gib_per_s=round(mb / 1024 / medians[2], 3), extra_memory=round(extra, 2),
        worker_mb=workers,
    )  # fmt: skip


def main() -> None:
    """Run all cases, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", default="/dev/shm/nvrx-bench-save")  # noqa: S108
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--touch-gib", type=int, default=6, help="memory to touch before; 0: none")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--case", choices=CASES, help="run one case here")
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    if options.case:
        run(options)
        return
    if options.touch_gib:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        mmap.mmap(-1, options.touch_gib << 30, flags).close()
    for case in options.cases.split(","):
        names = ("mb", "repeats", "root", "ranks")
        words = [f"--{name}={getattr(options, name)}" for name in names]
        command = [options.python, os.path.abspath(__file__), "--case", case, *words]
        ranks = [subprocess.Popen([*command, f"--rank={k}"]) for k in range(options.ranks)]
        for process in ranks:
            process.wait(600)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{options.root}.{case}")
    shutil.rmtree(options.root, ignore_errors=True)


if __name__ == "__main__":
    main()
