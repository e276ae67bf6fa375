# SPDX-License-Identifier: Apache-2.0
"""The denylist of the scheduler: files that say which units of a job have unhealthy nodes.

A unit is a task of a Slurm job array, or a Slurm job that is no array. Launchers obey the files,
`slurm_health` writes them. A unit passes unless its entry is clear: a file that cannot be read
must not end a job.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.shared_utils.console import plain
from nvidia_resiliency_ext.shared_utils.health_check import Check, Finding
from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

logger = logging.getLogger("nvrx")

MAX_FIRST_LINE_BYTES = 8192
MAX_FILE_BYTES = 64 << 10
MAX_REASON_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Unit:
    """A job or array task, which is excluded as a whole; both ids are decimal numbers."""

    job_id: str
    task_id: str

    def __str__(self) -> str:
        if self.task_id == self.job_id:
            return f"job {self.job_id}"
        return f"array task {self.task_id} of job {self.job_id}"


@dataclass(frozen=True, slots=True)
class DenylistEntry:
    """An excluded unit: the file that excludes it, and the diagnosis in it, one line or empty."""

    path: str
    reason: str


def unit_of(environ: Mapping[str, str]) -> Unit | None:
    task, job = environ.get(_env.SLURM_ARRAY_TASK_ID), environ.get(_env.SLURM_ARRAY_JOB_ID)
    if not (task and job):
        task = job = environ.get(_env.SLURM_JOB_ID)
    if not job or not task or not (job + task).isdecimal():
        return None
    return Unit(job, task)


def task_file(directory: str, unit: Unit) -> str:
    """Return the file whose content excludes one unit."""
    return os.path.join(directory, f"segment_health_check.{unit.job_id}.{unit.task_id}")


def state_file(directory: str, job_id: str) -> str:
    """Return the file that lists all excluded units of a job."""
    return os.path.join(directory, f"segment_health_check.{job_id}.state")


def state_text(evidence: Mapping[str, Collection[str]]) -> str:
    """Return the content of the file that lists all excluded units."""
    tasks = sorted(evidence, key=lambda task: (len(task), task))
    first = json.dumps(tasks, separators=(",", ":"))
    lines = [f"{task}: {'; '.join(evidence[task])}" for task in tasks]
    return "\n".join([first, *lines, ""])


def read_denylist(directory: str, unit: Unit) -> DenylistEntry | None:
    """Return the entry that excludes a unit, or None; a file that cannot be used is one WARNING."""
    path = task_file(directory, unit)
    content = _content(path)
    if content:
        return DenylistEntry(path, _one_line(content))
    path = state_file(directory, unit.job_id)
    content = _content(path)
    if content is None:
        return None
    first, _, rest = content.partition(b"\n")
    excluded = _task_ids(first)
    if excluded is None:
        logger.warning(
            "%s excludes nobody: its first line is no JSON array of task ids as strings"
            " (at most %d bytes)",
            path,
            MAX_FIRST_LINE_BYTES,
        )
        return None
    return DenylistEntry(path, _of_unit(rest, unit)) if unit.task_id in excluded else None


def _content(path: str) -> bytes | None:
    """Return a file's content; None where it is missing or cannot be used."""
    try:
        return read_regular_file(path, MAX_FILE_BYTES, follows_symlink=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s is passed over and excludes nobody: %s", path, error)
        return None


def _task_ids(line: bytes) -> Collection[str] | None:
    if len(line) > MAX_FIRST_LINE_BYTES:
        return None
    try:
        ids = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
        return None
    return frozenset(ids)


def _of_unit(evidence: bytes, unit: Unit) -> str:
    """Return the lines about a unit (`7: ...`, as the publisher writes them), else all of them."""
    prefix = f"{unit.task_id}:".encode()
    own = [line for line in evidence.splitlines() if line.startswith(prefix)]
    return _one_line(b"\n".join(own) if own else evidence)


def _one_line(text: bytes) -> str:
    return plain(" ".join(text.decode(errors="replace").split()))[:MAX_REASON_CHARS]


class SegmentHealthCheck(Check):
    """Does the scheduler exclude this node's array task, or its job?"""

    name = "segment"
    # The directory is on a shared file system: while that hangs, nobody is excluded.
    late_status = "skipped"

    def __init__(self, directory: str, environ: Mapping[str, str]) -> None:
        super().__init__()
        self._directory = directory
        self._unit = unit_of(environ)
        self.component = "no Slurm job" if self._unit is None else str(self._unit)

    def _examine(self) -> Finding:
        if self._unit is None:
            return Finding("skipped", "no Slurm job: SLURM_JOB_ID is not set, or is no number")
        found = read_denylist(self._directory, self._unit)
        if found is None:
            return Finding("healthy")
        said = f": {found.reason}" if found.reason else ""
        return Finding(
            "unhealthy",
            f"the scheduler excludes {self._unit} by {found.path}{said}",
            {"file": found.path, "unit": str(self._unit), "reason": found.reason},
        )
