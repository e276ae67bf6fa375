# SPDX-License-Identifier: Apache-2.0
"""Saves of tensors on one GPU: stall and rate of pinned staging, beside DCP's pinned stager.

    python packages/nvrx-ckpt/bench/bench_gpu.py [--mb 4096] [--root /dev/shm/bench] [--python PY]

The lower bound is `pinned_copy`: the same tensors copied to pinned memory that was used before.
`--python` runs the cases `nvrx_*` of another install with the same import names as well, and marks
their lines with `install`. The columns are those of `bench_save.py`; the update after a save runs
on the device and is waited for.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

from bench_save import MB, Case, NvrxDcp, NvrxTorch, emit

CASES = ("pinned_copy", "nvrx_dcp", "nvrx_torch", "dcp_pinned", "torch_save")


class PinnedCopy(Case):
    """The lower bound of a stall."""

    def prepare(self) -> None:
        """Allocate."""
        import torch

        self.copy = {
            name: torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            for name, value in self.state.items()
        }

    def save(self, number: int) -> None:  # noqa: ARG002 - writes nothing
        """Copy."""
        import torch

        for name, value in self.state.items():
            self.copy[name].copy_(value, non_blocking=True)
        torch.cuda.synchronize()


class DcpPinned(Case):
    """torch's own asynchronous save: a process, staging in pinned shared memory."""

    def prepare(self) -> None:
        """Import, and make what stages."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.dcp, self.kind = dcp, AsyncCheckpointerType.PROCESS
        self.stager = DefaultStager(StagingOptions(True, True, True, True))

    def save(self, number: int) -> None:
        """Schedule."""
        self.done = self.dcp.async_save(
            self.state,
            storage_writer=self.dcp.FileSystemWriter(f"{self.root}/{number}"),
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

        with open(f"{self.root}/{number}", "wb") as file:
            torch.save(self.state, file)
            os.fsync(file.fileno())


def run(case: str, options: argparse.Namespace) -> None:
    """Measure one case in this process."""
    import torch
    import torch.distributed as dist

    os.makedirs(options.root, exist_ok=True)
    # DCP's stager asks the default group which device it stages from.
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    state: dict[str, Any] = {
        f"layer{i}": torch.rand(options.mb * MB // 4 // 64, device="cuda") for i in range(64)
    }
    kinds = (PinnedCopy, NvrxDcp, NvrxTorch, DcpPinned, TorchSave)
    one = dict(zip(CASES, kinds, strict=True))[case](options.root, state)
    rows = []
    for number in range(options.repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        one.save(number)
        stall = time.perf_counter()
        for value in state.values():
            value.add_(1e-3)
        torch.cuda.synchronize()
        stepped = time.perf_counter()
        one.finish()
        rows.append((stall - begin, stepped - stall, time.perf_counter() - stall))
        for name in os.listdir(options.root):
            path = os.path.join(options.root, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    one.close()
    dist.destroy_process_group()
    stall_s, next_step_s, write_s = (
        round(statistics.median(row[column] for row in rows[1:]), 4) for column in range(3)
    )
    emit(
        case=case, install=options.label, mb=options.mb, first_stall_s=round(rows[0][0], 4),
        stall_s=stall_s, next_step_s=next_step_s, write_s=write_s,
        device=torch.cuda.get_device_name(),
    )  # fmt: skip


def main() -> None:
    """Run all cases, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="another interpreter with the same import names")
    parser.add_argument("--mb", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", default="/dev/shm/nvrx-bench-gpu")  # noqa: S108
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--case", choices=CASES, help="run one case here")
    parser.add_argument("--label", default="this one")
    options = parser.parse_args()
    if options.case:
        run(options.case, options)
        return
    runs = [(sys.executable, case, options.label) for case in options.cases.split(",")]
    if options.python:
        runs += [(options.python, case, "other") for case in ("nvrx_dcp", "nvrx_torch")]
    words = ["--mb", str(options.mb), "--repeats", str(options.repeats), "--root", options.root]
    for python, case, label in runs:
        command = [python, os.path.abspath(__file__), "--case", case, "--label", label, *words]
        subprocess.run(command, check=False, timeout=600)
    shutil.rmtree(options.root, ignore_errors=True)


if __name__ == "__main__":
    main()
