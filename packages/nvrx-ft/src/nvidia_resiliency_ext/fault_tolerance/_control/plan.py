# SPDX-License-Identifier: Apache-2.0
"""The command line of `nvrx-control`, and the plan that follows from it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance import rdzv_utils
from nvidia_resiliency_ext.fault_tolerance._config import settings, syntax
from nvidia_resiliency_ext.fault_tolerance._config.attribution import AttributionConfig
from nvidia_resiliency_ext.fault_tolerance._config.flags import FLAGS, Flag
from nvidia_resiliency_ext.fault_tolerance._core.errors import FaultToleranceConfigError
from nvidia_resiliency_ext.fault_tolerance._hosting.services import ServicesPlan
from nvidia_resiliency_ext.fault_tolerance._plan import log_plan, plan
from nvidia_resiliency_ext.fault_tolerance._rendezvous import agreement
from nvidia_resiliency_ext.fault_tolerance.cli_args import FlagParser
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

PROGRAM = "nvrx-control"

_TAKEN = (
    "nnodes", "rdzv-endpoint", "rdzv-backend", "rdzv-id", "rdzv-conf", "local-addr", "ft-segment",
    "ft-cfg-path", "ft-ignore-unknown-cfg", "ft-ignore-missing-cfg", "ft-lease",
    "ft-rdzv-token-file", "ft-log-level", "ft-no-restart-exit-code", "ft-bad-node-hook",
    "ft-per-cycle-applog-prefix", "ft-nvrx-logfile", "ft-enable-log-server", "ft-log-server-port",
    "ft-log-aggregator-count", "ft-log-leaf-max-queue-chunks", "ft-log-server-log-prefix",
    "ft-log-server-graceful-shutdown-timeout", "ft-cycle-info-dir", "ft-cycle-info-job-id",
    "ft-attribution-endpoint", "ft-attribution-stop-action", "ft-attribution-node-action",
    "ft-attribution-startup-timeout", "ft-attribution-export-url", "ft-attribution-log-level",
    "ft-attribution-llm-api-key-file", "ft-attribution-llm-base-url", "ft-attribution-llm-model",
    "ft-attribution-analysis-backend", "ft-attribution-compute-timeout", "ft-attrsvc-host",
    "ft-attrsvc-port", "print-config", "json", "version",
)  # fmt: skip
# Where these mean something else than for a launcher.
_MEANINGS = {
    "ft-enable-log-server": (
        "Collect the logs of all nodes here. Default: where one of --ft-per-cycle-applog-prefix,"
        " --ft-nvrx-logfile and --ft-log-server-log-prefix is given."
    ),
    "ft-per-cycle-applog-prefix": "Where the launchers' cycle logs are: as they have it.",
    "ft-nvrx-logfile": "Write the output of launchers and control plane to this file.",
    "ft-cycle-info-job-id": "The job in the names of files about cycles; needed for these.",
    "rdzv-conf": (
        "Settings of the rendezvous: launchers must have the same segment, replacement_group_size"
        " and last_call_timeout as are given here; the others are theirs alone."
    ),
    "local-addr": "Address of this machine to listen at, where the endpoint's name is not its own.",
    "print-config": "Show every option with its value and where that comes from, and leave.",
    "json": "Write what --print-config shows as one JSON object.",
}
_LOG_FILES = ("ft_per_cycle_applog_prefix", "ft_nvrx_logfile", "ft_log_server_log_prefix")

CONTROL_FLAGS: tuple[Flag, ...] = tuple(
    flag._replace(help=_MEANINGS.get(flag.name, flag.help)) for flag in FLAGS if flag.name in _TAKEN
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlan:
    host: str  # Where the store is served, as launchers reach it.
    port: int
    run_id: str
    address: str  # Where store and log servers listen: the host, or an address of its own.
    settings: Mapping[str, str]  # What launchers must have been started with alike, by flag.
    log_level: int
    services: ServicesPlan
    warnings: tuple[str, ...] = ()  # To be logged once.


class _ControlParser(FlagParser):
    def parse_args(  # type: ignore[override]  # the overloads add nothing here
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error("; ".join(f"{word} is no flag of {PROGRAM}" for word in unknown))
        if parsed.training_script is not None:
            script = f"{parsed.training_script!r}: {PROGRAM} runs no script"
            self.error(f"{script}; start it with ft_launcher")
        if "ft_enable_log_server" not in parsed.given:
            parsed.ft_enable_log_server = _says_where_logs_are(parsed)
        return parsed


def get_args_parser() -> argparse.ArgumentParser:
    parser = _ControlParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} --nnodes N --rdzv-endpoint HOST:PORT [options]",
        description="Serve the rendezvous of a job, and what belongs to it once for the whole job,"
        " from a machine that does not train.",
    )
    parser.add_flags(CONTROL_FLAGS)
    return parser


def plan_of(args: argparse.Namespace, environ: Mapping[str, str]) -> ControlPlan:
    """Return the plan of a command line. Raises ConfigError with all mistakes, or OSError."""
    for name in ("nnodes", "rdzv_endpoint"):
        if name not in args.given:
            raise ConfigError(f"--{name.replace('_', '-')} is needed")
    host, port = syntax.parse_endpoint(args.rdzv_endpoint)
    if port is None or port == 0:
        raise ConfigError(f"--rdzv-endpoint {args.rdzv_endpoint}: a port is needed, HOST:PORT")
    layers = settings.layers_from_args(args)
    problems = [*layers.problems, *log_plan.server_problems(args, environ)]
    if args.rdzv_backend != "c10d":
        problems.append(f"--rdzv-backend {args.rdzv_backend}: {PROGRAM} takes c10d only")
    if args.ft_enable_log_server and not _says_where_logs_are(args):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in _LOG_FILES)
        problems.append(f"--ft-enable-log-server needs one of {flags}: it says where logs may be")
    if problems:
        raise FaultToleranceConfigError(problems)
    config = layers.config()
    problems = plan.missing_hook(config.bad_node_hook, environ)
    if config.cycle_info_dir is not None:
        problems += _problems_of_cycle_info(config.cycle_info_dir, args.ft_cycle_info_job_id)
    if problems:
        raise FaultToleranceConfigError(problems)
    logs = log_plan.log_plan(args)
    return ControlPlan(
        host=host,
        port=port,
        run_id=args.rdzv_id,
        address=args.local_addr or host,
        settings=_settings(args, config, "lease" in layers.given) | log_plan.agreed_on_logs(logs),
        log_level=(config.log_level if "log_level" in layers.given else plan.log_level(environ)),
        services=ServicesPlan(
            fault_tol_cfg=config,
            logs=logs,
            cycle_info_job_id=args.ft_cycle_info_job_id,
            job_name=plan.job_name(args),
            attribution=AttributionConfig.from_args(args, logs.applog_prefix, config),
        ),
        warnings=(*args.warnings, *layers.warnings),
    )


def _settings(
    args: argparse.Namespace, config: settings.FaultToleranceConfig, is_lease_given: bool
) -> dict[str, str]:
    """Return the options given here that launchers must share; the rest is the launchers' own."""
    min_nodes, max_nodes = syntax.parse_min_max_nnodes(args.nnodes)
    conf = syntax.parse_configuration(args.rdzv_conf)
    code = args.ft_no_restart_exit_code if "ft_no_restart_exit_code" in args.given else None
    try:
        given = {
            agreement.NNODES: f"{min_nodes}:{max_nodes}",
            agreement.SEGMENT: config.segment or rdzv_utils.rdzv_config_get_as_int(conf, "segment"),
            agreement.GROUP_SIZE: rdzv_utils.rdzv_config_get_as_int(conf, "replacement_group_size"),
            agreement.LAST_CALL: rdzv_utils.rdzv_config_get_as_float(conf, "last_call_timeout"),
            agreement.LEASE: config.lease if is_lease_given else None,
            "--ft-no-restart-exit-code": code,
        }
    except ValueError as error:
        raise ConfigError(f"--rdzv-conf: {error}") from None
    return {flag: str(value) for flag, value in given.items() if value is not None}


def _says_where_logs_are(args: argparse.Namespace) -> bool:
    return any(getattr(args, name) for name in _LOG_FILES)


def _problems_of_cycle_info(directory: str, job_id: str | None) -> list[str]:
    problems = []
    if not os.path.isabs(directory):
        problems.append(f"--ft-cycle-info-dir {directory}: is no absolute path")
    if not job_id:
        problems.append("--ft-cycle-info-dir needs --ft-cycle-info-job-id: no scheduler says it")
    plan.check_job_id(job_id)
    return problems
