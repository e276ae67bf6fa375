# SPDX-License-Identifier: Apache-2.0
"""A list of the processes of given groups for log lines; it signals nobody."""

import os
from collections.abc import Collection
from typing import Final, TypedDict

from nvidia_resiliency_ext.shared_utils import procfs

__all__ = ["ProcessEntry", "get_processes_by_pgids"]

_STATUS_WORDS: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "disk-sleep",
    "T": "stopped",
    "t": "tracing-stop",
    "Z": "zombie",
    "X": "dead",
    "x": "dead",
    "K": "wake-kill",
    "W": "waking",
    "I": "idle",
    "P": "parked",
}


class ProcessEntry(TypedDict):
    """One process; `status` in the words that psutil uses."""

    pid: int
    ppid: int
    pgid: int
    name: str
    cmdline: list[str]
    status: str


def get_processes_by_pgids(
    pgids: Collection[int], exclude_launcher: bool = True
) -> list[ProcessEntry]:
    """Return all processes of the groups, zombies included, ordered by pid.

    Args:
        pgids: process groups.
        exclude_launcher: leave out the calling process.
    """
    wanted = frozenset(pgids)
    excluded = os.getpid() if exclude_launcher else -1
    entries: list[ProcessEntry] = []
    for pid in sorted(procfs.pids()):
        stat = procfs.read_stat(pid) if pid != excluded else None
        if stat is None or stat.pgid not in wanted:
            continue
        arguments = procfs.cmdline(pid).rstrip(b"\0").split(b"\0")
        entries.append(
            ProcessEntry(
                pid=pid,
                ppid=stat.ppid,
                pgid=stat.pgid,
                name=stat.comm,
                cmdline=[os.fsdecode(argument) for argument in arguments if arguments != [b""]],
                status=_STATUS_WORDS.get(stat.state, stat.state),
            )
        )
    return entries
