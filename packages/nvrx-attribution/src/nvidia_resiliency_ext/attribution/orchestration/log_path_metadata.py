# SPDX-License-Identifier: Apache-2.0
"""Job and cycle as the name of a log says them."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

__all__ = ["CYCLE_NUM_PATTERN", "JOB_ID_PATTERNS", "JobMetadata", "extract_job_metadata"]

logger = logging.getLogger("nvrx")

CYCLE_NUM_PATTERN = re.compile(r"_cycle(\d{1,18})\.log$", re.IGNORECASE)
JOB_ID_PATTERNS = (
    re.compile(r"_(\d+)_date_"),
    re.compile(r"/job_(\d+)/"),
    re.compile(r"slurm-(\d+)\.(?:out|err|log)"),
    re.compile(r"/(\d{6,})\.[^/]+$"),
    re.compile(r"_(\d{6,})\.[^/]+$"),
)


@dataclass(frozen=True)
class JobMetadata:
    """Job and cycle that a path names.

    Args:
        job_id: The job; empty if the path names none.
        cycle_id: The cycle; None if the path names none.
    """

    job_id: str
    cycle_id: int | None


def extract_job_metadata(path: str, warn_on_missing_job_id: bool = True) -> JobMetadata:
    """Return the job and the cycle that a log's path names.

    Args:
        path: The path.
        warn_on_missing_job_id: Log a warning if it names no job. Default True.

    Example:
        >>> extract_job_metadata("/runs/slurm-123.out")
        JobMetadata(job_id='123', cycle_id=None)
    """
    cycle = CYCLE_NUM_PATTERN.search(path)
    cycle_id = int(cycle[1]) if cycle is not None else None
    for pattern in JOB_ID_PATTERNS:
        found = pattern.search(path)
        if found is not None:
            return JobMetadata(found[1], cycle_id)
    if warn_on_missing_job_id:
        logger.warning("no job id in the path %s", path)
    return JobMetadata("", cycle_id)
