# SPDX-License-Identifier: Apache-2.0
"""Reads from /sys where CPUs and GPUs of this machine sit, for torchrun's `--numa-binding`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence

from nvidia_resiliency_ext.shared_utils.rank_sets import parse_ranks

_DATA_CACHES = frozenset({"Data", "Unified"})


class MachineTopology:
    """The usable (`allowed`) CPUs and the GPUs in /sys; ValueError: something is not there."""

    def __init__(self, root: str = "/sys", allowed: Collection[int] | None = None) -> None:
        self._root = root
        self.allowed = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)

    def node_of_gpu(self, address: str) -> int:
        """Return the NUMA node of a PCI device; machines with one node say -1, which is 0."""
        text = self._read(f"bus/pci/devices/{address}/numa_node")
        try:
            return max(int(text), 0)
        except ValueError:
            raise ValueError(f"NUMA node of {address}: {text[:40]!r} is no number") from None

    def nodes(self) -> Sequence[int]:
        return sorted(read_ranges(self._read("devices/system/node/possible")))

    def cpus_of_node(self, node: int) -> frozenset[int]:
        """Return the usable CPUs of a NUMA node; none of one that is possible but not there."""
        if not os.path.isdir(f"{self._root}/devices/system/node/node{node}"):
            return frozenset()
        return read_ranges(self._read(f"devices/system/node/node{node}/cpulist")) & self.allowed

    def socket_of_cpu(self, cpu: int) -> int:
        return int(self._read(f"devices/system/cpu/cpu{cpu}/topology/physical_package_id"))

    def core_of_cpu(self, cpu: int) -> frozenset[int]:
        return read_ranges(self._read(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))

    def cache_of_cpu(self, cpu: int) -> frozenset[int]:
        """Return the CPUs that share the highest data cache with one."""
        folder = f"devices/system/cpu/cpu{cpu}/cache"
        try:
            names = os.listdir(f"{self._root}/{folder}")
        except OSError as error:
            raise ValueError(f"{self._root}/{folder}: {error.strerror}") from None
        shared: dict[int, str] = {}
        for name in names:
            is_index = name.removeprefix("index").isdecimal()
            if is_index and self._read(f"{folder}/{name}/type") in _DATA_CACHES:
                level = int(self._read(f"{folder}/{name}/level"))
                shared.setdefault(level, self._read(f"{folder}/{name}/shared_cpu_list"))
        found = read_ranges(shared[max(shared)]) if shared else frozenset()
        if not found:
            raise ValueError(f"{self._root}/{folder}: names no cache that CPUs share")
        return found

    def _read(self, path: str) -> str:
        try:
            with open(f"{self._root}/{path}", encoding="ascii") as file:
                return file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ValueError(f"{self._root}/{path}: {why}") from None


def read_ranges(text: str) -> frozenset[int]:
    """Return the numbers of a list of CPUs or NUMA nodes such as `0-2,4`."""
    try:
        return frozenset(parse_ranks(text))
    except ValueError:
        raise ValueError(f"{text[:80]!r} is no list of CPUs or NUMA nodes") from None


def cpus_near(
    mode: str, gpus: Sequence[str], rank: int, topology: MachineTopology
) -> frozenset[int]:
    """Return the CPUs of one local rank, as torchrun chooses them."""
    node = topology.node_of_gpu(gpus[rank])
    near = topology.cpus_of_node(node)
    if not near:
        raise ValueError(f"none of the CPUs of NUMA node {node}, where it sits, may be used here")
    if mode == "node":
        return near
    if mode == "socket":
        socket = topology.socket_of_cpu(min(near))
        # Memory of a GPU is a NUMA node without CPUs on some machines.
        nodes = [cpus for cpus in map(topology.cpus_of_node, topology.nodes()) if cpus]
        here = [cpus for cpus in nodes if topology.socket_of_cpu(min(cpus)) == socket]
        return frozenset[int]().union(*here)
    sharing = [gpu for gpu in range(len(gpus)) if topology.node_of_gpu(gpus[gpu]) == node]
    position = sharing.index(rank)
    if mode == "exclusive":
        cores = _grouped(near, topology.core_of_cpu)
        if len(cores) < len(sharing):
            raise ValueError(
                f"NUMA node {node} has {len(cores)} cores to use for {len(sharing)} GPUs"
            )
        each, left_over = divmod(len(cores), len(sharing))  # The first ones get the rest.
        start = position * each + min(position, left_over)
        return frozenset[int]().union(*cores[start : start + each + (position < left_over)])
    caches = sorted(_grouped(near, topology.cache_of_cpu), key=len, reverse=True)
    return caches[position % len(caches)]


def _grouped(
    cpus: Iterable[int], whole_of: Callable[[int], frozenset[int]]
) -> list[frozenset[int]]:
    """Group the usable CPUs that share a resource, in the order of each group's first CPU."""
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(min(whole_of(cpu)), set()).add(cpu)
    return [frozenset(groups[first]) for first in sorted(groups)]
