# SPDX-License-Identifier: Apache-2.0
"""Reading single environment variables; what they mean to a rank is in `rank.py`."""

import os
from typing import Final

from nvidia_resiliency_ext.fault_tolerance import _env

__all__ = ["is_slurm_job_array", "parse_bool_env"]

_BOOLS: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def parse_bool_env(var_name: str) -> bool:
    """Return a switch from the environment: 1/true/yes or 0/false/no in any case; unset is False.

    Raises:
        ValueError: it is set to anything else.
    """
    text = os.environ.get(var_name)
    if text is None:
        return False
    try:
        return _BOOLS[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{var_name}={text!r} is neither 1/true/yes nor 0/false/no") from None


def is_slurm_job_array() -> bool:
    """Return whether this process belongs to a Slurm job array."""
    return _env.SLURM_ARRAY_TASK_ID in os.environ
