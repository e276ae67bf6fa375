# SPDX-License-Identifier: Apache-2.0
"""The one place of the health rooms that reads the environment."""

from __future__ import annotations

import logging
import math
import os

from .check import log_once

__all__ = [
    "expected_gpus",
    "job_start_s",
    "local_rank",
    "nvml_in_helper",
    "nvml_timeout_s",
    "visible_devices",
]

_DEFAULT_NVML_TIMEOUT_S = 10.0
_MAX_TIMEOUT_S = 86400.0
_TRUE = frozenset({"1", "true", "yes", "on"})


def nvml_timeout_s() -> float:
    """Return how long one driver call may take."""
    value = _number("NVRX_NVML_TIMEOUT_S", f"using {_DEFAULT_NVML_TIMEOUT_S:g}")
    if value is None or value <= 0:
        return _DEFAULT_NVML_TIMEOUT_S
    return min(value, _MAX_TIMEOUT_S)


def nvml_in_helper() -> bool:
    """Say whether driver calls run in a process of their own, which can be killed."""
    return os.environ.get("NVRX_NVML_SUBPROCESS", "").strip().lower() in _TRUE


def expected_gpus() -> int | None:
    """Return how many GPUs this node is said to have."""
    value = _number("NVRX_EXPECTED_GPUS", "ignored")
    return None if value is None or value < 0 else int(value)


def local_rank() -> int | None:
    """Return this process's rank on its node."""
    value = _number("LOCAL_RANK", "ignored")
    return None if value is None or value < 0 else int(value)


def visible_devices() -> str | None:
    """Return which devices CUDA may use, as the user wrote it; `None` for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def job_start_s() -> float | None:
    """Return when Slurm started the job, in seconds since the epoch."""
    return _number("SLURM_JOB_START_TIME", "ignored")


def _number(name: str, instead: str) -> float | None:
    given = os.environ.get(name, "").strip()
    if not given:
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return value
    message = f"{name}={given[:64]!r} is not a number: {instead}"
    log_once(f"setting {name}", logging.WARNING, message)
    return None
