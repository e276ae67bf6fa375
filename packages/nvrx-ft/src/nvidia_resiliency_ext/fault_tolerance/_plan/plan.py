# SPDX-License-Identifier: Apache-2.0
"""From the parsed command line to a `LaunchPlan`: everything a launch needs, checked.

Reads the configuration file and looks whether script and GPUs exist; starts and changes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
import signal
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._config import settings, syntax, values
from nvidia_resiliency_ext.fault_tolerance._config.attribution import AttributionConfig
from nvidia_resiliency_ext.fault_tolerance._config.flags import FLAGS
from nvidia_resiliency_ext.fault_tolerance._config.launch_config import (
    RDZV_IMPL,
    USE_INFRA_GROUP_RANK,
    LaunchConfig,
    get_rdzv_endpoint,
)
from nvidia_resiliency_ext.fault_tolerance._config.values import noting
from nvidia_resiliency_ext.fault_tolerance._core import local_world
from nvidia_resiliency_ext.fault_tolerance._core.errors import FaultToleranceConfigError, nearest
from nvidia_resiliency_ext.fault_tolerance._report.torch_events import check_handler
from nvidia_resiliency_ext.fault_tolerance._workers import command as commands
from nvidia_resiliency_ext.fault_tolerance._workers.log_specs import OutputSpecs, load_specs
from nvidia_resiliency_ext.fault_tolerance._workers.output import OutputSettings, Stream
from nvidia_resiliency_ext.fault_tolerance.rdzv_utils import rdzv_config_get_as_bool

from .log_plan import ORPHANS_NEED_NO_PIPES, LogPlan, log_plan, log_problems, stream_warnings

OMP_WARNING = (
    "OMP_NUM_THREADS is not set: every worker gets 1, so that they do not overload this machine; "
    "set it to what suits the program"
)
MONITOR_WARNING = f"{_env.DISABLE_RANK_MONITORS} is set: hangs are not found, no rank has a monitor"
_DEFAULT_MASTER_PORT = next(flag.default for flag in FLAGS if flag.name == "master-port")
# Fields of a plan that are what the flag of their name says.
_AS_GIVEN = (
    "role", "max_restarts", "term_timeout", "monitor_interval", "start_method", "local_addr",
    "rdzv_backend", "signals_to_handle", "event_log_handler", "virtual_local_rank",
)  # fmt: skip
_DEFAULT_ID = next(flag.default for flag in FLAGS if flag.name == "rdzv-id")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where the workers' output goes; `LaunchConfig.logs_specs` of a parsed command line."""

    log_dir: str | None = None
    output: OutputSettings = field(default_factory=lambda: OutputSettings({}, {}, None))
    output_specs: OutputSpecs | None = None
    logs: LogPlan = field(default_factory=LogPlan)
    attribution: AttributionConfig | None = None


@dataclass(kw_only=True)
class LaunchPlan(LaunchConfig):
    """Everything that a launch on this node needs: a configuration, and what follows from it.

    `master_port` is never the endpoint's here, `run_id` never empty, and `rdzv_configs` holds what
    somebody gave.
    """

    command: commands.WorkerCommand
    log_dir: str | None  # for logs and record
    output: OutputSettings
    output_specs: OutputSpecs | None  # the user's, instead of `output`
    logs: LogPlan
    attribution: AttributionConfig
    signals: tuple[signal.Signals, ...]  # passed to the workers
    # The one device that each local rank sees, all as LOCAL_RANK 0; None: the launcher's devices.
    virtual_devices: tuple[str, ...] | None
    omp_num_threads: str | None  # of the workers; None leaves it as it is
    monitors_enabled: bool
    job_name: str | None = None  # None: nobody gave it one (`--rdzv-id`)
    warnings: tuple[str, ...] = ()  # to be logged once

    def __post_init__(self) -> None:
        """Leave settings of the rendezvous as they were given."""

    @property
    def rdzv_impl(self) -> str:
        """`barrier`, or `legacy`: every node up to `max_nodes` works."""
        return str(self.rdzv_configs.get(RDZV_IMPL, "barrier"))

    @property
    def use_infra_group_rank(self) -> bool:
        """Whether the scheduler's order of nodes gives the ranks."""
        return rdzv_config_get_as_bool(self.rdzv_configs, USE_INFRA_GROUP_RANK, True) is not False


def log_warnings(plan: LaunchPlan) -> None:
    """Log the warnings of a plan, once per launch."""
    for text in plan.warnings:
        logging.getLogger("nvrx").warning("%s", text)


def plan_from_args(
    args: argparse.Namespace, environ: Mapping[str, str], *, looks_for_script: bool = True
) -> LaunchPlan:
    """Return the plan of a parsed command line.

    With `looks_for_script` script, program and interpreter must exist, here and now.
    FaultToleranceConfigError names everything wrong; OSError: the configuration file is unreadable.
    """
    check_one_launcher_per_node(environ)
    layers = _layers(args)
    problems = layers.problems + log_problems(args, environ)
    command = _command(args, environ, problems)
    if looks_for_script:
        problems += _missing(command, environ)
    nproc = 0
    devices: tuple[str, ...] | None = None
    with noting(problems):
        nproc = local_world.local_world_size(args.nproc_per_node, environ)
        check_handler(args.event_log_handler)
        devices = local_world.devices_of_ranks(environ, nproc) if args.virtual_local_rank else None
    if problems:
        raise FaultToleranceConfigError(problems)
    config = layers.config()
    logs = log_plan(args)
    min_nodes, max_nodes = syntax.parse_min_max_nnodes(args.nnodes)
    problems += missing_hook(config.bad_node_hook, environ)
    if logs.applog_prefix is not None and config.orphan_workers == "keep":
        problems.append(ORPHANS_NEED_NO_PIPES)
    attribution, stop_timeout_s = AttributionConfig(), 0.0
    with noting(problems):
        command = dataclasses.replace(command, numa=_numa(args, nproc, config, environ))
    with noting(problems):
        _check_segment(config.segment, min_nodes, max_nodes)
    with noting(problems):
        check_job_id(args.ft_cycle_info_job_id)
    with noting(problems):
        attribution = AttributionConfig.from_args(args, logs.applog_prefix, config)
    with noting(problems):
        stop_timeout_s = _workers_stop_timeout_s(args, environ)
    output = _output(args, nproc)
    output_specs = None
    if not problems and args.logs_specs is not None:
        with noting(problems):  # last of all, because it may make directories
            output_specs = _output_specs(args, output)
    if problems:
        raise FaultToleranceConfigError(problems)
    if "log_level" not in layers.given:
        config.log_level = log_level(environ)
    if _env.FT_LAUNCHER_LOGLEVEL in environ:
        text = (
            f"{_env.FT_LAUNCHER_LOGLEVEL} is deprecated; use --ft-log-level or {_env.LOG_DEBUG}=1"
        )
        warnings.warn(text, DeprecationWarning, stacklevel=2)
    threads = omp_num_threads(environ, nproc)
    monitors_enabled = not environ.get(_env.DISABLE_RANK_MONITORS)
    endpoint = get_rdzv_endpoint(args)
    messages = [
        *getattr(args, "warnings", ()),
        *layers.warnings,
        *([OMP_WARNING] if threads else []),
        *([] if monitors_enabled else [MONITOR_WARNING]),
        *(commands.hidden_packages(command) if looks_for_script else []),
        *stream_warnings(logs, args),
        *(_unreachable(endpoint) if max_nodes > 1 else []),
        *(_mistyped(syntax.parse_configuration(args.rdzv_conf)) if max_nodes > 1 else []),
    ]
    policy, port, name = layers.deprecated.get("restart_policy"), _given_port(args), job_name(args)
    meets_nobody = max_nodes == 1 and not (name or args.rdzv_endpoint or port)
    return LaunchPlan(
        command=command,
        nproc_per_node=nproc,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        # Nobody named this job or where it meets: nothing must know its id.
        run_id=random_id() if args.standalone or meets_nobody else args.rdzv_id,
        **{name: getattr(args, name) for name in _AS_GIVEN},
        restart_policy=policy.value if policy else args.ft_restart_policy,
        workers_stop_timeout=stop_timeout_s,
        master_addr=syntax.parse_endpoint(args.master_addr)[0],
        master_port=fixed_port(port, endpoint, max_nodes),
        rdzv_endpoint="localhost:0" if args.standalone else endpoint,
        rdzv_configs=_rdzv_configs(args, layers),
        node_rank=args.node_rank if "node_rank" in _given(args) else None,
        logs_specs=LogSettings(args.log_dir, output, output_specs, logs, attribution),
        log_dir=args.log_dir,
        output=output,
        output_specs=output_specs,
        logs=logs,
        attribution=attribution,
        numa_options=args.numa_binding,
        duplicate_stdout_filters=args.duplicate_stdout_filters or None,
        duplicate_stderr_filters=args.duplicate_stderr_filters or None,
        log_line_prefix_template=environ.get(_env.LOG_LINE_PREFIX_TEMPLATE),
        signals=syntax.parse_signals(args.signals_to_handle),
        omp_num_threads=threads,
        no_restart_exit_code=args.ft_no_restart_exit_code,
        monitors_enabled=monitors_enabled,
        node_health_check_endpoint=args.ft_node_health_check_endpoint,
        fault_tol_cfg=config,
        cycle_info_job_id=args.ft_cycle_info_job_id,
        job_name=name,
        virtual_devices=devices,
        warnings=tuple(messages),
    )


# Keys of `--rdzv-conf` that have an effect here, and those of torchrun and of torch's agent.
_RDZV_KEYS = frozenset(
    {
        "join_timeout", "last_call_timeout", "store_connect_wait_seconds", "is_host", "segment",
        "replacement_group_size",
    }
)  # fmt: skip
_RDZV_KEYS_ELSEWHERE = frozenset(
    {
        "timeout", "close_timeout", "read_timeout", "heartbeat_timeout", "rank", "use_libuv",
        "is_store_host", "nproc_per_node", "upscaling_enabled", "local_addr", RDZV_IMPL,
        USE_INFRA_GROUP_RANK,
    }
)  # fmt: skip


def _mistyped(configuration: Mapping[str, str]) -> list[str]:
    """Return a warning for each key that looks like one with an effect; others are no mistake."""
    unknown = sorted(configuration.keys() - _RDZV_KEYS - _RDZV_KEYS_ELSEWHERE)
    hints = [(key, nearest(key, sorted(_RDZV_KEYS))) for key in unknown]
    return [f"--rdzv-conf: {key[:100]!r} has no effect{hint}" for key, hint in hints if hint]


def _unreachable(endpoint: str) -> list[str]:
    """Return a sentence if only this machine can reach the endpoint."""
    from nvidia_resiliency_ext.shared_utils.credentials import is_loopback

    if not is_loopback(syntax.parse_endpoint(endpoint)[0]):
        return []
    text = f"launchers on other machines cannot come to {endpoint}: give all of them"
    return [f"{text} --rdzv-endpoint HOST:PORT, where HOST is one machine of the job"]


def _output(args: argparse.Namespace, nproc: int) -> OutputSettings:
    """Return which streams go to files and to the console."""
    return OutputSettings(
        redirects=syntax.streams_by_rank(args.redirects, nproc),
        tee=syntax.streams_by_rank(args.tee, nproc),
        console_ranks=syntax.parse_ranks(args.local_ranks_filter),
        filters={
            Stream.STDOUT: tuple(args.duplicate_stdout_filters),
            Stream.STDERR: tuple(args.duplicate_stderr_filters),
        },
    )


def _output_specs(args: argparse.Namespace, output: OutputSettings) -> OutputSpecs:
    """Load the specification that `--logs-specs` names. Raises ValueError: it cannot be used."""
    specs = load_specs(
        args.logs_specs,
        log_dir=args.log_dir,
        redirects=output.redirects,
        tee=output.tee,
        local_ranks_filter=output.console_ranks,
    )
    return OutputSpecs(specs, output.filters)


def _rdzv_configs(args: argparse.Namespace, layers: settings.Layers) -> dict[str, Any]:
    """Return the settings of the rendezvous, with flags that a `LaunchConfig` has no field for."""
    flags = {RDZV_IMPL: args.ft_rdzv_impl, USE_INFRA_GROUP_RANK: args.ft_use_infra_group_rank}
    # The key that earlier releases had in the file.
    key = layers.deprecated.get(USE_INFRA_GROUP_RANK)
    if key is not None and "ft_use_infra_group_rank" not in _given(args):
        flags[USE_INFRA_GROUP_RANK] = key.value
    given = syntax.parse_configuration(args.rdzv_conf)
    kept = {name: value for name, value in given.items() if name not in flags}
    return kept | {name: value for name, value in flags.items() if value not in ("barrier", True)}


def _check_segment(segment: int | None, min_nodes: int, max_nodes: int) -> None:
    if segment is None:
        return
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import PlacementRules

    PlacementRules(min_nodes, max_nodes, segment=segment)


def check_job_id(job_id: str | None) -> None:
    """Refuse a job's id that cannot be part of a file's name. Raises FaultToleranceConfigError."""
    if job_id is None:
        return
    from nvidia_resiliency_ext.fault_tolerance._report.cycle_files import current_name

    try:
        current_name(job_id)
    except ValueError as error:
        raise FaultToleranceConfigError([f"--ft-cycle-info-job-id: {error}"]) from None


def _layers(args: argparse.Namespace) -> settings.Layers:
    try:
        return settings.layers_from_args(args)
    except FileNotFoundError:
        where = _given(args).get("ft_cfg_path", "--ft-cfg-path")
        problem = (
            f"{where}: file {args.ft_cfg_path!r} does not exist; correct the path, or add "
            "--ft-ignore-missing-cfg to go on without it"
        )
        raise FaultToleranceConfigError([problem]) from None


def _command(
    args: argparse.Namespace, environ: Mapping[str, str], problems: list[str]
) -> commands.WorkerCommand:
    """Return the workers' command; flags that exclude each other are added to `problems`."""
    if args.module and (args.no_python or args.run_path):
        other = "--run-path" if args.run_path else "--no-python"
        problems.append(f"--module and {other} exclude each other; give one of them")
    return commands.worker_command(
        args.training_script,
        args.training_script_args,
        environ,
        is_module=args.module,
        is_python=not args.no_python,
        is_run_path=args.run_path,
    )


def _missing(command: commands.WorkerCommand, environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each file without which the command cannot run."""
    problems: list[str] = []
    if command.is_python and environ.get(_env.PYTHON_EXEC):
        missing = commands.missing_program(command.argv[0], environ)
        problems += [f"{_env.PYTHON_EXEC}: {missing}"] if missing else []
    if command.is_module:
        # Another interpreter has modules of its own.
        missing = "" if environ.get(_env.PYTHON_EXEC) else commands.missing_module(command.entry)
    elif command.is_python:
        missing = commands.missing_script(command.entry)
    else:
        missing = commands.missing_program(command.entry, environ)
    return [*problems, missing] if missing else problems


def _numa(
    args: argparse.Namespace,
    nproc: int,
    config: settings.FaultToleranceConfig,
    environ: Mapping[str, str],
) -> Sequence[tuple[str, ...]]:
    if args.numa_binding is not None:
        return commands.cpu_binding(
            args.numa_binding, nproc, environ, commands.visible_gpus(environ)
        )
    return commands.numa_binding(nproc, environ, is_strict=config.numa_bind_strict)


def missing_hook(command: str | None, environ: Mapping[str, str]) -> list[str]:
    """Return a problem if the program of `--ft-bad-node-hook` cannot be run."""
    if command is None:
        return []
    import shlex

    missing = commands.missing_program(shlex.split(command)[0], environ)
    return [f"--ft-bad-node-hook: {missing}"] if missing else []


def _workers_stop_timeout_s(args: argparse.Namespace, environ: Mapping[str, str]) -> float:
    """Return the stop timeout from our flag, else torch's newer flag, else torch's variable."""
    given = environ.get(_env.SHUTDOWN_TIMEOUT)
    if "workers_stop_timeout" not in _given(args):
        if args.shutdown_timeout is not None:
            return float(args.shutdown_timeout)
        if given:
            return float(values.read(values.SECONDS, given, _env.SHUTDOWN_TIMEOUT))
    return float(args.workers_stop_timeout)


def fixed_port(given: int | None, endpoint: str, max_nodes: int) -> int | None:
    """Return rank 0's port in every cycle, or None for a fresh one in each.

    The endpoint's port is the store's as long as the job lasts, so it is never rank 0's, though
    users of torchrun give both as one.
    """
    if given is None or max_nodes == 1:
        return given
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.endpoint import DEFAULT_PORT

    _, port = syntax.parse_endpoint(endpoint)
    return None if given == (port or DEFAULT_PORT) else given


def _given_port(args: argparse.Namespace) -> int | None:
    """Return `--master-port` if it was given and is no 0: the default fixes nothing."""
    is_given = "master_port" in _given(args) or args.master_port != _DEFAULT_MASTER_PORT
    return int(args.master_port) if is_given and args.master_port else None


def _given(args: argparse.Namespace) -> Mapping[str, str]:
    given: Mapping[str, str] = getattr(args, "given", {})
    return given


def job_name(args: argparse.Namespace) -> str | None:
    """Return the name that a command line or the environment gives the job, or None."""
    is_named = "rdzv_id" in _given(args) or args.rdzv_id != _DEFAULT_ID
    return args.rdzv_id if is_named else None


def random_id() -> str:
    """Return a name for a job that nobody named."""
    return os.urandom(16).hex()


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
