# SPDX-License-Identifier: Apache-2.0
"""The files about cycles: their content and names, and the thread that writes them.

The text is the JSON form of the message `NVRxCycleInfo`, made without protobuf.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone

from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file

__all__ = [
    "CycleInfo",
    "CycleInfoWriter",
    "current_name",
    "file_name",
    "iso_utc",
    "short_host_names",
]


_LARGEST_ATTEMPT = (1 << 32) - 1


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

    def ended(self, at: str) -> CycleInfo:
        """Return the next version: the cycle is over."""
        return replace(self, cycle_end_time=at, generation=self.generation + 1)

    def to_json(self) -> bytes:
        """Return the file's content; a 64-bit number is a string in protobuf's JSON."""
        fields = {**asdict(self), "generation": str(self.generation)}
        return (json.dumps(fields, indent=2) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> CycleInfo:
        """Return what a file says.

        Raises:
            ValueError: It is no such file.
        """
        try:
            fields = json.loads(data)
            return cls(**{**fields, "generation": int(fields["generation"])})
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"no cycle information: {error}") from error


def file_name(job_id: str, attempt_index: int, cycle_number: int) -> str:
    """Return the name of a cycle's file."""
    _check_job_id(job_id)
    return f"cycle_info.{job_id}.{attempt_index}.{cycle_number}"


def current_name(job_id: str) -> str:
    """Return the name of the link to the present cycle's file."""
    _check_job_id(job_id)
    return f"cycle_info.{job_id}.current"


def iso_utc(unix_s: float) -> str:
    """Return a time as the files have it."""
    when = datetime.fromtimestamp(unix_s, timezone.utc)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def attempt_of(text: str | None) -> int:
    """Return the number of a scheduler's attempt; what is no number counts as the first."""
    try:
        number = int(text or 0)
    except ValueError:
        return 0
    return number if 0 <= number <= _LARGEST_ATTEMPT else 0


def short_host_names(addresses: list[str]) -> list[str]:
    """Return the first part of each host name; addresses in numbers stay whole."""
    return [one if _is_numeric(one) else one.partition(".")[0] for one in addresses]


def _is_numeric(address: str) -> bool:
    return ":" in address or all(part.isdecimal() for part in address.split("."))


def _check_job_id(job_id: str) -> None:
    if "/" in job_id or "\0" in job_id or job_id in (os.curdir, os.pardir):
        raise ValueError(f"the job id {job_id!r} cannot be part of a file name")


logger = logging.getLogger("nvrx")

SHUTDOWN_S = 2.0
TRY_AGAIN_S = 30.0
_MOST_WAITING = 256
_MOST_OWED = 64
_LARGEST_FILE_BYTES = 1 << 20


class CycleInfoWriter:
    """Writes `cycle_info.<job>.<attempt>.<cycle>` and the link `cycle_info.<job>.current`.

    A file appears and changes as a whole. What cannot be written is said once, and tried again
    with the next file and every 30 s; the newest 64 files wait. All methods but `shutdown` return
    at once.

    Its methods take the fields of the file: `job_id`; `attempt_index`, how often the scheduler
    started the job before; `cycle_number`, from 0; `cycle_start_time` and `cycle_end_time` in ISO
    8601, UTC; `cycle_log_file`, an absolute path; `active_nodes` and `standby_nodes` as Slurm node
    lists; `active_ranks` as ranges (`0-3,6`).

    Args:
        cycle_info_dir: The directory; it is made when needed.

    Raises:
        ValueError: No directory is named.
    """

    def __init__(self, cycle_info_dir: str) -> None:
        if not cycle_info_dir:
            raise ValueError("cycle_info_dir is empty; name the directory for files about cycles")
        self._directory = os.path.abspath(cycle_info_dir)
        self._work = threading.Condition()  # guards the two fields below
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._is_ending = False
        # The fields below are the thread's: the cycle that is open, what files have still to say,
        # and where the link has still to lead.
        self._open: CycleInfo | None = None
        self._owed: dict[str, CycleInfo] = {}
        self._link_owed: CycleInfo | None = None
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="nvrx-cycle-info", daemon=True)
        self._thread.start()

    def get_cycle_info_dir(self) -> str:
        """Return the directory."""
        return self._directory

    def get_current_cycle_info_path(self, job_id: str) -> str:
        """Return the path of the link to the current cycle's file.

        Args:
            job_id: The job.
        """
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
    ) -> bool:
        """Write the file of a cycle that begins and let the link lead to it.

        A cycle that is still open here ends with it.

        Returns:
            Whether it was taken over: not after `shutdown`, nor when the file system has hung.
        """
        info = CycleInfo(
            job_id=job_id,
            attempt_index=attempt_index,
            cycle_number=cycle_number,
            cycle_start_time=cycle_start_time,
            cycle_log_file=cycle_log_file,
            active_nodes=active_nodes,
            standby_nodes=standby_nodes,
            active_ranks=active_ranks,
        )
        file_name(job_id, attempt_index, cycle_number)  # a bad name is the caller's error
        return self._hand_over(lambda: self._begin(info))

    def take_up_cycle(  # noqa: PLR0913, PLR0917 - the fields of the file
        self,
        job_id: str,
        attempt_index: int,
        cycle_number: int,
        cycle_start_time: str,
        cycle_log_file: str,
        active_nodes: str,
        standby_nodes: str = "",
        active_ranks: str = "",
    ) -> bool:
        """Go on with the file of a cycle that another writer has begun.

        What it says stays, but for an end: the cycle goes on. Where there is no such file it is
        written as `write_cycle_start` does, which see for arguments and answer.
        """
        info = CycleInfo(
            job_id=job_id,
            attempt_index=attempt_index,
            cycle_number=cycle_number,
            cycle_start_time=cycle_start_time,
            cycle_log_file=cycle_log_file,
            active_nodes=active_nodes,
            standby_nodes=standby_nodes,
            active_ranks=active_ranks,
        )
        file_name(job_id, attempt_index, cycle_number)  # a bad name is the caller's error
        return self._hand_over(lambda: self._take_up(info))

    def update_cycle_end(
        self, job_id: str, attempt_index: int, cycle_number: int, cycle_end_time: str
    ) -> bool:
        """Write the end of a cycle into its file; returns as `write_cycle_start`."""
        name = file_name(job_id, attempt_index, cycle_number)
        return self._hand_over(lambda: self._end(name, cycle_end_time))

    def end_cycle_once(
        self, job_id: str, attempt_index: int, cycle_number: int, cycle_end_time: str
    ) -> bool:
        """Write the end of a cycle into its file, unless the file is missing or has an end."""
        name = file_name(job_id, attempt_index, cycle_number)
        return self._hand_over(lambda: self._end_once(name, cycle_end_time))

    def shutdown(self, *, ends_cycle: bool = True) -> None:
        """End an open cycle and write what waits, for 2 s at most; harmless when repeated.

        Args:
            ends_cycle: False leaves an open cycle open, for a writer that takes it up.
        """
        now = iso_utc(time.time())
        with self._work:
            if not self._is_ending:
                if ends_cycle:
                    self._jobs.append(lambda: self._end_open(now))
                self._is_ending = True
                self._work.notify()
        self._thread.join(SHUTDOWN_S)
        if self._thread.is_alive():
            logger.warning("%s does not answer: cycle information is left out", self._directory)

    def _hand_over(self, job: Callable[[], None]) -> bool:
        with self._work:
            if self._is_ending or len(self._jobs) >= _MOST_WAITING:
                return False
            self._jobs.append(job)
            self._work.notify()
        return True

    # The thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            job = self._next_job()
            if job is None:
                return
            try:
                job()
            except (OSError, ValueError) as error:
                self._complain(error)
            self._pay()

    def _next_job(self) -> Callable[[], None] | None:
        """Wait for something to do; None at the end."""
        with self._work:
            while not self._jobs:
                if self._is_ending:
                    return None
                is_owing = bool(self._owed) or self._link_owed is not None
                if not self._work.wait(TRY_AGAIN_S if is_owing else None):
                    return lambda: None
            return self._jobs.popleft()

    def _pay(self) -> None:
        """Write all that has not been written yet, as far as that succeeds."""
        if not self._owed and self._link_owed is None:
            return
        problem: Exception | None = None
        try:
            os.makedirs(self._directory, exist_ok=True)
        except OSError as error:
            self._complain(error)
            return
        for name, info in list(self._owed.items()):
            try:
                self._write(info)
                del self._owed[name]
            except (OSError, ValueError) as error:
                problem = problem or error
        # Never to a file that is not there.
        if self._link_owed is not None and _name_of(self._link_owed) not in self._owed:
            try:
                self._point_to(self._link_owed)
                self._link_owed = None
            except OSError as error:
                problem = problem or error
        if problem is not None:
            self._complain(problem)
        elif self._has_failed:
            self._has_failed = False
            logger.info("cycle information is written again")

    def _owe(self, info: CycleInfo) -> None:
        """Let a file say this, now or as soon as it can be written."""
        self._owed.pop(_name_of(info), None)
        while len(self._owed) >= _MOST_OWED:
            del self._owed[next(iter(self._owed))]
        self._owed[_name_of(info)] = info

    def _complain(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("cycle information cannot be written, the job goes on: %s", error)

    def _begin(self, info: CycleInfo) -> None:
        if self._open is not None:
            self._end_open(info.cycle_start_time)
        self._open = self._link_owed = info
        self._owe(info)

    def _take_up(self, info: CycleInfo) -> None:
        try:
            known = self._read(_name_of(info))
        except (FileNotFoundError, ValueError):
            self._begin(info)
            return
        if known.cycle_end_time:
            known = known.ended("")
            self._owe(known)
        self._open = self._link_owed = known

    def _point_to(self, info: CycleInfo) -> None:
        link = os.path.join(self._directory, current_name(info.job_id))
        _replace_link(_name_of(info), link)

    def _end(self, name: str, at: str) -> None:
        present = self._open
        if present is None or _name_of(present) != name:
            self._owe(self._read(name).ended(at))
        else:
            self._end_open(at)

    def _end_once(self, name: str, at: str) -> None:
        if self._open is not None and _name_of(self._open) == name:
            self._end_open(at)
            return
        try:
            known = self._read(name)
        except FileNotFoundError:
            return
        if not known.cycle_end_time:
            self._owe(known.ended(at))

    def _end_open(self, at: str) -> None:
        present, self._open = self._open, None
        if present is not None:
            self._owe(present.ended(at))

    def _read(self, name: str) -> CycleInfo:
        if name in self._owed:
            return self._owed[name]
        path = os.path.join(self._directory, name)
        return CycleInfo.from_json(read_regular_file(path, _LARGEST_FILE_BYTES))

    def _write(self, info: CycleInfo) -> None:
        atomic_write(os.path.join(self._directory, _name_of(info)), info.to_json(), mode=0o644)


def _name_of(info: CycleInfo) -> str:
    return file_name(info.job_id, info.attempt_index, info.cycle_number)


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
