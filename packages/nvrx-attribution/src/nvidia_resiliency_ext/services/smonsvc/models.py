# SPDX-License-Identifier: Apache-2.0
"""What the monitor knows of jobs, and its form in a file. Pure but for loading and saving."""

from __future__ import annotations

import enum
import json
import os
import threading
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file

__all__ = ["JobState", "MonitorState", "MonitoredJob", "SlurmJob"]

MOST_FINISHED = 1000
_LIMIT_BYTES = 64 << 20
_SHORTEST_PREFIX = 5


class JobState(str, enum.Enum):
    """A state of a Slurm job."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    SIGNALING = "SIGNALING"
    STAGE_OUT = "STAGE_OUT"
    RESIZING = "RESIZING"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    DEADLINE = "DEADLINE"
    NODE_FAIL = "NODE_FAIL"
    BOOT_FAIL = "BOOT_FAIL"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    REVOKED = "REVOKED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    EXPEDITING = "EXPEDITING"
    POWER_UP_NODE = "POWER_UP_NODE"
    UPDATE_DB = "UPDATE_DB"
    UNKNOWN = "UNKNOWN"

    @classmethod
    def from_str(cls, text: str) -> JobState:
        """Return the state that Slurm writes: long, short, cut off (`+`) or with an addition.

        Args:
            text: The state as Slurm writes it.

        Example:
            >>> JobState.from_str("CANCELLED by 1001"), JobState.from_str("OUT_OF_ME+")
            (<JobState.CANCELLED: 'CANCELLED'>, <JobState.OUT_OF_MEMORY: 'OUT_OF_MEMORY'>)
        """
        word = (text.split() or [""])[0].upper()
        if word in cls.__members__:
            return cls[word]
        if word in _SHORT:
            return _SHORT[word]
        start = word.rstrip("+")
        found = [state for state in cls if state.value.startswith(start)]
        is_cut = word.endswith("+") and len(start) >= _SHORTEST_PREFIX and len(found) == 1
        return found[0] if is_cut else cls.UNKNOWN

    @property
    def is_terminal(self) -> bool:
        """Whether the job is over."""
        return self in _TERMINAL


_TERMINAL = frozenset(
    {
        JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT,
        JobState.DEADLINE, JobState.NODE_FAIL, JobState.BOOT_FAIL, JobState.LAUNCH_FAILED,
        JobState.OUT_OF_MEMORY, JobState.PREEMPTED, JobState.REVOKED, JobState.RECONFIG_FAIL,
    }
)  # fmt: skip
_SHORT = {
    "PD": JobState.PENDING, "CF": JobState.CONFIGURING, "R": JobState.RUNNING,
    "CG": JobState.COMPLETING, "S": JobState.SUSPENDED, "ST": JobState.STOPPED,
    "SI": JobState.SIGNALING, "SO": JobState.STAGE_OUT, "RS": JobState.RESIZING,
    "RQ": JobState.REQUEUED, "RF": JobState.REQUEUE_FED, "RH": JobState.REQUEUE_HOLD,
    "RD": JobState.RESV_DEL_HOLD, "SE": JobState.SPECIAL_EXIT, "CD": JobState.COMPLETED,
    "F": JobState.FAILED, "CA": JobState.CANCELLED, "TO": JobState.TIMEOUT,
    "DL": JobState.DEADLINE, "NF": JobState.NODE_FAIL, "BF": JobState.BOOT_FAIL,
    "LF": JobState.LAUNCH_FAILED, "OOM": JobState.OUT_OF_MEMORY, "PR": JobState.PREEMPTED,
    "RV": JobState.REVOKED,
}  # fmt: skip


@dataclass(frozen=True)
class SlurmJob:
    """One line of `squeue`.

    Attributes:
        job_id: Its own number, of an array's member too.
        state: Its state.
        user: Whose job it is.
        partition: Where it runs.
        nodes: Its nodes, as Slurm writes them (`n[1-3]`).
        name: Its name, which its owner chose.
        array_id: Number of the array; empty: it belongs to none.
        array_index: Which member of the array.
        started: When this run of it began; another one after a requeue.
    """

    job_id: str
    state: JobState
    user: str
    partition: str
    nodes: str
    name: str
    array_id: str = ""
    array_index: str = ""
    started: str = ""


@dataclass
class MonitoredJob:
    """One run of a job whose log is, or was, of interest.

    Attributes:
        job_id: Its number.
        user: Whose job it is.
        name: Its name.
        attempt_index: How often Slurm had requeued it before this run; -1: not known.
        started: When this run began; empty: not known.
        log_path: Its output; empty: not known.
        state: How Slurm says that it is.
        is_submitted: Whether the service knows its log.
        has_ended: Whether it is over.
        evidence: What Slurm says about its end, as lines of a log.
        is_terminal_submitted: Whether the service was told of its end.
        misses: How often Slurm knew nothing of it after it had left the queue.
        tries: How often its result was asked for.
        action: The verdict: STOP, RESTART, ... ; empty: there is none yet.
        reason: Why.
        problem: What kept its log from being analysed.
        is_done: Whether nothing is left to do for it.
        awaits_run: Whether the job was requeued and its next run has not been seen.
        looks: Looks since its end at which the service replied and had no result.
    """

    job_id: str
    user: str
    name: str
    log_path: str = ""
    attempt_index: int = -1
    started: str = ""
    state: str = JobState.RUNNING.value
    is_submitted: bool = False
    has_ended: bool = False
    evidence: list[str] = field(default_factory=list)
    is_terminal_submitted: bool = False
    misses: int = 0
    tries: int = 0
    action: str = ""
    reason: str = ""
    problem: str = ""
    is_done: bool = False
    awaits_run: bool = False
    looks: int = 0


@dataclass
class MonitorState:
    """All jobs and counts, shared by the monitor's thread and the status server.

    Attributes:
        jobs: By number, in the order in which they were seen; at most 1000 finished ones.
        counts: Of squeue, submissions, results and errors since the start.
        is_reachable: Whether the service answered when it was asked last.
        lock: To be held while any of it is read or changed.
    """

    jobs: dict[str, MonitoredJob] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    is_reachable: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open_jobs(self) -> list[MonitoredJob]:
        """Return the jobs for which something is left to do."""
        return [job for job in self.jobs.values() if not job.is_done]

    def forget_old(self) -> None:
        """Keep the newest 1000 of the finished jobs."""
        done = [job.job_id for job in self.jobs.values() if job.is_done]
        for job_id in done[:-MOST_FINISHED]:
            del self.jobs[job_id]

    def problems(self) -> list[str]:
        """Return why the monitor is not healthy; empty when it is."""
        asked, failed = self.counts["squeue"], self.counts["squeue_failed"]
        found = []
        if asked and 2 * failed >= asked:
            found.append(f"squeue failed {failed} times of {asked}")
        if not self.is_reachable:
            found.append("the attribution service does not answer")
        return found

    def save(self, path: str) -> None:
        """Write the jobs to a file.

        Args:
            path: The file; it is replaced at once.

        Raises:
            OSError: The file cannot be written.
        """
        lines = [json.dumps(asdict(job)) for job in self.jobs.values()]
        atomic_write(path, "".join(f"{line}\n" for line in lines).encode())

    def load(self, path: str) -> int:
        """Load the jobs of a file, and return how many of its lines are damaged.

        Args:
            path: The file; it need not exist.

        Raises:
            ConfigError: The path is no regular file, or cannot be read.
        """
        if not os.path.lexists(path):
            return 0
        try:
            lines = read_regular_file(path, _LIMIT_BYTES).splitlines()
        except OSError as error:
            raise ConfigError(f"the state {path} cannot be read: {error.strerror}") from None
        damaged = 0
        for line in lines:
            job = _job_of(line)
            if job is None:
                damaged += 1
            else:
                self.jobs[job.job_id] = job
        return damaged


def _job_of(line: bytes) -> MonitoredJob | None:
    """Return the job in a line of the file, None where it is none."""
    defaults: dict[str, Any] = asdict(MonitoredJob("", "", ""))
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.keys() - defaults.keys():
        return None
    given = {**defaults, **value}
    is_whole = all(type(given[name]) is type(default) for name, default in defaults.items())
    is_text = is_whole and all(isinstance(line, str) for line in given["evidence"])
    # The number goes into a command line.
    return MonitoredJob(**given) if is_text and given["job_id"].isdecimal() else None
