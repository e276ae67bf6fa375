# SPDX-License-Identifier: Apache-2.0
"""Reads from /sys where CPUs and GPUs of this machine sit; the root may be another folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

__all__ = ["MachineTopology", "ranges_text", "read_ranges"]

_DATA_CACHES = frozenset({"Data", "Unified"})
_MOST_CPUS = 1 << 16


class MachineTopology:
    """The machine's own word on its CPUs; see `numa.Topology`.

    Args:
        root: Where /sys is.
        allowed: The CPUs that may be used; None: those of this process.
    """

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
        """Return all NUMA nodes."""
        return sorted(read_ranges(self._read("devices/system/node/possible")))

    def cpus_of_node(self, node: int) -> frozenset[int]:
        """Return the CPUs of a NUMA node; none of one that is possible but not there."""
        if not os.path.isdir(f"{self._root}/devices/system/node/node{node}"):
            return frozenset()
        return read_ranges(self._read(f"devices/system/node/node{node}/cpulist"))

    def socket_of_cpu(self, cpu: int) -> int:
        """Return the socket of a CPU."""
        return int(self._read(f"devices/system/cpu/cpu{cpu}/topology/physical_package_id"))

    def core_of_cpu(self, cpu: int) -> frozenset[int]:
        """Return the CPUs of the same core."""
        return read_ranges(self._read(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))

    def cache_of_cpu(self, cpu: int) -> frozenset[int]:
        """Return the CPUs that share the highest data cache with one."""
        folder = f"devices/system/cpu/cpu{cpu}/cache"
        try:
            names = os.listdir(f"{self._root}/{folder}")
        except OSError as error:
            raise ValueError(f"{self._root}/{folder}: {error.strerror}") from None
        highest, shared = -1, ""
        for name in names:
            if not name.removeprefix("index").isdecimal():
                continue
            if self._read(f"{folder}/{name}/type") not in _DATA_CACHES:
                continue
            level = int(self._read(f"{folder}/{name}/level"))
            if level > highest:
                highest, shared = level, self._read(f"{folder}/{name}/shared_cpu_list")
        found = read_ranges(shared)
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
    """Return the numbers of a list such as `0-2,4`.

    Raises:
        ValueError: It is no such list.
    """
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text[:80]!r} is no list of numbers")
        end = int(last or first)
        if end >= _MOST_CPUS:
            raise ValueError(f"{text[:80]!r} is no list of CPUs or NUMA nodes")
        found.update(range(int(first), end + 1))
    return frozenset(found)


def ranges_text(numbers: Collection[int]) -> str:
    """Return numbers as `0-2,4`."""
    parts: list[str] = []
    ordered = sorted(numbers)
    start = 0
    for index, number in enumerate(ordered):
        if index + 1 == len(ordered) or ordered[index + 1] != number + 1:
            first = ordered[start]
            parts.append(str(first) if first == number else f"{first}-{number}")
            start = index + 1
    return ",".join(parts)
