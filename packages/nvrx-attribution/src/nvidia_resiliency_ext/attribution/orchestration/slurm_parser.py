# SPDX-License-Identifier: Apache-2.0
"""What the output of a Slurm job says about the logs of its cycles."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from nvidia_resiliency_ext.attribution.orchestration.job import FileInfo
from nvidia_resiliency_ext.attribution.orchestration.log_path_metadata import CYCLE_NUM_PATTERN

__all__ = [
    "END_PATHS",
    "START_PATHS",
    "ParseResult",
    "SlurmOutputInfo",
    "SlurmParser",
    "SplitlogTracker",
    "parse_slurm_output",
]

START_PATHS = "<< START PATHS >>"
END_PATHS = "<< END PATHS >>"

_LOGS_DIR = re.compile(r"^LOGS_DIR=(\S+)\s*$", re.MULTILINE)
_WRITING = re.compile(r"^Writing logs to (\S+)\s*$", re.MULTILINE)
_REQUEUE = re.compile(r"\bRequeue=1\b|^#SBATCH\s+--requeue\b", re.MULTILINE)
_DATE = re.compile(r"_date_([0-9_-]+)")
_MOST_FILES = 10000


@dataclass(frozen=True)
class ParseResult:
    """Findings in the output of a Slurm job.

    Args:
        logs_dir: Directory of the logs; None if the output names none.
        restart_count: Restarts so far.
        can_restart: Whether Slurm may start the job again.
    """

    logs_dir: str | None
    restart_count: int
    can_restart: bool


@dataclass(frozen=True)
class SlurmOutputInfo:
    """Findings in the output of a Slurm job, with the names of `parse_slurm_output`.

    Args:
        logs_dir: Directory of the logs; None if the output names none.
        cycle_count: Number of starts.
        has_requeue: Whether Slurm may start the job again.
    """

    logs_dir: str | None
    cycle_count: int
    has_requeue: bool


class SlurmParser:
    """Read the output of a Slurm job."""

    @staticmethod
    def parse(content: str) -> ParseResult:
        """Return the paths that the job's output names.

        Each start of the job prints one block of paths; the last one counts.

        Args:
            content: The output, or as much of it as there is.
        """
        blocks = content.split(START_PATHS)[1:]
        whole = [block.partition(END_PATHS)[0] for block in blocks if END_PATHS in block]
        found = _LOGS_DIR.search(whole[-1]) if whole else None
        if found is None:
            found = _WRITING.search(content)
        return ParseResult(
            found[1] if found is not None else None,
            max(0, len(whole) - 1),
            _REQUEUE.search(content) is not None,
        )


def parse_slurm_output(content: str) -> SlurmOutputInfo:
    """Return directory, number of starts, and whether Slurm may start the job again.

    Args:
        content: The job's standard output.

    Example:
        >>> parse_slurm_output("Writing logs to /logs/42")
        SlurmOutputInfo(logs_dir='/logs/42', cycle_count=1, has_requeue=False)
    """
    found = SlurmParser.parse(content)
    starts = content.count(END_PATHS) or int(found.logs_dir is not None)
    return SlurmOutputInfo(found.logs_dir, starts, found.can_restart)


class SplitlogTracker:
    """List the logs of a job's cycles.

    Args:
        logs_dir: Where they are.
        job_id: Only files with this number in their name; None: all.
    """

    def __init__(self, logs_dir: str, job_id: str | None = None) -> None:
        self.logs_dir = logs_dir
        self._job_id = job_id

    def files(self) -> list[FileInfo]:
        """Return the files, by cycle and then by the date in their name.

        Raises:
            OSError: The directory cannot be read.
        """
        found = []
        with os.scandir(self.logs_dir) as entries:
            for entry in entries:
                cycle = CYCLE_NUM_PATTERN.search(entry.name)
                if cycle is None or not entry.is_file(follow_symlinks=False):
                    continue
                if self._job_id is not None and self._job_id not in entry.name:
                    continue
                date = _DATE.search(entry.name)
                found.append(FileInfo(entry.path, int(cycle[1]), date[1] if date else ""))
        found.sort(key=lambda info: (info.cycle, info.date, info.path))
        return found[-_MOST_FILES:]
