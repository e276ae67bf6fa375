# SPDX-License-Identifier: Apache-2.0
"""The files about cycles: their content and names, and the thread that writes them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone

from nvidia_resiliency_ext.fault_tolerance._core import infra
from nvidia_resiliency_ext.fault_tolerance._logs.lines import cycle_log_file
from nvidia_resiliency_ext.shared_utils.job_metadata import attempt_index_from_env, job_id_from_env
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file

logger = logging.getLogger("nvrx")
SHUTDOWN_S = 2.0
_MOST_WAITING = 256
_LARGEST_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CycleInfo:
    """One cycle, as other programs read it; times are ISO 8601 UTC, lists are Slurm ranges."""

    job_id: str
    attempt_index: int
    cycle_number: int
    cycle_start_time: str = ""
    cycle_end_time: str = ""
    cycle_log_file: str = ""
    active_nodes: str = ""
    standby_nodes: str = ""
    generation: int = 0
    active_ranks: str = ""

    @property
    def file_name(self) -> str:
        return file_name(self.job_id, self.attempt_index, self.cycle_number)

    def ended(self, at: str) -> CycleInfo:
        """Return the next version: the cycle is over."""
        return replace(self, cycle_end_time=at, generation=self.generation + 1)

    def to_json(self) -> bytes:
        """Return the file's content; a 64-bit number is a string in protobuf's JSON."""
        fields = {**asdict(self), "generation": str(self.generation)}
        return (json.dumps(fields, indent=2) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> CycleInfo:
        """Parse the JSON of a cycle file. Raises ValueError."""
        try:
            fields = json.loads(data)
            return cls(**{**fields, "generation": int(fields["generation"])})
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"no cycle information: {error}") from error


def file_name(job_id: str, attempt_index: int, cycle_number: int) -> str:
    _check_job_id(job_id)
    return f"cycle_info.{job_id}.{attempt_index}.{cycle_number}"


def current_name(job_id: str) -> str:
    """Return the name of the link to the present cycle's file."""
    _check_job_id(job_id)
    return f"cycle_info.{job_id}.current"


def _check_job_id(job_id: str) -> None:
    if "/" in job_id or "\0" in job_id or job_id in (os.curdir, os.pardir):
        raise ValueError(f"the job id {job_id!r} cannot be part of a file name")


def utc_iso_now() -> str:
    """Return the time as the files have it: ISO 8601, UTC, with Z."""
    now = datetime.now(timezone.utc)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class CycleInfoWriter:
    """Writes `cycle_info.<job>.<attempt>.<cycle>` and the link `cycle_info.<job>.current`.

    A file changes as a whole. What cannot be written is said once; the last cycle is tried again
    with the next one. All methods but `shutdown` return at once and take fields of the file:
    `job_id`; `attempt_index`, how often the scheduler started the job before; `cycle_number`, from
    0; `cycle_start_time` and `cycle_end_time` in ISO 8601, UTC; `cycle_log_file`, an absolute path;
    `active_nodes` and `standby_nodes` as Slurm lists; `active_ranks` as ranges (`0-3,6`).

    Args:
        cycle_info_dir: The directory; it is made when needed.

    Raises:
        ValueError: No directory is named.
    """

    def __init__(self, cycle_info_dir: str) -> None:
        if not cycle_info_dir:
            raise ValueError("cycle_info_dir is empty; name the directory for files about cycles")
        self._directory = os.path.abspath(cycle_info_dir)
        self._lock = threading.Lock()  # no job comes after None, which ends the thread
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_ending = False
        # The fields below are the thread's.
        self._present: CycleInfo | None = None  # the link leads to it
        self._is_written = True  # all that is known of it
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="nvrx-cycle-info", daemon=True)
        self._thread.start()

    def get_cycle_info_dir(self) -> str:
        """Return the directory."""
        return self._directory

    def get_current_cycle_info_path(self, job_id: str) -> str:
        """Return the path of the link to the file of the current cycle of `job_id`."""
        return os.path.join(self._directory, current_name(job_id))

    def write_cycle_start(  # noqa: PLR0913, PLR0917 - the fields of the file
        self,
        job_id: str,
        attempt_index: int,
        cycle_number: int,
        cycle_start_time: str,
        cycle_log_file: str,
        active_nodes: str,
        standby_nodes: str = "",
        active_ranks: str = "",
        *,
        goes_on: bool = False,
    ) -> bool:
        """Write the file of a cycle that begins and let the link lead to it.

        A cycle that is still open here ends with it. One that `goes_on` was begun by another
        writer: what its file says stays, but for an end; a missing file is written.

        Returns:
            Whether it was taken over: not after `shutdown`, nor when the file system has hung.
        """
        of_cycle = (job_id, attempt_index, cycle_number, cycle_start_time, "", cycle_log_file)
        info = CycleInfo(*of_cycle, active_nodes, standby_nodes, 0, active_ranks)
        _check_job_id(job_id)
        begin = self._take_up if goes_on else self._begin
        return self._hand_over(lambda: begin(info))

    def update_cycle_end(
        self,
        job_id: str,
        attempt_index: int,
        cycle_number: int,
        cycle_end_time: str,
        *,
        once: bool = False,
    ) -> bool:
        """Write the end of a cycle into its file; returns as `write_cycle_start`.

        With `once` nothing is done where the file is missing or has an end.
        """
        name = file_name(job_id, attempt_index, cycle_number)
        return self._hand_over(lambda: self._end(name, cycle_end_time, once=once))

    def shutdown(self, *, ends_cycle: bool = True) -> None:
        """End an open cycle and write what waits, for 2 s at most; harmless when repeated.

        Without `ends_cycle` an open cycle stays open, for a writer that takes it up.
        """
        now = utc_iso_now()
        with self._lock:
            if not self._is_ending:
                if ends_cycle:
                    self._jobs.put(lambda: self._end_present(now))
                self._is_ending = True
                self._jobs.put(None)
        self._thread.join(SHUTDOWN_S)
        if self._thread.is_alive():
            logger.warning("%s does not answer: cycle information is left out", self._directory)

    def _hand_over(self, job: Callable[[], None]) -> bool:
        with self._lock:
            if self._is_ending or self._jobs.qsize() >= _MOST_WAITING:
                return False
            self._jobs.put(job)
        return True

    # The thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except (OSError, ValueError) as error:
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("cycle information cannot be written, the job goes on: %s", error)

    def _save(self, info: CycleInfo) -> bool:
        """Write a file, of the present cycle the link too; return whether that succeeded."""
        path = os.path.join(self._directory, info.file_name)
        try:
            os.makedirs(self._directory, exist_ok=True)
            atomic_write(path, info.to_json(), mode=0o644)
            if info is self._present:
                _replace_link(info.file_name, self.get_current_cycle_info_path(info.job_id))
        except (OSError, ValueError) as error:
            self._complain(error)
            return False
        if self._has_failed:
            self._has_failed = False
            logger.info("cycle information is written again")
        return True

    def _set_present(self, info: CycleInfo) -> None:
        self._present = info
        self._is_written = self._save(info)

    def _begin(self, info: CycleInfo) -> None:
        self._end_present(info.cycle_start_time)
        self._set_present(info)

    def _take_up(self, info: CycleInfo) -> None:
        try:
            begun = self._read(info.file_name)
        except (FileNotFoundError, ValueError):
            self._begin(info)
            return
        if begun.cycle_end_time:
            self._set_present(begun.ended(""))
        else:
            self._present = begun
            _replace_link(begun.file_name, self.get_current_cycle_info_path(begun.job_id))

    def _end(self, name: str, at: str, *, once: bool) -> None:
        present = self._present
        if present is not None and present.file_name == name and not present.cycle_end_time:
            self._end_present(at)
            return
        try:
            known = self._read(name)
        except FileNotFoundError:
            if once:
                return
            raise
        if not (once and known.cycle_end_time):
            self._save(known.ended(at))

    def _end_present(self, at: str) -> None:
        """Write the end of the present cycle, unless it is written already."""
        present = self._present
        if present is None or (present.cycle_end_time and self._is_written):
            return
        self._set_present(present if present.cycle_end_time else present.ended(at))

    def _read(self, name: str) -> CycleInfo:
        path = os.path.join(self._directory, name)
        return CycleInfo.from_json(read_regular_file(path, _LARGEST_FILE_BYTES))


def _replace_link(target: str, path: str) -> None:
    """Let a link lead to a file beside it; whoever follows it finds the old one or the new one."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.urandom(4).hex()}")
    os.symlink(target, temporary)
    try:
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@dataclass(frozen=True)
class CycleInfoRoundSnapshot:
    """Nodes, ranks and log of a cycle after its rendezvous.

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
        started_before = attempt_index_from_env() or 0
        self._attempt_index = started_before if attempt_index is None else attempt_index
        self._cycle_log_prefix = cycle_log_prefix
        self._writer = writer if writer is not None else CycleInfoWriter(cycle_info_dir)
        self._lock = threading.Lock()  # guards the next field
        self._open_cycle: int | None = None

    @staticmethod
    def current_cycle_info_path(cycle_info_dir: str, job_id: str) -> str:
        """Return the link to the file of the current cycle of `job_id` in `cycle_info_dir`."""
        return os.path.join(os.path.abspath(cycle_info_dir), current_name(job_id))

    @property
    def job_id(self) -> str:
        """The job's name in the names of files."""
        return self._job_id

    def report_cycle_start(
        self, snapshot: CycleInfoRoundSnapshot, *, goes_on: bool = False
    ) -> bool:
        """Report that the cycle of `snapshot` begins; return whether its file will be written.

        With `goes_on` it continues a cycle that another reporter began: an existing file stays as
        it is, a missing one is written.
        """
        with self._lock:
            self._open_cycle = snapshot.cycle_number
        log_file = snapshot.cycle_log_file
        if not log_file and self._cycle_log_prefix:
            log_file = cycle_log_file(self._cycle_log_prefix, snapshot.cycle_number)
        nodes, ranks = _in_order(snapshot)
        spares = [infra.short_host(address) for address in snapshot.standby_node_addrs or ()]
        return self._writer.write_cycle_start(
            job_id=self._job_id,
            attempt_index=self._attempt_index,
            cycle_number=snapshot.cycle_number,
            cycle_start_time=utc_iso_now(),
            cycle_log_file=log_file,
            active_nodes=infra.hostnames_to_slurm_nodelist(nodes),
            standby_nodes=infra.hostnames_to_slurm_nodelist(spares),
            active_ranks=infra.ranks_to_range_str(ranks),
            **_if_set(goes_on=goes_on),
        )

    def report_cycle_end(self, cycle: int | None = None) -> bool:
        """Report that `cycle` is over, whichever reporter began it; a second end changes nothing.

        Without a number it is the present one; False when there is none.
        """
        with self._lock:
            ended = self._open_cycle if cycle is None else cycle
            if ended == self._open_cycle:
                self._open_cycle = None
        if ended is None:
            return False
        job_id, attempt_index = self._job_id, self._attempt_index
        once = _if_set(once=cycle is not None)
        return self._writer.update_cycle_end(job_id, attempt_index, ended, utc_iso_now(), **once)

    def shutdown(self, *, ends_cycle: bool = True) -> None:
        """Write queued cycle files, for 2 s at most; with `ends_cycle` end the open cycle."""
        with self._lock:
            self._open_cycle = None
        if ends_cycle:
            self._writer.shutdown()  # without the argument, which a caller's own writer may lack
        else:
            self._writer.shutdown(ends_cycle=False)


def _if_set(**flags: bool) -> dict[str, bool]:
    """Return the arguments that are true: others a caller's own writer may lack."""
    return {name: flag for name, flag in flags.items() if flag}


def _in_order(snapshot: CycleInfoRoundSnapshot) -> tuple[list[str], list[int]]:
    """Return nodes in Slurm's order, and each one's rank at the same place."""
    nodes = [infra.short_host(address) for address in snapshot.active_node_addrs or ()]
    ranks = list(snapshot.active_ranks or ())
    if len(nodes) != len(ranks) or len(set(nodes)) != len(nodes):
        return nodes, ranks
    rank_of = dict(zip(nodes, ranks, strict=True))
    ordered = infra.slurm_sort_addrs(nodes)
    return ordered, [rank_of[node] for node in ordered]
