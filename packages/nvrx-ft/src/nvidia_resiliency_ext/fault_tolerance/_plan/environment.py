# SPDX-License-Identifier: Apache-2.0
"""What the launcher's own environment variables mean for a launch. Pure.

Workers' variables are in `_agent/run_files.py`; the parser reads `PET_` variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._config import values
from nvidia_resiliency_ext.fault_tolerance._core.errors import FaultToleranceConfigError

OMP_WARNING = (
    "OMP_NUM_THREADS is not set: every worker gets 1, so that they do not overload this machine; "
    "set it to what suits the program"
)
MONITOR_WARNING = f"{_env.DISABLE_RANK_MONITORS} is set: hangs are not found, no rank has a monitor"


def omp_num_threads(environ: Mapping[str, str], nproc: int) -> str | None:
    """Return OMP_NUM_THREADS of workers as torchrun sets it, or None: it is left alone."""
    return None if nproc == 1 or _env.OMP_NUM_THREADS in environ else "1"


def check_one_launcher_per_node(environ: Mapping[str, str]) -> None:
    """Refuse a Slurm step that starts several launchers on a node, which nobody said is wanted."""
    tasks = environ.get(_env.SLURM_TASKS_PER_NODE, "")
    if not environ.get(_env.SLURM_JOB_ID) or not tasks or allows_many_launchers(environ):
        return
    if all(re.fullmatch(r"1(\(x[0-9]+\))?", entry.strip()) for entry in tasks.split(",")):
        return
    problem = (
        f"SLURM_TASKS_PER_NODE={tasks!r}: one launcher per node is expected; start it "
        "with srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 (in a batch job the second alone "
        f"does nothing), or set {_env.MULTI_LAUNCHERS}=1 if several are meant"
    )
    raise FaultToleranceConfigError([problem])


def allows_many_launchers(environ: Mapping[str, str]) -> bool:
    """Return whether several launchers of a job may run on one node."""
    raw = environ.get(_env.MULTI_LAUNCHERS, "")
    try:
        return bool(raw and values.read(values.BOOL, raw, _env.MULTI_LAUNCHERS))
    except ValueError as error:
        raise FaultToleranceConfigError([str(error)]) from None


def log_level(environ: Mapping[str, str]) -> int:
    """Return the level of the log where no option names one."""
    from nvidia_resiliency_ext.shared_utils.log_manager import LogConfig

    return LogConfig.get_log_level(environ)


def timer_file(environ: Mapping[str, str], run_dir: str) -> str | None:
    """Return where programs send their deadlines: the user's path, or one in `run_dir`."""
    if environ.get(_env.ENABLE_FILE_TIMER) != "1":
        return None
    # What a launcher inherits as a rank's child is the outer launcher's.
    named = "" if _env.RUN_ID in environ else environ.get(_env.TIMER_FILE, "")
    return named or os.path.join(run_dir, "timers.pipe")
