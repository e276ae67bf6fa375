# SPDX-License-Identifier: Apache-2.0
"""Owns what the environment says about logging; configures nothing.

This is the only place of the logging rooms that reads the environment. A value that makes no sense
is reported through the ``report`` argument and replaced by the default: logging is set up while
modules are imported, where an exception would end a job over a typing mistake.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Report = Callable[[str], None]

__all__ = [
    "DEFAULT_MAX_FILE_SIZE_KB",
    "DEFAULT_MAX_LOG_FILES",
    "cycle",
    "flag",
    "infra_rank",
    "integer",
    "is_json",
    "text",
]

DEFAULT_MAX_FILE_SIZE_KB = 10240
DEFAULT_MAX_LOG_FILES = 4
_TRUE = frozenset({"1", "true", "yes", "on"})


def integer(name: str, report: Report, default: int | None = None) -> int | None:
    """Return the variable ``name`` as a number that is not negative, else ``default``."""
    given = os.environ.get(name, "").strip()
    if not given:
        return default
    if given.isascii() and given.isdigit():
        return int(given[:18])
    shown = "ignored" if default is None else f"using {default}"
    report(f"{name}={given[:64]!r} is not a number of 0 or more: {shown}")
    return default


def text(name: str) -> str | None:
    """Return the variable ``name``, None where it is unset or empty."""
    return os.environ.get(name) or None


def flag(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether the variable ``name`` means yes."""
    return environ.get(name, "").strip().lower() in _TRUE


def infra_rank(report: Report) -> int | None:
    """Return the rank of this launcher among those that Slurm started, None without Slurm.

    The tasks of a Slurm array number their processes from 0 each, so the array's index comes first.
    """
    proc_id = integer("SLURM_PROCID", report)
    task_id = integer("SLURM_ARRAY_TASK_ID", report)
    if proc_id is None or task_id is None:
        return proc_id
    nnodes = integer("SLURM_NNODES", report)
    if nnodes is None:
        nnodes = integer("SLURM_JOB_NUM_NODES", report)
    return proc_id if nnodes is None else task_id * nnodes + proc_id


def cycle(report: Report) -> int | None:
    """Return the launcher's cycle that this process belongs to."""
    return integer("NVRX_CYCLE", report)


def is_json(report: Report) -> bool:
    """Say whether lines are JSON objects instead of text."""
    given = os.environ.get("NVRX_LOG_FORMAT", "").strip().lower()
    if given not in {"", "text", "json"}:
        report(f"NVRX_LOG_FORMAT={given[:64]!r} is neither text nor json: using text")
    return given == "json"
