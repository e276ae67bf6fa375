# SPDX-License-Identifier: Apache-2.0
"""What the launcher's own environment variables mean for a launch. Pure.

Workers' variables are in `env.py`; `PET_` variables stand in for flags and are read by `parser.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._config import values
from nvidia_resiliency_ext.fault_tolerance._core.errors import FaultToleranceConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class ThreadsRule(NamedTuple):
    """The value of OMP_NUM_THREADS that workers get, None to leave it alone, and a warning."""

    omp_num_threads: str | None
    warning: str


def omp_rule(environ: Mapping[str, str], nproc: int) -> ThreadsRule:
    """Return what torchrun does: one thread per worker unless somebody decided otherwise."""
    if nproc == 1 or _env.OMP_NUM_THREADS in environ:
        return ThreadsRule(None, "")
    return ThreadsRule(
        "1",
        "OMP_NUM_THREADS is not set: every worker gets 1, so that they do not overload this "
        "machine; set it to what suits the program",
    )


def check_one_launcher_per_node(environ: Mapping[str, str]) -> None:
    """Refuse a Slurm step that starts several launchers on a node.

    Raises:
        FaultToleranceConfigError: It does, and nobody said that this is wanted.
    """
    tasks = environ.get(_env.SLURM_TASKS_PER_NODE, "")
    if not environ.get(_env.SLURM_JOB_ID) or not tasks or _is_true(environ, _env.MULTI_LAUNCHERS):
        return
    if all(_is_one_task(entry.strip()) for entry in tasks.split(",")):
        return
    problem = (
        f"SLURM_TASKS_PER_NODE={tasks!r}: one launcher per node is expected; start it "
        "with srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 (in a batch job the second alone "
        f"does nothing), or set {_env.MULTI_LAUNCHERS}=1 if several are meant"
    )
    raise FaultToleranceConfigError([problem])


def allows_many_launchers(environ: Mapping[str, str]) -> bool:
    """Return whether several launchers of a job may run on one node.

    Raises:
        FaultToleranceConfigError: The variable that says so is no switch.
    """
    return _is_true(environ, _env.MULTI_LAUNCHERS)


def _is_one_task(entry: str) -> bool:
    count, bracket, repeats = entry.partition("(x")
    return count == "1" and (not bracket or (repeats.endswith(")") and repeats[:-1].isdecimal()))


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    raw = environ.get(name, "")
    if not raw:
        return False
    try:
        return bool(values.read(values.BOOL, raw, name))
    except ValueError as error:
        raise FaultToleranceConfigError([str(error)]) from None


def log_level(environ: Mapping[str, str]) -> int:
    """Return the level of the log where no option names one."""
    from nvidia_resiliency_ext.shared_utils.log_manager import LogConfig

    return LogConfig.get_log_level(environ)


def monitor_warnings(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence when the rank monitor is switched off."""
    if environ.get(_env.DISABLE_RANK_MONITORS):
        return [f"{_env.DISABLE_RANK_MONITORS} is set: hangs are not found, no rank has a monitor"]
    return []


def deprecated_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that is set and has no meaning any more."""
    if _env.FT_LAUNCHER_LOGLEVEL in environ:
        return [
            f"{_env.FT_LAUNCHER_LOGLEVEL} is deprecated; use --ft-log-level or {_env.LOG_DEBUG}=1"
        ]
    return []


def timer_file(environ: Mapping[str, str], run_dir: str) -> str | None:
    """Return where programs send their deadlines: the user's path or one in `run_dir`.

    None where nobody has switched that on. The path that a launcher inherits as a rank's child is
    the one of the outer launcher.
    """
    if environ.get(_env.ENABLE_FILE_TIMER) != "1":
        return None
    named = "" if _env.RUN_ID in environ else environ.get(_env.TIMER_FILE, "")
    return named or os.path.join(run_dir, "timers.pipe")
