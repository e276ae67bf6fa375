# SPDX-License-Identifier: Apache-2.0
"""What this process could still get: memory, and processors with nothing to do."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_FILES = (
    # (limit, used): version 2, then version 1, as seen from inside a container.
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def available_bytes() -> int | None:
    """Return bytes that can be had without swapping, or None where nothing says."""
    known = [
        value
        for value in (_machine_bytes(), *map(_group_bytes, _CGROUP_FILES))
        if value is not None
    ]
    return min(known, default=None)


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


_STAT = Path("/proc/stat")
# Columns of a processor's line after its name: user nice system idle iowait ...
_IDLE_COLUMNS = slice(3, 5)
_COUNTED_COLUMNS = 8  # guest time, behind them, is part of user time


class IdleMeter:
    """Counts idle processors between one question and the next.

    Args:
        cores: The processors that count; those that this process may use if None.
        stat: Where the kernel's counters are read.
    """

    def __init__(self, cores: frozenset[int] | None = None, stat: Path = _STAT) -> None:
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
            lines = self._stat.read_text(encoding="ascii").splitlines()
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
