# SPDX-License-Identifier: Apache-2.0
"""How much memory this process could still get: the machine's, or its control group's if less."""

from __future__ import annotations

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
