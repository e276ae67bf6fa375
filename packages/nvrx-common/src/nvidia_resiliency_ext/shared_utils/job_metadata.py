# SPDX-License-Identifier: Apache-2.0
"""Owner and number of the job, from the scheduler's environment variables only."""

from __future__ import annotations

import os

__all__ = ["attempt_index_from_env", "job_id_from_env", "job_user_from_env", "task_id_from_env"]

_MOST_DIGITS = 10


def job_user_from_env() -> str | None:
    """Return the user who submitted the job; `None` if unknown."""
    return _first("SLURM_JOB_USER", "USER")


def job_id_from_env() -> str | None:
    """Return the job's number, for an array the number of the array; `None` outside of Slurm."""
    return _first("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID")


def task_id_from_env() -> str | None:
    """Return the job's number, for an array task `<array>_<task>`; `None` outside of Slurm.

    Example:
        >>> name = task_id_from_env() or "local"
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else job_id_from_env()


def attempt_index_from_env() -> int | None:
    """Return the number of requeues of the job by Slurm; `None` if unknown."""
    text = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else None


def _first(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)
