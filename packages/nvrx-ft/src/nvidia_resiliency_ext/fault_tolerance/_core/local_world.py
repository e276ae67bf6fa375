# SPDX-License-Identifier: Apache-2.0
"""What this node offers its workers: how many it runs, and memory and processors left over."""

from __future__ import annotations

import os
from collections.abc import Mapping

from nvidia_resiliency_ext.fault_tolerance import _env

MOST_WORKERS = 65536  # No machine runs as many; a slip of the finger must not fill its memory.


def determine_local_world_size(nproc_per_node: str) -> int:
    """Return the number of workers here: `nproc_per_node` is a number, "cpu", "gpu" or "auto".

    Raises:
        ValueError: The value is none of these, the number is too large, or there is no GPU.
    """
    return local_world_size(nproc_per_node, os.environ)


def local_world_size(nproc_per_node: str, environ: Mapping[str, str], root: str = "/") -> int:
    """Return the number of workers that `nproc_per_node` means in an environment and file tree."""
    if nproc_per_node == "cpu":
        return len(os.sched_getaffinity(0))
    if nproc_per_node in ("gpu", "auto"):
        gpus = count_gpus(environ, root)
        if gpus == 0 and nproc_per_node == "gpu":
            raise ValueError(
                "--nproc-per-node gpu: no GPU is visible here; check /dev/nvidia* and "
                "CUDA_VISIBLE_DEVICES, or give a number"
            )
        return gpus or len(os.sched_getaffinity(0))
    try:
        count = int(nproc_per_node)
    except ValueError:
        count = 0
    if not 0 < count <= MOST_WORKERS:
        raise ValueError(
            f"--nproc-per-node: {nproc_per_node!r} is not a number of workers from 1 to "
            f"{MOST_WORKERS}, cpu, gpu or auto"
        )
    return count


def count_gpus(environ: Mapping[str, str], root: str = "/") -> int:
    """Return the number of GPUs that a worker would see; `root` holds dev and proc."""
    return count_visible(environ, _present_gpus(root))


def count_visible(environ: Mapping[str, str], present: int) -> int:
    """Return how many of the GPUs that are present a worker would see."""
    visible = environ.get(_env.CUDA_VISIBLE_DEVICES)
    if visible is None or present == 0:
        return present
    count = 0
    for name in visible.split(","):
        entry = name.strip()
        # CUDA stops at the first entry that is no device of the machine.
        if entry.isdecimal():
            if int(entry) >= present:
                break
        elif not entry.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return count


def devices_of_ranks(environ: Mapping[str, str], nproc: int) -> tuple[str, ...]:
    """Return the one device of each local rank with `--virtual-local-rank`.

    Its entry of CUDA_VISIBLE_DEVICES, else the rank itself; too short a list raises ValueError.
    """
    visible = environ.get(_env.CUDA_VISIBLE_DEVICES)
    if visible is None:
        return tuple(str(rank) for rank in range(nproc))
    entries = tuple(entry.strip() for entry in visible.split(","))
    if nproc > len(entries):
        raise ValueError(
            f"--virtual-local-rank: {nproc} workers need a device each, and "
            f"{_env.CUDA_VISIBLE_DEVICES}={visible} names {len(entries)}"
        )
    return entries[:nproc]


def _present_gpus(root: str) -> int:
    # A container has the device nodes it may use; /proc may list the whole machine's.
    nodes = [name for name in _listing(root, "dev") if name.removeprefix("nvidia").isdecimal()]
    nodes = [name for name in nodes if name.startswith("nvidia")]
    return len(nodes) or len(_listing(root, "proc/driver/nvidia/gpus"))


def _listing(root: str, path: str) -> list[str]:
    try:
        return os.listdir(os.path.join(root, path))
    except OSError:
        return []


_CGROUP_FILES = (
    # (limit, used): version 2, then version 1, as seen from inside a container.
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int | None:
    """Return bytes that can be had without swapping, or None where nothing says."""
    values = (_machine_bytes(), *map(_group_bytes, _CGROUP_FILES))
    return min((value for value in values if value is not None), default=None)


def _machine_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return None
    return None


def _group_bytes(paths: tuple[str, str]) -> int | None:
    numbers = []
    for path in paths:
        try:
            with open(path, encoding="ascii") as file:
                numbers.append(int(file.read()))
        except (OSError, ValueError):  # "max" is no number: no limit.
            return None
    limit, used = numbers
    return max(0, limit - used)


# Columns of a processor's line after its name: user nice system idle iowait ...
_IDLE_COLUMNS = slice(3, 5)
_COUNTED_COLUMNS = 8  # guest time, behind them, is part of user time


class IdleMeter:
    """Counts idle processors between one question and the next."""

    def __init__(
        self, cores: frozenset[int] | None = None, stat: str | os.PathLike[str] = "/proc/stat"
    ) -> None:
        self._cores = frozenset(os.sched_getaffinity(0)) if cores is None else cores
        self._stat = stat
        self._last = self._counters()

    def idle_cores(self) -> float:
        """Return how many processors were idle on average since the last call; 0.0 if unknown."""
        last, self._last = self._last, self._counters()
        shares = [
            (idle - last[core][0]) / (total - last[core][1])
            for core, (idle, total) in self._last.items()
            if core in last and total > last[core][1]
        ]
        return max(0.0, sum(shares))

    def _counters(self) -> dict[int, tuple[int, int]]:
        """Return idle and all ticks by processor."""
        try:
            with open(self._stat, encoding="ascii") as file:
                lines = file.read().splitlines()
        except (OSError, ValueError):
            return {}
        found: dict[int, tuple[int, int]] = {}
        for line in lines:
            name, *columns = line.split()
            number = name.removeprefix("cpu")
            if name == number or not number.isdecimal() or int(number) not in self._cores:
                continue
            try:
                ticks = [int(column) for column in columns[:_COUNTED_COLUMNS]]
            except ValueError:
                continue
            found[int(number)] = (sum(ticks[_IDLE_COLUMNS]), sum(ticks))
        return found
