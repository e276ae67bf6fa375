# SPDX-License-Identifier: Apache-2.0
"""Tells the writer what a cycle is: it knows the job's names and the short form of node lists."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._core.infra import (
    hostnames_to_slurm_nodelist,
    ranks_to_range_str,
    slurm_sort_addrs,
)
from nvidia_resiliency_ext.fault_tolerance._logs.lines import cycle_log_file
from nvidia_resiliency_ext.shared_utils.job_metadata import job_id_from_env

from .cycle_files import CycleInfoWriter, attempt_of, current_name, iso_utc, short_host_names

__all__ = ["CycleInfoReporter", "CycleInfoRoundSnapshot", "utc_iso_now"]


def utc_iso_now() -> str:
    """Return the time as the files have it: ISO 8601, UTC, with Z."""
    return iso_utc(time.time())


@dataclass(frozen=True)
class CycleInfoRoundSnapshot:
    """What a complete rendezvous says about a cycle.

    Attributes:
        cycle_number: The cycle.
        active_node_addrs: Nodes that work.
        standby_node_addrs: Nodes that wait.
        active_ranks: One rank for each of `active_node_addrs`, in that order.
        cycle_log_file: The cycle's log; empty takes it from the reporter's prefix.
    """

    cycle_number: int
    active_node_addrs: Sequence[str] | None = None
    standby_node_addrs: Sequence[str] | None = None
    active_ranks: Sequence[int] | None = None
    cycle_log_file: str = ""


class CycleInfoReporter:
    """Reports the cycles of one job, one after another; from any thread.

    Args:
        cycle_info_dir: The directory of the files.
        cycle_log_prefix: What the names of cycle logs are made of.
        cycle_info_job_id: The job's name; None takes the scheduler's.
        attempt_index: Which attempt of the scheduler this is; None asks it.
        writer: Who writes; None makes one.
    """

    def __init__(
        self,
        cycle_info_dir: str,
        cycle_log_prefix: str | None = None,
        cycle_info_job_id: str | None = None,
        attempt_index: int | None = None,
        writer: CycleInfoWriter | None = None,
    ) -> None:
        self._job_id = job_id_from_env() or "" if cycle_info_job_id is None else cycle_info_job_id
        restarts = os.environ.get(_env.SLURM_RESTART_COUNT)
        self._attempt_index = attempt_of(restarts) if attempt_index is None else attempt_index
        self._cycle_log_prefix = cycle_log_prefix
        self._writer = writer if writer is not None else CycleInfoWriter(cycle_info_dir)
        self._lock = threading.Lock()  # guards the next field
        self._open_cycle: int | None = None

    @staticmethod
    def current_cycle_info_path(cycle_info_dir: str, job_id: str) -> str:
        """Return the path of the link to the current cycle's file.

        Args:
            cycle_info_dir: Directory of the files.
            job_id: The job.
        """
        return os.path.join(os.path.abspath(cycle_info_dir), current_name(job_id))

    @property
    def job_id(self) -> str:
        """The job's name in the names of files."""
        return self._job_id

    def report_cycle_start(self, snapshot: CycleInfoRoundSnapshot) -> bool:
        """Report that a cycle begins; return whether its file will be written.

        Args:
            snapshot: The cycle, its nodes and its log.
        """
        with self._lock:
            self._open_cycle = snapshot.cycle_number
        return self._writer.write_cycle_start(*self._fields(snapshot))

    def report_cycle_goes_on(self, snapshot: CycleInfoRoundSnapshot) -> bool:
        """Report that this reporter continues a cycle that another one began.

        Args:
            snapshot: The cycle, its nodes and its log.
        """
        with self._lock:
            self._open_cycle = snapshot.cycle_number
        return self._writer.take_up_cycle(*self._fields(snapshot))

    def _fields(
        self, snapshot: CycleInfoRoundSnapshot
    ) -> tuple[str, int, int, str, str, str, str, str]:
        log_file = snapshot.cycle_log_file
        if not log_file and self._cycle_log_prefix:
            log_file = cycle_log_file(self._cycle_log_prefix, snapshot.cycle_number)
        nodes, ranks = _in_order(snapshot)
        return (
            self._job_id,
            self._attempt_index,
            snapshot.cycle_number,
            utc_iso_now(),
            log_file,
            hostnames_to_slurm_nodelist(nodes),
            hostnames_to_slurm_nodelist(short_host_names(list(snapshot.standby_node_addrs or ()))),
            ranks_to_range_str(ranks),
        )

    def report_cycle_end(self) -> bool:
        """Report that the present cycle is over; False when there is none."""
        with self._lock:
            cycle, self._open_cycle = self._open_cycle, None
        if cycle is None:
            return False
        return self._writer.update_cycle_end(
            self._job_id, self._attempt_index, cycle, utc_iso_now()
        )

    def report_end_of(self, cycle: int) -> bool:
        """Report the end of a cycle, whichever reporter began it; a second end changes nothing.

        Args:
            cycle: Number of the cycle.
        """
        with self._lock:
            if self._open_cycle == cycle:
                self._open_cycle = None
        return self._writer.end_cycle_once(self._job_id, self._attempt_index, cycle, utc_iso_now())

    def shutdown(self, *, ends_cycle: bool = True) -> None:
        """Write what is queued, for 2 s at most.

        Args:
            ends_cycle: Also end the open cycle. Default True; False if another reporter continues
                it.
        """
        with self._lock:
            self._open_cycle = None
        if ends_cycle:
            self._writer.shutdown()
        else:
            self._writer.shutdown(ends_cycle=False)


def _in_order(snapshot: CycleInfoRoundSnapshot) -> tuple[list[str], list[int]]:
    """Return nodes in Slurm's order, and each one's rank at the same place."""
    nodes = short_host_names(list(snapshot.active_node_addrs or ()))
    ranks = list(snapshot.active_ranks or ())
    if len(nodes) != len(ranks) or len(set(nodes)) != len(nodes):
        return nodes, ranks
    rank_of = dict(zip(nodes, ranks, strict=True))
    ordered = slurm_sort_addrs(nodes)
    return ordered, [rank_of[node] for node in ordered]
