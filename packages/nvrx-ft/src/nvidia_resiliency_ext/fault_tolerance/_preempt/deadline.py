# SPDX-License-Identifier: Apache-2.0
"""When the job's time is over, and when ranks are to begin to save. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from nvidia_resiliency_ext.fault_tolerance._env import SLURM_JOB_END_TIME
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

__all__ = ["announce_at", "end_of_job", "is_told"]


def end_of_job(deadline: str | None, environ: Mapping[str, str], now: float) -> float | None:
    """Return when the job's time is over (unix s), or None when it has no end.

    Args:
        deadline: The option `preempt_deadline`.
        environ: The launcher's environment.
        now: The launcher's start (unix s).

    Raises:
        ConfigError: Slurm is to be asked, and has not told.
    """
    if deadline is None:
        return None
    if deadline.startswith("+"):
        return now + float(deadline)
    if deadline != "slurm":
        return float(deadline)
    try:
        return float(environ.get(SLURM_JOB_END_TIME, ""))
    except ValueError:
        raise ConfigError(
            f"--ft-preempt-deadline slurm: {SLURM_JOB_END_TIME} is"
            f" {environ.get(SLURM_JOB_END_TIME, 'not set')!r}; Slurm sets it from version 22.05 on,"
            " elsewhere give the time itself"
        ) from None


def is_told(deadline: str | None) -> bool:
    """Return whether the option names a time, by whoever's clock, and not a time from now on."""
    return deadline is not None and not deadline.startswith("+")


def announce_at(end: float, grace_s: float) -> float:
    """Return when ranks are asked to save and leave."""
    return end - grace_s
