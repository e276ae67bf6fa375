# SPDX-License-Identifier: Apache-2.0
"""Owns the end of everything that a run started; it does not decide when that is."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._env import RUN_ID
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import PidHandle

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["SWEEP_LIMIT_S", "sweep"]

SWEEP_LIMIT_S = 1.5
QUIET_SCANS = 2
_ROUND_S = 0.05


def sweep(
    run_id: str, pgids: Collection[int], *, spare: Collection[int], limit_s: float = SWEEP_LIMIT_S
) -> list[int]:
    """Kill the process groups and every process that carries the run's id, until none is left.

    Such a process is killed with its whole group, unless its session is ours or that of a spared
    one: a signal to a group reaches also what it forks at that moment.

    Args:
        run_id: Value of NVRX_RUN_ID in the environment of the run's processes.
        pgids: Process groups of the workers.
        spare: Processes that are not to be touched, such as the launcher that asked for this.
        limit_s: When to give up.

    Returns:
        The processes that were still there at the end.
    """
    give_up_at = time.monotonic() + limit_s
    own_group = os.getpgid(0)
    keepers = (procfs.read_stat(pid) for pid in (os.getpid(), *spare))
    kept_sessions = {stat.sid for stat in keepers if stat is not None}
    groups = {pgid for pgid in pgids if pgid > 1 and pgid != own_group}
    quiet_scans = 0
    while True:
        # Scanned anew each time: a process may have forked between the scan and its death.
        strays = procfs.processes_with_environ(RUN_ID, run_id)
        groups |= {stat.pgid for stat in strays if stat.sid not in kept_sessions}
        for pgid in groups:
            _kill_group(pgid)
        found = {*(stat.pid for stat in strays), *procfs.pids_in_groups(groups)}
        found -= {os.getpid(), *spare}
        # One look may miss a process that comes and goes.
        quiet_scans = 0 if found else quiet_scans + 1
        if quiet_scans == QUIET_SCANS:
            return []
        handles = [handle for pid in found if (handle := _kill(pid, run_id, groups)) is not None]
        round_ends_at = min(time.monotonic() + _ROUND_S, give_up_at)
        for handle in handles:
            handle.wait(max(0.0, round_ends_at - time.monotonic()))
            handle.close()
        if time.monotonic() >= give_up_at:
            return sorted(pid for pid in found if procfs.is_running(pid))


def _kill_group(pgid: int) -> None:
    for sig in (signal.SIGKILL, signal.SIGCONT):
        try:
            os.killpg(pgid, sig)
        except (ProcessLookupError, PermissionError):
            return  # nobody left, or a recycled number that belongs to somebody else


def _kill(pid: int, run_id: str, groups: Collection[int]) -> PidHandle | None:
    try:
        handle = PidHandle(pid)
    except OSError:
        return None  # gone, or no descriptor is left: its turn comes when this round's are closed
    # Asked again now that the handle holds the process: the number may have been recycled.
    stat = procfs.read_stat(pid)
    is_in_group = stat is not None and stat.pgid in groups
    if not is_in_group and procfs.environ_value(pid, RUN_ID) != run_id:
        handle.close()
        return None
    try:
        handle.signal(signal.SIGKILL)
        handle.signal(signal.SIGCONT)
    except PermissionError:
        handle.close()
        return None
    return handle
