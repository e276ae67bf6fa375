# SPDX-License-Identifier: Apache-2.0
"""What the launcher says through the environment."""

from __future__ import annotations

import os

__all__ = ["job_id", "launch_cycle"]


def launch_cycle() -> int | None:
    """Return how often the launcher has started this job again, None without a launcher."""
    text = os.environ.get("NVRX_CYCLE") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or ""
    return int(text) if text.isascii() and text.isdigit() else None


def job_id() -> str:
    """Return the scheduler's or launcher's name of this job, empty without one."""
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or ""
