# SPDX-License-Identifier: Apache-2.0
"""The launcher as a library: `elastic_launch` and `LaunchConfig` served by our own loop."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from nvidia_resiliency_ext.fault_tolerance import _env, rdzv_utils
from nvidia_resiliency_ext.fault_tolerance._agent.agent import Result
from nvidia_resiliency_ext.fault_tolerance._agent.job import Job
from nvidia_resiliency_ext.fault_tolerance._config import values as v
from nvidia_resiliency_ext.fault_tolerance._config.attribution import AttributionConfig
from nvidia_resiliency_ext.fault_tolerance._config.flags import BACKENDS
from nvidia_resiliency_ext.fault_tolerance._config.launch_config import (
    RDZV_IMPL,
    USE_INFRA_GROUP_RANK,
    LaunchConfig,
)
from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance._config.syntax import SIGNALS, parse_signals
from nvidia_resiliency_ext.fault_tolerance._config.table import RESTART_POLICY
from nvidia_resiliency_ext.fault_tolerance._config.values import noting
from nvidia_resiliency_ext.fault_tolerance._core import errors
from nvidia_resiliency_ext.fault_tolerance._core.local_world import MOST_WORKERS, devices_of_ranks
from nvidia_resiliency_ext.fault_tolerance._core.machine import EXIT_OK
from nvidia_resiliency_ext.fault_tolerance._plan import plan as plans
from nvidia_resiliency_ext.fault_tolerance._plan.log_plan import ORPHANS_NEED_NO_PIPES, LogPlan
from nvidia_resiliency_ext.fault_tolerance._report.torch_events import check_handler
from nvidia_resiliency_ext.fault_tolerance._workers import command as commands
from nvidia_resiliency_ext.fault_tolerance._workers.function_worker import FunctionCall
from nvidia_resiliency_ext.fault_tolerance._workers.log_specs import OutputSpecs
from nvidia_resiliency_ext.fault_tolerance._workers.output import Stream
from nvidia_resiliency_ext.shared_utils.rundir import RunDir

_KINDS: Mapping[str, v.Kind] = {
    "nproc_per_node": v.integer_in(1, MOST_WORKERS),
    "max_restarts": v.COUNT,
    "term_timeout": v.SECONDS,
    "workers_stop_timeout": v.SECONDS,
    "shutdown_timeout": v.SECONDS_OR_NONE,
    "restart_policy": RESTART_POLICY,
    "master_port": v.or_none(v.integer_in(0, 65535)),
    "no_restart_exit_code": v.integer_in(1, 255),
    "signals_to_handle": SIGNALS,
}
_KINDS_OF_MANY_NODES: Mapping[str, v.Kind] = {
    "rdzv_backend": v.choice(*BACKENDS),
    RDZV_IMPL: v.choice("barrier", "legacy"),
}


def plan_from_config(
    config: LaunchConfig, command: commands.WorkerCommand, environ: Mapping[str, str]
) -> plans.LaunchPlan:
    """Return the plan of a job that a program describes; flags and `PET_` variables do not count.

    Raises ValueError, which names all that this version does not offer or that cannot be.
    """
    plans.check_one_launcher_per_node(environ)
    given: FaultToleranceConfig | None = config.fault_tol_cfg
    fault_tolerance = FaultToleranceConfig() if given is None else given
    if given is None:
        fault_tolerance.log_level = plans.log_level(environ)
    logs, attribution = plans.LogSettings(), AttributionConfig()
    devices: tuple[str, ...] | None = None
    problems = _problems(config) + plans.missing_hook(fault_tolerance.bad_node_hook, environ)
    with noting(problems):
        logs = _log_settings(config.logs_specs)
        if logs.logs.applog_prefix is not None and fault_tolerance.orphan_workers == "keep":
            problems.append(ORPHANS_NEED_NO_PIPES)
        attribution = logs.attribution or AttributionConfig.from_args(
            argparse.Namespace(), logs.logs.applog_prefix, fault_tolerance
        )
    with noting(problems):
        check_handler(config.event_log_handler)
        if config.virtual_local_rank:
            devices = devices_of_ranks(environ, config.nproc_per_node)
    if problems:
        raise errors.FaultToleranceConfigError(problems)
    threads = plans.omp_num_threads(environ, config.nproc_per_node)
    filters = {
        Stream.STDOUT: tuple(config.duplicate_stdout_filters or ()),
        Stream.STDERR: tuple(config.duplicate_stderr_filters or ()),
    }
    node_rank = config.node_rank
    if node_rank is None and config.rdzv_backend == "static":
        # Where torch's static backend has it.
        node_rank = rdzv_utils.rdzv_config_get_as_int(config.rdzv_configs, "rank")
    port = plans.fixed_port(config.master_port or None, config.rdzv_endpoint, config.max_nodes)
    values: dict[str, Any] = {
        **{item.name: getattr(config, item.name) for item in fields(LaunchConfig)},
        "fault_tol_cfg": fault_tolerance,
        "run_id": config.run_id or ("none" if config.max_nodes > 1 else plans.random_id()),
        "master_port": port,
        "node_rank": node_rank,
    }
    if config.shutdown_timeout is not None:
        values["workers_stop_timeout"] = config.shutdown_timeout
    return plans.LaunchPlan(
        **values,
        command=command,
        log_dir=logs.log_dir,
        output=replace(logs.output, filters=filters),
        output_specs=logs.output_specs and replace(logs.output_specs, filters=filters),
        logs=logs.logs,
        attribution=attribution,
        signals=parse_signals(config.signals_to_handle),
        virtual_devices=devices,
        omp_num_threads=threads,
        monitors_enabled=not environ.get(_env.DISABLE_RANK_MONITORS),
        warnings=(plans.OMP_WARNING,) if threads else (),
    )


def _log_settings(specs: object) -> plans.LogSettings:
    """Convert `logs_specs` to log settings. Raises ValueError: of an unknown type."""
    if specs is None:
        return plans.LogSettings()
    if isinstance(specs, plans.LogSettings):
        return specs
    # By its method: importing the class would import torch.
    plan_of = getattr(specs, "log_plan", None)
    plan = plan_of() if plan_of is not None else None
    if isinstance(plan, LogPlan):
        return plans.LogSettings(logs=plan)
    if callable(getattr(specs, "reify", None)):
        return plans.LogSettings(output_specs=OutputSpecs(specs, {}))
    raise ValueError("logs_specs: takes what config_from_args returns, or a LogsSpecs of torch")


def _problems(config: LaunchConfig) -> list[str]:
    """Return a sentence for each field with an unusable value."""
    problems = []
    if not 1 <= config.min_nodes <= config.max_nodes:
        given_nodes = f"min_nodes={config.min_nodes}, max_nodes={config.max_nodes}"
        problems.append(f"{given_nodes}: 1 <= min_nodes <= max_nodes must hold")
    kinds = _KINDS if config.max_nodes == 1 else {**_KINDS, **_KINDS_OF_MANY_NODES}
    given = {**vars(config), RDZV_IMPL: config.rdzv_configs.get(RDZV_IMPL, "barrier")}
    for name, kind in kinds.items():
        with noting(problems):
            v.read(kind, given[name], name)
    with noting(problems):
        rdzv_utils.rdzv_config_get_as_bool(config.rdzv_configs, USE_INFRA_GROUP_RANK)
        plans.check_job_id(config.cycle_info_job_id)
    if config.max_nodes > 1 and not config.rdzv_endpoint:
        problems.append("rdzv_endpoint: say where the nodes meet, as host:port")
    if config.rank_monitors:
        problems.append("rank_monitors: the launcher starts its own; leave it out")
    return problems


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
    plan = plans.plan_from_args(args, os.environ, looks_for_script=False)
    if (launcher_pipe_read_fd is None) != (launcher_log_file is None):
        raise ValueError("launcher_pipe_read_fd and launcher_log_file go together")
    if launcher_pipe_read_fd is not None:
        if plan.logs.applog_prefix is None:
            raise ValueError("launcher_log_file needs --ft-per-cycle-applog-prefix")
        logs = replace(
            plan.logs, launcher_log_file=launcher_log_file, launcher_pipe_fd=launcher_pipe_read_fd
        )
        plan = replace(plan, logs=logs, logs_specs=replace(plan.logs_specs, logs=logs))
    command, *rest = plan.command.argv
    return plan, command, rest


def run(args: argparse.Namespace) -> None:
    """Run the job of `args`, from `parse_args`, as `torch.distributed.run.run` does.

    Raises:
        ValueError: The command line is wrong.
        ChildFailedError: Workers failed and no restart was left (torch's class).
    """
    _run_plan(plans.plan_from_args(args, os.environ))


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
        """Run the job; return the results of this node's global ranks (None for programs)."""
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(
    config: LaunchConfig, entrypoint: Entrypoint, args: Sequence[object]
) -> dict[int, Any]:
    """Run this node's part of a job and return its ranks' results, by global rank.

    A node that stood by to the end returns nothing: an empty dictionary. `config` describes the
    job; `entrypoint` is a function, or a program, `args` are its arguments.

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
        command = commands.WorkerCommand(argv, entrypoint, is_module=False, is_python=False)
        plan = plan_from_config(config, command, os.environ)
        numa = _binding(config) or commands.numa_binding(
            plan.nproc_per_node, os.environ, is_strict=plan.fault_tol_cfg.numa_bind_strict
        )
        plan = replace(plan, command=replace(command, numa=numa))
        return dict.fromkeys(_run_plan(plan))
    run_dir = RunDir.create("call")
    try:
        call = FunctionCall(run_dir.path, entrypoint, args)
        name = getattr(entrypoint, "__qualname__", repr(entrypoint))
        command = commands.WorkerCommand(
            argv=call.argv, entry=name, is_module=False, is_python=False, numa=_binding(config)
        )
        ranks = _run_plan(plan_from_config(config, command, os.environ))
        return {rank: call.result(rank) for rank in ranks}
    finally:
        run_dir.remove()


def _binding(config: LaunchConfig) -> Sequence[tuple[str, ...]]:
    """Return the binding words of each rank for `numa_options`: torch's object or a mode's name."""
    options = config.numa_options
    if options is None:
        return ()
    mode = getattr(options, "affinity_mode", options)
    text = str(getattr(mode, "value", mode))
    return commands.cpu_binding(
        text, config.nproc_per_node, os.environ, commands.visible_gpus(os.environ)
    )


def _run_plan(plan: plans.LaunchPlan) -> tuple[int, ...]:
    """Run a plan and return the global ranks that ended well here."""
    plans.log_warnings(plan)
    with Job(plan, os.environ) as job:
        result = job.run()
        ranks = job.agent.ranks
    if result.exit_code != EXIT_OK:
        _raise(plan, result)
    return ranks


def _raise(plan: plans.LaunchPlan, result: Result) -> None:
    if result.no_restart:
        raise errors.NoRestartRequested(result.no_restart, result.reason)
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
        raise errors.UnhealthyNodeException(result.reason)
    if not failures:
        raise RuntimeError(result.reason)
    raise ChildFailedError(plan.command.entry, failures)
