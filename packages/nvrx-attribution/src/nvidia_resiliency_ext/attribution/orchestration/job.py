# SPDX-License-Identifier: Apache-2.0
"""A job whose logs were submitted."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["FileInfo", "Job", "JobMode"]


class JobMode(str, enum.Enum):
    """How a job logs: not known yet, into one file, or into a file per cycle."""

    PENDING = "pending"
    SINGLE = "single"
    SPLITLOG = "splitlog"


@dataclass(slots=True)
class FileInfo:
    """One file of a split log.

    Attributes:
        path: The file.
        cycle: Which cycle wrote it.
        date: The date in its name; empty when there is none.
        is_analyzed: Whether its result is there.
    """

    path: str
    cycle: int = 0
    date: str = ""
    is_analyzed: bool = False


@dataclass(slots=True)
class Job:
    """A submitted log, and what is known of its job.

    Attributes:
        path: The log, resolved.
        user: Whose job it is.
        job_id: Its number; None: not said.
        cycle_id: Which run of the workers; None: not said.
        mode: How it logs.
        logs_dir: Where the files of a split log are.
        sched_restarts: Restarts by the scheduler.
        files: Files of a split log, in their order.
        attempt_index: How often the scheduler had requeued the job.

    Example:
        >>> job = Job("/logs/job.log", job_id="42")
        >>> job.user, job.mode
        ('unknown', <JobMode.PENDING: 'pending'>)
    """

    path: str
    user: str = "unknown"
    job_id: str | None = None
    cycle_id: int | None = None
    mode: JobMode = JobMode.PENDING
    logs_dir: str | None = None
    sched_restarts: int = 0
    files: list[FileInfo] = field(default_factory=list)
    attempt_index: int = 0
