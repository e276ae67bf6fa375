# SPDX-License-Identifier: Apache-2.0
"""The logs that clients have named: whose they are, and the files that a split log consists of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from nvidia_resiliency_ext.attribution.orchestration.config import MAX_JOBS, ErrorCode
from nvidia_resiliency_ext.attribution.orchestration.job import Job, JobMode
from nvidia_resiliency_ext.attribution.orchestration.log_path_metadata import (
    CYCLE_NUM_PATTERN,
    extract_job_metadata,
)
from nvidia_resiliency_ext.attribution.orchestration.slurm_parser import (
    SlurmParser,
    SplitlogTracker,
)
from nvidia_resiliency_ext.attribution.orchestration.types import LogAnalyzerError
from nvidia_resiliency_ext.attribution.orchestration.utils import open_log

__all__ = ["JobTable", "attempt_key", "choose_file"]

_HEAD_BYTES = 1 << 20


class JobTable:
    """Know each submitted log by its path, and by job and cycle.

    Args:
        allowed_root: Real path; files of split logs outside of it are not listed.
    """

    def __init__(self, allowed_root: str) -> None:
        self._root = allowed_root
        self._jobs: dict[str, Job] = {}
        self._paths: dict[tuple[str, int, int], str] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def get(self, path: str) -> Job | None:
        """Return the job of a log, or None."""
        return self._jobs.get(path)

    def register(
        self,
        resolved: str,
        user: str,
        job_id: str | None,
        cycle_id: int | None,
        attempt_index: int | None = None,
    ) -> Job:
        """Return the job of a log, known or new.

        Raises:
            LogAnalyzerError: The log has another job or cycle, the cycle another log, or there are
                too many jobs.
        """
        job = self._jobs.get(resolved)
        if job is not None:
            if (job.job_id, job.cycle_id) != (job_id, cycle_id):
                message = f"{resolved} was submitted for job {job.job_id}, cycle {job.cycle_id}"
                raise LogAnalyzerError(ErrorCode.INVALID_PARAMETER, message)
            return job
        if job_id is not None and cycle_id is not None:
            other = self._paths.get((job_id, attempt_index or 0, cycle_id))
            if other is not None:
                message = f"cycle {cycle_id} of job {job_id} has the log {other}"
                raise LogAnalyzerError(ErrorCode.INVALID_PARAMETER, message)
        if len(self._jobs) >= MAX_JOBS:
            raise LogAnalyzerError(ErrorCode.JOB_LIMIT_REACHED, f"{MAX_JOBS} jobs are known")
        if job_id is not None and cycle_id is not None:
            self._paths[job_id, attempt_index or 0, cycle_id] = resolved
        job = self._jobs[resolved] = Job(resolved, user, job_id, cycle_id)
        return job

    def forget_oldest(self, is_busy: Callable[[Job], bool]) -> list[Job]:
        """Drop the older half of the jobs that are not busy if no more would be taken.

        Args:
            is_busy: Tells whether a log of the job is being read.

        Returns:
            The jobs that were dropped.
        """
        if len(self._jobs) < MAX_JOBS:
            return []
        idle = [job for job in self._jobs.values() if not is_busy(job)]
        dropped = idle[: (len(idle) + 1) // 2]
        for job in dropped:
            del self._jobs[job.path]
        self._paths = {key: path for key, path in self._paths.items() if path in self._jobs}
        return dropped

    def look_for_split_log(self, job: Job, is_analyzed: Callable[[str], bool]) -> None:
        """Read the head of a log that exists, once, and list the files that it names.

        Args:
            job: The log's job.
            is_analyzed: Tells whether a file has a result.

        Raises:
            LogAnalyzerError: The directory that it names cannot be read.
        """
        if job.mode is JobMode.PENDING and os.path.exists(job.path):
            try:
                descriptor = open_log(job.path, self._root)
            except (OSError, LogAnalyzerError):
                return  # the analysis says so
            with open(descriptor, "rb") as log:
                head = log.read(_HEAD_BYTES).decode("utf-8", "replace")
            found = SlurmParser.parse(head)
            job.sched_restarts = found.restart_count
            if not head:
                return
            job.mode = JobMode.SINGLE
            if found.logs_dir is not None and self._is_inside(found.logs_dir):
                job.mode, job.logs_dir = JobMode.SPLITLOG, os.path.realpath(found.logs_dir)
        if job.mode is JobMode.SPLITLOG and job.logs_dir is not None:
            try:
                job.files = SplitlogTracker(job.logs_dir, job.job_id).files()
            except OSError as error:
                message = f"{job.logs_dir}: {error.strerror}"
                raise LogAnalyzerError(ErrorCode.LOGS_DIR_NOT_READABLE, message) from None
            for info in job.files:
                info.is_analyzed = is_analyzed(info.path)

    def _is_inside(self, path: str) -> bool:
        real = os.path.realpath(path)
        return os.path.isabs(path) and os.path.commonpath([self._root, real]) == (self._root)


def choose_file(job: Job, file: str | None, wl_restart: int | None) -> tuple[str, int]:
    """Return path and number of one file of a job.

    Raises:
        LogAnalyzerError: The job has no such file.
    """
    if job.mode is not JobMode.SPLITLOG or not job.files:
        if file is not None and file not in {job.path, os.path.basename(job.path)}:
            raise LogAnalyzerError(ErrorCode.NOT_FOUND, f"no file {file!r:.200} of this job")
        return job.path, wl_restart or 0
    if file is not None:
        for number, info in enumerate(job.files):
            if file in {info.path, os.path.basename(info.path)}:
                return info.path, number
        raise LogAnalyzerError(ErrorCode.NOT_FOUND, f"no file {file!r:.200} of this job")
    number = len(job.files) - 1 if wl_restart is None else wl_restart
    if not 0 <= number < len(job.files):
        raise LogAnalyzerError(ErrorCode.NOT_FOUND, f"no restart {number} of this job")
    return job.files[number].path, number


def attempt_key(key: str, job: Job) -> tuple[str, int | None]:
    """Return the name under which attempts of a job are compared, and which attempt this is."""
    named = extract_job_metadata(key, warn_on_missing_job_id=False)
    cycle_id = job.cycle_id if key == job.path and job.cycle_id is not None else named.cycle_id
    name = job.job_id or named.job_id or CYCLE_NUM_PATTERN.sub("", key)
    return name, cycle_id
