# SPDX-License-Identifier: Apache-2.0
"""Cycle logs as torch's agents know them: log specification and handler of a process.

Our own launcher asks the specification and does not import this module, which imports torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._logs.collector import CycleLogs
from nvidia_resiliency_ext.fault_tolerance._logs.lines import cycle_log_file
from nvidia_resiliency_ext.fault_tolerance._logs.reader import open_pipe
from nvidia_resiliency_ext.fault_tolerance._logs.sinks import FunnelSink
from nvidia_resiliency_ext.fault_tolerance._plan.log_plan import LogPlan


class PipeSubprocessHandler:
    """Starts a command whose stdout and stderr lead into one pipe.

    Args:
        entrypoint: The program.
        args: Its arguments.
        env: Variables beside our own.
        stdout, stderr: Not used: there is one pipe.
        local_rank_id: The worker's local rank; an attribute, too.
        numa_options: Not used.

    Attributes:
        rank: Its global rank.
        proc: The process.
        pipe_fd: The pipe's reading end, until somebody reads it.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - as torch's handler
        self,
        entrypoint: str,
        args: tuple[Any, ...],
        env: Mapping[str, str],
        stdout: str | None = None,  # noqa: ARG002 - as torch's handler
        stderr: str | None = None,  # noqa: ARG002
        local_rank_id: int = 0,
        numa_options: object = None,  # noqa: ARG002
    ) -> None:
        self.local_rank_id = local_rank_id
        self.rank = int(env.get(_env.RANK, local_rank_id))
        reading, writing = open_pipe()
        self.pipe_fd: int | None = reading
        try:
            self.proc = subprocess.Popen(
                [entrypoint, *(str(arg) for arg in args)],
                env={**os.environ, **env},
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)

    def take_pipe(self) -> int | None:
        """Return the pipe's reading end; the caller owns it."""
        fd, self.pipe_fd = self.pipe_fd, None
        return fd

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send `death_sig` (None: SIGTERM) to the process's group; the pipe stays until its end."""
        os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


class PipeBasedLogsSpecs(LogsSpecs):
    """One log per cycle, with the output of all workers of a node in whole, prefixed lines.

    As `LaunchConfig.logs_specs` it is all that `elastic_launch` needs. An agent of torch's kind
    calls `reify` before each cycle, starts `PipeSubprocessHandler`s and hands them to
    `update_reader_for_cycle`.

    Args:
        base_log_file: Absolute path; a cycle's log has `_cycle<number>` before the extension.
        launcher_pipe_fd: A pipe that carries the launcher's own output.
        launcher_log_file: Where that goes.
        grpc_server_address: `host:port` of the log server that keeps the logs; None: files.
        node_id: What the log server calls this node.

    Raises:
        ValueError: Of two that belong together one is missing, or a path is not absolute.
    """

    def __init__(
        self,
        base_log_file: str,
        launcher_pipe_fd: int | None = None,
        launcher_log_file: str | None = None,
        grpc_server_address: str | None = None,
        node_id: str | None = None,
    ) -> None:
        super().__init__()
        if not os.path.isabs(base_log_file):
            raise ValueError(f"base_log_file={base_log_file!r}: is no absolute path")
        if launcher_pipe_fd is not None and not launcher_log_file:
            raise ValueError("launcher_pipe_fd needs launcher_log_file")
        if grpc_server_address is not None and not node_id:
            raise ValueError("grpc_server_address needs node_id")
        self._base_log_file = base_log_file
        self._plan = LogPlan(
            applog_prefix=base_log_file,
            launcher_log_file=launcher_log_file,
            launcher_pipe_fd=launcher_pipe_fd,
            server_endpoint=grpc_server_address,
            node_id=node_id,
        )
        self._logs: CycleLogs | None = None
        self._folder: str | None = None

    def log_plan(self) -> LogPlan:
        """Return the log plan that a launch takes from these specifications."""
        return self._plan

    @property
    def root_log_dir(self) -> str:
        """The folder of error files; it is made when it is first asked for."""
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="nvrx-logs-")
        return self._folder

    def get_cycle_log_file(self, cycle: int) -> str:
        """Return the path of the log of `cycle`, a number from 0."""
        return cycle_log_file(self._base_log_file, cycle)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Begin the cycle that `envs`, each worker's variables, name; return their error files."""
        one: Mapping[str, str] = next(iter(envs.values()), {})
        cycle = int(one.get("TORCHELASTIC_RESTART_COUNT", 0))
        self._open().begin_cycle(cycle, int(one.get("WORLD_SIZE", len(envs))))
        destination = LogsDest()
        for local_rank in envs:
            folder = os.path.join(self.root_log_dir, f"attempt_{cycle}", str(local_rank))
            os.makedirs(folder, exist_ok=True)
            destination.error_files[local_rank] = os.path.join(folder, "error.json")
            destination.stdouts[local_rank] = destination.stderrs[local_rank] = ""
            destination.tee_stdouts[local_rank] = destination.tee_stderrs[local_rank] = ""
        return destination

    def update_reader_for_cycle(self, handlers: Mapping[int, PipeSubprocessHandler]) -> None:
        """Read the pipes of workers that were just started; `handlers` has them by local rank."""
        logs = self._open()
        for handler in handlers.values():
            fd = handler.take_pipe()
            if fd is not None:
                logs.read(fd, handler.rank)

    def clear_all_pipes_from_reader(self) -> None:
        """Record that the workers are gone: their pipes are read to the ends, for 2 s at most."""
        if self._logs is not None:
            self._logs.end_cycle()

    def cleanup(self) -> None:
        """Write remaining output, end the threads and remove the folder of error files."""
        logs, self._logs = self._logs, None
        if logs is not None:
            logs.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _open(self) -> CycleLogs:
        if self._logs is None:
            plan, funnel = self._plan, None
            if plan.server_endpoint is not None and plan.node_id is not None:
                token_file = os.environ.get(_env.LOG_FUNNEL_TOKEN_FILE)
                funnel = FunnelSink(plan.server_endpoint, plan.node_id, token_file)
            self._logs = CycleLogs(self._base_log_file, funnel=funnel)
            if plan.launcher_pipe_fd is not None and plan.launcher_log_file is not None:
                self._logs.read_own(plan.launcher_pipe_fd, plan.launcher_log_file)
        return self._logs
