# SPDX-License-Identifier: Apache-2.0
"""From the parsed command line to the plan of logs: cycle logs, the launcher's own, log servers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._config import launch_config
from nvidia_resiliency_ext.fault_tolerance._config.syntax import parse_min_max_nnodes

_AUTOMATIC = -1
_SHORTEST_QUEUE = 64
_SHORTEST_AUTOMATIC_QUEUE = 16384
_LONGEST_AUTOMATIC_QUEUE = 1_000_000
_CHUNKS_PER_NODE = 256
_APPLOG, _NVRX_LOG = "--ft-per-cycle-applog-prefix", "--ft-nvrx-logfile"

_FILTERS = ("duplicate_stdout_filters", "duplicate_stderr_filters")

ORPHANS_NEED_NO_PIPES = (
    f"--ft-orphan-workers keep and {_APPLOG} exclude each other: workers that outlive the launcher "
    "would write into pipes that nobody reads"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlan:
    """Destinations of output that torchrun does not have: cycle logs, log servers."""

    applog_prefix: str | None = None  # of one file per cycle for the workers' output; None: off
    launcher_log_file: str | None = None  # None: the launcher's own output stays
    launcher_pipe_fd: int | None = None  # carries the launcher's own output; None: its streams do
    server: launch_config.LogServerPlan | None = None  # None: each launcher writes these files
    server_endpoint: str | None = None  # of a log server that somebody else runs
    node_id: str | None = None  # what a log server calls this node; None: the host's name

    @property
    def roots(self) -> tuple[str, ...]:
        """The directories that a log server may write to."""
        files = [self.applog_prefix, self.launcher_log_file]
        if not any(files) and self.server is not None:
            # All that a control plane may know of where logs are.
            files = [self.server.log_prefix]
        return tuple(dict.fromkeys(os.path.dirname(file) for file in files if file))


def log_problems(args: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each thing about logs that a launcher cannot do as asked."""
    problems = []
    applog, nvrx_log = args.ft_per_cycle_applog_prefix, args.ft_nvrx_logfile
    if nvrx_log and not applog:
        problems.append(f"{_NVRX_LOG} needs {_APPLOG}: give both")
    if args.ft_enable_log_server and not applog:
        problems.append(f"--ft-enable-log-server needs {_APPLOG}: nothing is to be collected")
    if args.logs_specs is not None and applog:
        problems.append(
            f"--logs-specs and {_APPLOG} exclude each other: both say where the output of workers "
            "goes"
        )
    return problems + server_problems(args, environ)


def server_problems(args: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each thing about log files and log servers that cannot be done."""
    problems = []
    applog, nvrx_log = args.ft_per_cycle_applog_prefix, args.ft_nvrx_logfile
    if nvrx_log and environ.get(_env.NODE_LOCAL_TMPDIR):
        problems.append(
            f"{_NVRX_LOG} and {_env.NODE_LOCAL_TMPDIR} exclude each other: both say where the "
            "launcher's log goes"
        )
    for name, path in ((_APPLOG, applog), (_NVRX_LOG, nvrx_log)):
        if path and path.endswith("/"):
            problems.append(f"{name} {path}: names a directory; give a file in it")
    prefix = args.ft_log_server_log_prefix
    if prefix and not os.path.isabs(prefix):
        problems.append(f"--ft-log-server-log-prefix {prefix}: is no absolute path")
    chunks = args.ft_log_leaf_max_queue_chunks
    if chunks != _AUTOMATIC and chunks < _SHORTEST_QUEUE:
        problems.append(
            f"--ft-log-leaf-max-queue-chunks {chunks}: is neither -1 (choose) nor at least "
            f"{_SHORTEST_QUEUE}"
        )
    if _has_server(args):
        try:
            launch_config.LogFunnelPorts.from_launcher_args(args)
        except ValueError as error:
            problems.append(f"--ft-log-server-port {args.ft_log_server_port}: {error}")
    return problems


def log_plan(args: argparse.Namespace) -> LogPlan:
    """Return the plan of a command line without problems."""
    return LogPlan(
        applog_prefix=args.ft_per_cycle_applog_prefix or None,
        launcher_log_file=args.ft_nvrx_logfile or None,
        server=_server_plan(args) if _has_server(args) else None,
    )


def agreed_on_logs(logs: LogPlan) -> dict[str, str]:
    """Return, by flag, the values that must be equal on all nodes and the host of log servers."""
    if logs.server is None:
        return {}
    agreed = {
        "--ft-log-server-port": str(logs.server.ports.base_port),
        "--ft-log-aggregator-count": str(logs.server.ports.first_level_count),
    }
    if logs.applog_prefix is not None:
        agreed[_APPLOG] = logs.applog_prefix
    return agreed


def stream_warnings(plan: LogPlan, args: argparse.Namespace) -> list[str]:
    """Return a warning that names the output flags without effect in this plan."""
    filters = [name for name in _FILTERS if getattr(args, name)]
    if plan.applog_prefix is not None:
        choices = (("redirects", "0"), ("tee", "0"), ("local_ranks_filter", ""))
        unused = [name for name, nothing in choices if str(getattr(args, name)) != nothing]
        why = f"no effect beside {_APPLOG}, which takes all output of workers"
    else:
        writes_files = args.logs_specs is not None or (args.redirects, args.tee) != ("0", "0")
        unused, filters = ([], []) if writes_files else ([], filters)
        why = "no effect without --tee or --redirects: only what goes to files is looked at"
    flags = [f"--{name.replace('_', '-')}" for name in (*unused, *filters)]
    return [f"{', '.join(flags)}: {why}"] if flags else []


def _has_server(args: argparse.Namespace) -> bool:
    return bool(args.ft_enable_log_server or args.ft_nvrx_logfile)


def _server_plan(args: argparse.Namespace) -> launch_config.LogServerPlan:
    ports = launch_config.LogFunnelPorts.from_launcher_args(args)
    _, max_nodes = parse_min_max_nnodes(args.nnodes)
    chunks = args.ft_log_leaf_max_queue_chunks
    if chunks == _AUTOMATIC:
        wanted = -(-max_nodes // ports.first_level_count) * _CHUNKS_PER_NODE
        chunks = min(max(wanted, _SHORTEST_AUTOMATIC_QUEUE), _LONGEST_AUTOMATIC_QUEUE)
    prefix = args.ft_log_server_log_prefix
    if not prefix and args.ft_nvrx_logfile:
        # Its stderr would be sent to itself.
        prefix = os.path.splitext(args.ft_nvrx_logfile)[0]
    return launch_config.LogServerPlan(
        ports=ports,
        leaf_queue_chunks=chunks,
        log_prefix=prefix or None,
        grace_s=args.ft_log_server_graceful_shutdown_timeout,
    )
