# SPDX-License-Identifier: Apache-2.0
"""The launcher as a library: torch's `elastic_launch` calls served by our own loop.

`run`, `launch_agent` and `elastic_launch` behave as their namesakes of torch: a failure is a
`ChildFailedError` of torch, which is imported only then. Function entry points start in fresh
interpreters, never from standbys, whatever `start_method` says. What of a configuration has no
effect on one node is said in `library_plan.plan_from_config`.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance._agent.agent import Result
from nvidia_resiliency_ext.fault_tolerance._agent.job import Job
from nvidia_resiliency_ext.fault_tolerance._config.launch_config import LaunchConfig
from nvidia_resiliency_ext.fault_tolerance._core.errors import (
    NoRestartRequested,
    UnhealthyNodeException,
)
from nvidia_resiliency_ext.fault_tolerance._core.machine import EXIT_OK
from nvidia_resiliency_ext.fault_tolerance._plan.plan import (
    LaunchPlan,
    log_warnings,
    plan_from_args,
)
from nvidia_resiliency_ext.fault_tolerance._workers.command import (
    WorkerCommand,
    cpu_binding,
    numa_binding,
    visible_gpus,
)
from nvidia_resiliency_ext.fault_tolerance._workers.function_worker import FunctionCall
from nvidia_resiliency_ext.shared_utils.rundir import RunDir

from .library_plan import config_from_plan, plan_from_config

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig
    from nvidia_resiliency_ext.fault_tolerance._workers.numa import Binding

Entrypoint = Callable[..., Any] | str


def config_from_args(
    args: argparse.Namespace,
    launcher_pipe_read_fd: int | None = None,
    launcher_log_file: str | None = None,
) -> tuple[LaunchConfig, str, list[str]]:
    """Return configuration, command and arguments of a parsed command line.

    It describes: the script need not exist yet, or not on this machine.

    Args:
        args: What `parse_args` returned.
        launcher_pipe_read_fd: A pipe that carries the launcher's own output; the launch owns it.
        launcher_log_file: Where that goes.

    Raises:
        ValueError: The command line or a file that it names is wrong, or of the two only one is
            given or there are no cycle logs.
    """
    plan = plan_from_args(args, os.environ, looks_for_script=False)
    if (launcher_pipe_read_fd is None) != (launcher_log_file is None):
        raise ValueError("launcher_pipe_read_fd and launcher_log_file go together")
    if launcher_pipe_read_fd is not None:
        if plan.logs.applog_prefix is None:
            raise ValueError("launcher_log_file needs --ft-per-cycle-applog-prefix")
        logs = replace(
            plan.logs, launcher_log_file=launcher_log_file, launcher_pipe_fd=launcher_pipe_read_fd
        )
        plan = replace(plan, logs=logs)
    command, *rest = plan.command.argv
    return config_from_plan(plan), command, rest


def run(args: argparse.Namespace) -> None:
    """Run the job of a parsed command line, as `torch.distributed.run.run` does.

    Args:
        args: What `parse_args` returned.

    Raises:
        ValueError: The command line is wrong.
        ChildFailedError: Workers failed and no restart was left (torch's class).
    """
    _run_plan(plan_from_args(args, os.environ))


class elastic_launch:  # noqa: N801  # torch's name, which users import
    """A job that is started by calling it: `elastic_launch(config, function)(*args)`.

    Example:
        >>> from nvidia_resiliency_ext.fault_tolerance.launcher import LaunchConfig
        >>> config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, fault_tol_cfg=None)
        >>> job = elastic_launch(config, "/bin/true")

    Args:
        config: What to start and how.
        entrypoint: A function, or the path of a program.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Entrypoint | None) -> None:
        if entrypoint is None:
            raise ValueError("elastic_launch needs an entrypoint: a function or a program")
        self._config = config
        self._entrypoint: Entrypoint = entrypoint

    def __call__(self, *args: object) -> dict[int, Any]:
        """Run the job; return what each global rank of this node returned (None for programs)."""
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(
    config: LaunchConfig, entrypoint: Entrypoint, args: Sequence[object]
) -> dict[int, Any]:
    """Run this node's part of a job and return what each of its ranks returned, by global rank.

    A node that stood by to the end returns nothing: an empty dictionary.

    Args:
        config: The job's configuration.
        entrypoint: A function, or a program.
        args: Its arguments.

    Raises:
        ValueError: The configuration asks for what this version does not offer.
        ChildFailedError: Workers failed and no restart was left (torch's class).
        NoRestartRequested: The job makes no progress, or attribution has said that a restart is
            useless; it must not be queued again.
        UnhealthyNodeException: This node failed its health check.
        SignalException: The launcher was asked to end (torch's class).
    """
    if isinstance(entrypoint, str):
        argv = (entrypoint, *(str(arg) for arg in args))
        given: FaultToleranceConfig | None = config.fault_tol_cfg
        numa = _binding(config) or numa_binding(
            os.environ, is_strict=given is None or given.numa_bind_strict
        )
        command = WorkerCommand(argv, entrypoint, is_module=False, is_python=False, numa=numa)
        plan = plan_from_config(config, command, os.environ)
        return dict.fromkeys(_run_plan(plan))
    run_dir = RunDir.create("call")
    try:
        call = FunctionCall(run_dir.path, entrypoint, args)
        name = getattr(entrypoint, "__qualname__", repr(entrypoint))
        command = WorkerCommand(
            argv=call.argv, entry=name, is_module=False, is_python=False, numa=_binding(config)
        )
        ranks = _run_plan(plan_from_config(config, command, os.environ))
        return {rank: call.result(rank) for rank in ranks}
    finally:
        run_dir.remove()


def _binding(config: LaunchConfig) -> Binding | None:
    """Return what `numa_options` asks for: torch's object or the name of a mode."""
    options = config.numa_options
    if options is None:
        return None
    mode = getattr(options, "affinity_mode", options)
    text = str(getattr(mode, "value", mode))
    return cpu_binding(text, config.nproc_per_node, os.environ, visible_gpus(os.environ))


def _run_plan(plan: LaunchPlan) -> tuple[int, ...]:
    """Run a plan and return the global ranks that ended well here."""
    log_warnings(plan)
    with Job(plan, os.environ) as job:
        result = job.run()
        ranks = job.ranks
    if result.exit_code != EXIT_OK:
        _raise(plan, result)
    return ranks


def _raise(plan: LaunchPlan, result: Result) -> None:
    if result.no_restart:
        raise NoRestartRequested(result.no_restart, result.reason)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    if result.stop_signal is not None:
        raise SignalException(result.reason, signal.Signals(result.stop_signal))
    failures = {
        failure.rank: ProcessFailure(
            local_rank=failure.local_rank,
            pid=failure.pid,
            exitcode=failure.status.returncode,
            error_file=(failure.error.path if failure.error else "") or "<N/A>",
        )
        for failure in result.failures
    }
    if result.is_unfit:
        raise UnhealthyNodeException(result.reason)
    if not failures:
        raise RuntimeError(result.reason)
    raise ChildFailedError(plan.command.entry, failures)
