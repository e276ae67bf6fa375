# SPDX-License-Identifier: Apache-2.0
"""The paths of a launch, the environment of its workers, and its log of each cycle.

The environment is what all workers of a node share, what a cycle adds, and what is a rank's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._core.machine import Assignment
from nvidia_resiliency_ext.fault_tolerance._hosting import services
from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan
from nvidia_resiliency_ext.fault_tolerance._workers import output as outputs
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write
from nvidia_resiliency_ext.shared_utils.rundir import RunDir

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._logs.collector import CycleLogs
    from nvidia_resiliency_ext.fault_tolerance._logs.sinks import FunnelSink

    from .job import Job


logger = logging.getLogger("nvrx")

# A log directory that fails so is no wrong argument.
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})
MAX_NAME_PART = 64


class RunPaths:
    """The paths and names of one launch; what is temporary is removed when `stack` is closed.

    Raises ConfigError for an unusable log directory, LogDirectoryError for a broken file system.
    """

    def __init__(
        self, plan: LaunchPlan, environ: Mapping[str, str], stack: contextlib.ExitStack
    ) -> None:
        self.run_dir = RunDir.create("ft")  # Private, for sockets; removed at the end.
        stack.callback(_remove_again, self.run_dir.path)
        stack.callback(self.run_dir.remove)
        self.run_id = os.urandom(8).hex()  # Unique; processes are found by it.
        self.host = socket.gethostname()
        # The user's object for output (`output_specs`) replaces all flags about output.
        none = outputs.OutputSettings({}, {}, None)
        self.output = plan.output if plan.output_specs is None else none
        # Used in cycles in which the log directory has no space.
        self.spare_files = outputs.OutputFiles(os.path.join(self.run_dir.path, "attempts"))
        self.files = self.spare_files  # The folders of workers.
        if plan.log_dir is not None and plan.output_specs is None:
            name = f"{_file_name(plan.run_id)}_{self.run_id[:8]}"
            try:
                self.files = outputs.OutputFiles.beneath(plan.log_dir, name)
            except outputs.LogDirectoryError as error:
                if error.number in _PASSING:
                    raise  # a start elsewhere or later may succeed
                raise ConfigError(str(error)) from None
        elif self.output.writes_files:
            import tempfile

            # They are to be kept although no --log-dir was given.
            self.files = outputs.OutputFiles(tempfile.mkdtemp(prefix="nvrx-logs-"))
            logger.info("logs of the workers: %s", self.files.root)
        record_dir = environ.get("NVRX_EVENT_DIR") or plan.log_dir
        self.record_dir = record_dir or self.run_dir.path  # Events, failures and stacks.
        self.record_is_temporary = record_dir is None
        self.launcher_socket = self.run_dir.socket_path("launcher.sock")
        watched = plan.nproc_per_node if plan.monitors_enabled else 0
        sockets = (self.run_dir.socket_path(f"rmon{rank}.sock") for rank in range(watched))
        self.monitor_sockets = tuple(sockets)  # By local rank; empty without monitors.


def _file_name(job_id: str) -> str:
    """Return a job's id as part of a file name, so that the id cannot choose the folder."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in job_id[:MAX_NAME_PART])
    return safe.lstrip(".") or "job"


def _remove_again(path: str) -> None:
    """Remove the run directory also when a worker emptied the temporary folder: it is made anew."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)


# A launcher that is itself a rank's child must not hand these on where it sets none of its own.
_OF_AN_OUTER_RANK = frozenset(
    {
        _env.CURRENT_CYCLE_INFO, _env.FT_RANK_MONITOR_IPC_SOCKET,
        "NVRX_CYCLE_START_TIME", "NVRX_INFRA_RANK",
    }
)  # fmt: skip


def shared_variables(
    plan: LaunchPlan, paths: RunPaths, environ: Mapping[str, str], store: str | None
) -> dict[str, str]:
    """Return the variables that all workers of the node share; `store`: address of the store."""
    variables = {
        **{name: value for name, value in environ.items() if name not in _OF_AN_OUTER_RANK},
        _env.RUN_ID: paths.run_id,
        "NVRX_MEMBERSHIP": "active",
        _env.FT_LAUNCHER_IPC_SOCKET: paths.launcher_socket,
        "LOCAL_WORLD_SIZE": str(plan.nproc_per_node),
        "ROLE_NAME": plan.role,
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signum.name for signum in plan.signals),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    variables.setdefault("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    if store is not None:
        # Ranks that restart in their processes meet there: it outlives them all.
        variables.setdefault(_env.INPROCESS_STORE, store)
    if plan.omp_num_threads is not None:
        variables["OMP_NUM_THREADS"] = plan.omp_num_threads
    return variables


def cycle_variables(
    launch_time: float, cycle_start_time: float | None, infra_rank: int
) -> dict[str, str]:
    """Return when a cycle began (unix s), and the scheduler's rank of this node, where known."""
    variables = {"NVRX_LAUNCH_TIME": repr(launch_time)}
    if cycle_start_time is not None:  # Of its rendezvous, from cycle 1 on.
        variables["NVRX_CYCLE_START_TIME"] = repr(cycle_start_time)
    if infra_rank >= 0:
        variables["NVRX_INFRA_RANK"] = str(infra_rank)
    return variables


def rank_variables(
    plan: LaunchPlan, paths: RunPaths, assignment: Assignment, local_rank: int, error_file: str
) -> dict[str, str]:
    """Return the variables of one worker in one round; `@record` writes to `error_file`."""
    rank = str(assignment.rank_offset + local_rank)
    world_size = str(assignment.world_size)
    variables = {
        "LOCAL_RANK": str(local_rank),
        "RANK": rank,
        "ROLE_RANK": rank,
        "WORLD_SIZE": world_size,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_RANK": str(assignment.group_rank),
        "GROUP_WORLD_SIZE": str(assignment.group_world_size),
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.cycle),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "NVRX_CYCLE": str(assignment.cycle),
    }
    if plan.virtual_devices is not None:
        variables["LOCAL_RANK"] = "0"
        variables["CUDA_VISIBLE_DEVICES"] = plan.virtual_devices[local_rank]
    if paths.monitor_sockets:
        variables[_env.FT_RANK_MONITOR_IPC_SOCKET] = paths.monitor_sockets[local_rank]
    return variables


def cycle_info_environment(plan: LaunchPlan) -> dict[str, str]:
    """Return the environment variables about cycle information; the same in all cycles."""
    directory = plan.fault_tol_cfg.cycle_info_dir
    if directory is None:
        return {}
    from nvidia_resiliency_ext.fault_tolerance._report.cycle_files import CycleInfoReporter
    from nvidia_resiliency_ext.shared_utils.job_metadata import job_id_from_env

    job_id = plan.cycle_info_job_id
    path = CycleInfoReporter.current_cycle_info_path(
        directory, job_id_from_env() or "" if job_id is None else job_id
    )
    return {_env.CURRENT_CYCLE_INFO: path}


class CycleRecords:
    """Cycle logs of one node; `close` ends all of it. Raises NvrxError: a directory is unusable.

    The job's log servers are at `server_address`, as this node reaches it; `is_host`: it runs them.
    """

    def __init__(self, job: Job, server_address: str, *, is_host: bool) -> None:
        self._plan, self._environ, self._paths = job.plan, job.environ, job.paths
        self._server_address = server_address
        self._token: services.TokenFile = services.token_file(
            job.environ, job.plan.fault_tol_cfg.rdzv_token_file, job.paths.run_dir.path
        )
        self.asks_for_log_server = job.plan.logs.server is not None and not is_host
        self._lock = threading.Lock()  # guards the next field
        self._log_server_said = ""
        self._logs: CycleLogs | None = None
        self._funnel: FunnelSink | None = None
        try:
            self._open_logs()
        except BaseException:
            self.close()
            raise

    def _open_logs(self) -> None:
        logs = self._plan.logs
        if logs.applog_prefix is None:
            return
        from nvidia_resiliency_ext.fault_tolerance._logs.collector import CycleLogs

        self._funnel = self._find_funnel()
        self._logs = CycleLogs(
            logs.applog_prefix,
            workers=self._plan.nproc_per_node,
            funnel=self._funnel,
            spill_dir=self._environ.get(_env.NODE_LOCAL_TMPDIR),
        )
        if logs.launcher_log_file is not None and logs.launcher_pipe_fd is not None:
            self._logs.read_own(logs.launcher_pipe_fd, logs.launcher_log_file)
        elif logs.launcher_log_file is not None:
            self._logs.capture_own_streams(logs.launcher_log_file)

    def _find_funnel(self) -> FunnelSink | None:
        logs = self._plan.logs
        if logs.server is None and logs.server_endpoint is None:
            return None
        from nvidia_resiliency_ext.fault_tolerance._logs.sinks import FunnelSink, endpoint_of

        node_id = logs.node_id or self._paths.host
        if logs.server is not None:
            port = logs.server.ports.client_connect_port()
            return FunnelSink(endpoint_of(self._server_address, port), node_id, self._token.path)
        given = self._token.path if self._token.is_given else None
        return FunnelSink(str(logs.server_endpoint), node_id, given)

    def log_server_said(self, said: str | None) -> None:
        """Take the coordinator's answer on its log servers; from any thread, may be repeated."""
        with self._lock:
            first, self._log_server_said = not self._log_server_said, said or services.NO_SERVER
        if said == services.IN_A_FILE and self._token.is_given:
            return
        if said is not None and said not in (services.IN_A_FILE, services.NO_SERVER):
            if not self._token.is_given:
                atomic_write(self._token.path, said.encode())
                if self._funnel is not None:
                    self._funnel.try_again()
            return
        if not first:
            return  # Who has sent lines to a server goes on waiting for it.
        why = "the rendezvous host runs no log server"
        if said == services.IN_A_FILE:
            why = (
                "the job's log server asks for a token from a file:"
                f" give this node {_env.LOG_FUNNEL_TOKEN_FILE}, too"
            )
        logger.warning("%s; this node writes its logs itself", why)
        if self._funnel is not None:
            self._funnel.write_files_instead()

    def begin(self, assignment: Assignment) -> None:
        if self._logs is not None:
            self._logs.begin_cycle(assignment.cycle, assignment.world_size)

    def output(self, output: outputs.WorkerOutput, rank: int) -> outputs.WorkerOutput:
        """Return where a worker's streams go: into its pipe, if there are cycle logs."""
        logs = self._logs
        if logs is None:
            return output
        piped = outputs.Target(open_pipe=lambda: logs.open_pipe(rank))
        return dataclasses.replace(output, stdout=piped, stderr=piped)

    def close(self) -> None:
        """Write the workers' remaining output, for some seconds at most, and end the threads."""
        logs, self._logs = self._logs, None
        if logs is not None and not logs.close():
            logger.error("not all output of the workers is in %s", self._plan.logs.applog_prefix)
