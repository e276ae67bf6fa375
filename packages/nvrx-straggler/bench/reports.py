# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of a report: two real ranks over gloo, and rank 0 of a simulated larger job.

Each figure comes with the processor time of the thread that makes the report, which other programs
on the machine disturb less than wall time.

The simulated job has every collective answered in the process, with rows like those of rank 0 for
all ranks, so that a figure holds all of rank 0's own work and none of the network's. Names are
exchanged alone, with ranks that have 16 different sets of 400 names between them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

REPEATS = 15
SECTIONS = 10


class Times:
    """Wall and processor times of the blocks that it encloses, ms."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.processor: list[float] = []

    def __enter__(self) -> None:
        self._begin = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        ended = time.perf_counter(), time.thread_time()
        self.wall.append((ended[0] - self._begin[0]) * 1e3)
        self.processor.append((ended[1] - self._begin[1]) * 1e3)

    def show(self, figure: str, part: slice = slice(None), **more: float) -> None:
        """Print the medians and the best repeat as one JSON line, with the machine's load."""
        line = {
            "figure": figure,
            "value": round(statistics.median(self.wall[part]), 3),
            "least": round(min(self.wall[part]), 3),
            "processor": round(statistics.median(self.processor[part]), 3),
        }
        print(json.dumps({**line, **more, "load": round(os.getloadavg()[0], 1)}), flush=True)


def summaries(count: int, kind: str, slower: float, length: int = 180) -> dict[str, Any]:
    """Return summaries as a detector's window has them."""
    from nvidia_resiliency_ext.attribution.straggler.statistics import SummaryTable

    names = [f"{kind}_{number}_".ljust(length, "x") for number in range(count)]
    times = 1.0 + np.arange(count) % 97
    columns = [times, times, times * slower, times * slower, 0 * times, 0 * times + 100]
    return SummaryTable(names, np.stack(columns, axis=1))  # type: ignore[return-value]


def two_ranks(kernels: int) -> None:
    """Run this rank's part and print, on rank 0, the first report and the median of others.

    Reports of a generator use the group that is there; the first one of a detector with sections
    only also has the ranks meet and makes their own group.
    """
    dist.init_process_group("gloo")
    from nvidia_resiliency_ext.attribution.straggler import Detector
    from nvidia_resiliency_ext.attribution.straggler.reporting import ReportGenerator

    rank = dist.get_rank()
    sections = summaries(SECTIONS, "section", 1.0 + rank, 20)
    first, steady = Times(), Times()
    for _ in range(REPEATS):
        table = summaries(kernels, "kernel", 1.0 + rank)
        generator = ReportGenerator("all", node_name=f"node{rank}")
        dist.barrier()
        for taken in (first, steady, steady):
            with taken:
                generator.generate_report(sections, table)
            dist.barrier()
    met = Times()
    for _ in range(REPEATS):
        Detector.initialize(cuda_profiling="off", control=False)
        for number in range(SECTIONS):
            with Detector.detection_section(f"section{number}"):
                pass
        dist.barrier()
        with met:
            Detector.generate_report()
        dist.barrier()
        Detector.shutdown()
    if rank == 0:
        met.show("two_ranks_meet_ms", slice(1, None), sections=SECTIONS)
        # The very first one also opens connections of gloo.
        first.show("two_ranks_very_first_ms", slice(0, 1), kernels=kernels)
        first.show("two_ranks_first_ms", slice(1, None), kernels=kernels)
        steady.show("two_ranks_steady_ms", kernels=kernels)
    dist.destroy_process_group()


class Simulated:
    """Answers collectives of rank 0 as a job of many ranks like it would."""

    def __init__(self, ranks: int, name_sets: int = 1) -> None:
        self.ranks, self.name_sets = ranks, name_sets
        self.received = 0

    def rows(self, row: torch.Tensor, _group: object = None) -> torch.Tensor:
        """Return the rows of all ranks."""
        gathered = row.repeat(self.ranks)
        self.received += gathered.nbytes
        return gathered

    def reduce(self, tensor: torch.Tensor, **_options: object) -> None:
        """Leave rank 0's values, which all ranks have."""
        self.received += tensor.nbytes

    def gather(self, tensor: torch.Tensor, _group: object = None) -> list[torch.Tensor]:
        """Return the tensors of all ranks."""
        return list(tensor.repeat(self.ranks, 1).unbind(0))

    def install(self) -> None:
        """Put these collectives in the place of those of torch.distributed."""
        from nvidia_resiliency_ext.attribution.straggler import dist_utils

        replaced: dict[str, Callable[..., Any]] = {
            "get_world_size": lambda _group=None: self.ranks,
            "get_rank": lambda _group=None: 0,
            "get_device_for_backend": lambda _group=None: torch.device("cpu"),
            "all_gather_rows": self.rows,
            "gather_on_rank0": self.gather,
            "all_reduce": self.reduce,
        }
        for name, function in replaced.items():
            setattr(dist_utils, name, function)


def simulated(ranks: int, kernels: int) -> None:
    """Print the steady report of rank 0, and `identify_stragglers` on it."""
    from nvidia_resiliency_ext.attribution.straggler.reporting import ReportGenerator

    job = Simulated(ranks)
    job.install()
    generator = ReportGenerator("all", node_name="node0")
    table, sections = summaries(kernels, "kernel", 1.0), summaries(SECTIONS, "section", 1.0, 20)
    generator.generate_report(sections, table)
    taken, named = Times(), Times()
    for _ in range(3 * REPEATS):
        with taken:
            report = generator.generate_report(sections, table)
        with named:
            report.identify_stragglers()
    taken.show("simulated_steady_ms", ranks=ranks, kernels=kernels)
    named.show("identify_stragglers_ms", ranks=ranks)


class SimulatedNames(Simulated):
    """A job in which rank r has the set of names r modulo `name_sets`."""

    def __init__(self, ranks: int, packed: list[bytes]) -> None:
        super().__init__(ranks, len(packed))
        self.packed = packed

    def rows(self, row: torch.Tensor, _group: object = None) -> torch.Tensor:
        """Return the announcements of all ranks."""
        from nvidia_resiliency_ext.attribution.straggler import name_mapper

        announced = np.zeros((self.ranks, 3), dtype=np.int64)
        for number, data in enumerate(self.packed):
            announced[number :: self.name_sets, :2] = np.frombuffer(
                name_mapper.digest_of_message(data), dtype=np.int64
            )
            announced[number :: self.name_sets, 2] = len(data)
        assert (announced[0] == row.numpy()).all()
        self.received += announced.nbytes
        return torch.from_numpy(announced.reshape(-1))

    def reduce(self, tensor: torch.Tensor, **_options: object) -> None:
        """Fill in the names that the other ranks contribute."""
        everything = np.frombuffer(b"".join(self.packed), dtype=np.uint8)
        own = len(self.packed[0])
        tensor[own:] = torch.from_numpy(everything[own:].copy())
        self.received += tensor.nbytes


def names(ranks: int, sets: int, kernels: int) -> None:
    """Print time and bytes of the exchange of names alone."""
    import zlib

    from nvidia_resiliency_ext.attribution.straggler import name_mapper

    lists = [
        [f"void cutlass::Kernel_{number}_of_{n}_".ljust(180, "x") for n in range(kernels)]
        for number in range(sets)
    ]
    packed = [zlib.compress(name_mapper.encode_names(item, []), 1) for item in lists]
    job = SimulatedNames(ranks, packed)
    job.install()
    taken = Times()
    for _ in range(REPEATS):
        job.received = 0
        mapper = name_mapper.NameMapper()
        with taken:
            mapper.gather_and_assign_ids(lists[0], [])
    assert mapper.kernel_counter == sets * kernels
    received = round(job.received / 1e6, 3)
    taken.show("names_ms", ranks=ranks, sets=sets, kernels=kernels, received_mb=received)


def in_two_processes(python: str, kernels: int) -> None:
    """Start both ranks of `two_ranks` and wait for them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, __file__, "--here", "two", "--kernels", str(kernels)]
        processes = []
        for rank in range(2):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            env["MASTER_PORT"] = str(20_000 + os.getpid() % 20_000)
            processes.append(subprocess.Popen(command, env=env, cwd=folder))
        for process in processes:
            if process.wait(600) != 0:
                raise SystemExit("a rank has failed")


def main() -> None:
    """Measure everything, or one part in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--kernels", type=int, default=4000, help="of the two real ranks")
    parser.add_argument("--here", choices=["two", "simulated", "names"], help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=64, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.here == "two":
        two_ranks(options.kernels)
    elif options.here == "simulated":
        simulated(options.ranks, 400)
    elif options.here == "names":
        names(options.ranks, 16, 400)
    else:
        in_two_processes(options.python, options.kernels)
        for part, ranks in (
            *(("simulated", ranks) for ranks in (64, 4096, 16384)),
            ("names", 16384),
        ):
            command = [options.python, __file__, "--here", part, "--ranks", str(ranks)]
            subprocess.run(command, check=True, timeout=600)


if __name__ == "__main__":
    main()
