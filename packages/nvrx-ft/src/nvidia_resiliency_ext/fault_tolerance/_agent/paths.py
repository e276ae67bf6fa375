# SPDX-License-Identifier: Apache-2.0
"""Where a launch keeps its things: run directory, record, workers' files, sockets."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan
from nvidia_resiliency_ext.fault_tolerance._workers.output import OutputFiles, OutputSettings
from nvidia_resiliency_ext.shared_utils.rundir import RunDir

logger = logging.getLogger("nvrx")

MAX_NAME_PART = 64


@dataclass(frozen=True, slots=True)
class Place:
    """The paths and names of one launch.

    Attributes:
        run_dir: The private directory for sockets, removed at the end.
        run_id: Unique for this launch; processes are found by it.
        host: This node's name.
        record_dir: Where events, failures and stacks go.
        record_is_temporary: Whether that is the run directory.
        output: What the user wants of the workers' output.
        files: The folders of workers.
        spare_files: Those in the run directory, for cycles in which the others have no room.
        launcher_socket: The mailbox.
        monitor_sockets: One per local rank; empty without monitors.
    """

    run_dir: RunDir
    run_id: str
    host: str
    record_dir: str
    record_is_temporary: bool
    output: OutputSettings
    files: OutputFiles
    spare_files: OutputFiles
    launcher_socket: str
    monitor_sockets: tuple[str, ...]


def make_place(plan: LaunchPlan, environ: Mapping[str, str], stack: contextlib.ExitStack) -> Place:
    """Make the directories of a launch; what is temporary is removed when `stack` is closed.

    Raises:
        LogDirectoryError: The log directory cannot be written.
    """
    run_dir = RunDir.create("ft")
    stack.callback(_remove_again, run_dir.path)
    stack.callback(run_dir.remove)
    run_id = os.urandom(8).hex()
    # What an object of the user's says about output takes the place of the flags, folders included.
    output = plan.output if plan.output_specs is None else OutputSettings({}, {}, None)
    spare_files = OutputFiles(os.path.join(run_dir.path, "attempts"))
    if plan.log_dir is not None and plan.output_specs is None:
        files = OutputFiles.beneath(plan.log_dir, f"{_file_name(plan.run_id)}_{run_id[:8]}")
    elif output.writes_files:
        files = OutputFiles.in_new_folder()
        logger.info("logs of the workers: %s", files.root)
    else:
        files = spare_files
    record_dir = environ.get("NVRX_EVENT_DIR") or plan.log_dir
    watched = plan.nproc_per_node if plan.monitors_enabled else 0
    return Place(
        run_dir=run_dir,
        run_id=run_id,
        host=socket.gethostname(),
        record_dir=record_dir or run_dir.path,
        record_is_temporary=record_dir is None,
        output=output,
        files=files,
        spare_files=spare_files,
        launcher_socket=run_dir.socket_path("launcher.sock"),
        monitor_sockets=tuple(run_dir.socket_path(f"rmon{rank}.sock") for rank in range(watched)),
    )


def _file_name(job_id: str) -> str:
    """Return a job's id as part of a file name: whoever chose it must not choose the folder."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in job_id[:MAX_NAME_PART])
    return safe.lstrip(".") or "job"


def _remove_again(path: str) -> None:
    """Remove the run directory also when it is not the one that was made.

    A worker that empties the temporary folder makes the next cycle create it anew.
    """
    import shutil

    shutil.rmtree(path, ignore_errors=True)
