# SPDX-License-Identifier: Apache-2.0
"""Between `LaunchConfig`, which programs fill in, and `LaunchPlan`, which the launcher runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig

from .command import WorkerCommand
from .launch_config import LaunchConfig
from .parser import get_args_parser
from .plan import LaunchPlan, plan_from_args
from .syntax import Std


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where the workers' output goes; `LaunchConfig.logs_specs` of a parsed command line."""

    log_dir: str | None = None
    redirects: Mapping[int, Std] = field(default_factory=dict)
    tee: Mapping[int, Std] = field(default_factory=dict)
    local_ranks_filter: frozenset[int] | None = None


def config_from_plan(plan: LaunchPlan) -> LaunchConfig:
    """Return the configuration that describes `plan` to callers of `elastic_launch`."""
    return LaunchConfig(
        min_nodes=plan.min_nodes,
        max_nodes=plan.max_nodes,
        nproc_per_node=plan.nproc_per_node,
        fault_tol_cfg=plan.fault_tolerance,
        logs_specs=LogSettings(plan.log_dir, plan.redirects, plan.tee, plan.local_ranks_filter),
        run_id=plan.run_id,
        role=plan.role,
        rdzv_endpoint=plan.rdzv_endpoint,
        rdzv_backend=plan.rdzv_backend,
        rdzv_configs=dict(plan.rdzv_configuration),
        max_restarts=plan.max_restarts,
        restart_policy=plan.restart_policy,
        term_timeout=plan.term_timeout_s,
        workers_stop_timeout=plan.workers_stop_timeout_s,
        monitor_interval=plan.monitor_interval_s,
        start_method=plan.start_method,
        log_line_prefix_template=plan.log_line_prefix_template,
        local_addr=plan.local_addr,
    )


def plan_from_config(
    config: LaunchConfig, command: WorkerCommand, environ: Mapping[str, str]
) -> LaunchPlan:
    """Return the plan of a job that a program describes.

    Raises:
        ValueError: The configuration asks for what this version does not offer.
    """
    problems = []
    if (config.min_nodes, config.max_nodes) != (1, 1):
        problems.append(
            f"min_nodes={config.min_nodes}, max_nodes={config.max_nodes}: "
            f"more than one node is not available in this version"
        )
    if config.restart_policy != "any-failed":
        problems.append(f"restart_policy={config.restart_policy!r}: use 'any-failed'")
    if config.rank_monitors:
        problems.append("rank_monitors: the launcher starts its own; leave it out")
    logs = config.logs_specs if config.logs_specs is not None else LogSettings()
    if not isinstance(logs, LogSettings):
        problems.append("logs_specs: not available in this version; leave it out")
    if problems:
        raise ValueError("; ".join(problems))
    # The defaults of everything that LaunchConfig does not know come from the command line's.
    parsed = get_args_parser().parse_args([f"--nproc-per-node={config.nproc_per_node}", __file__])
    given: FaultToleranceConfig | None = config.fault_tol_cfg
    fault_tolerance = FaultToleranceConfig() if given is None else given
    return dataclasses.replace(
        plan_from_args(parsed, environ),
        command=command,
        run_id=config.run_id or "none",
        role=config.role,
        max_restarts=config.max_restarts,
        term_timeout_s=config.term_timeout,
        workers_stop_timeout_s=config.workers_stop_timeout,
        monitor_interval_s=config.monitor_interval,
        start_method=config.start_method,
        local_addr=config.local_addr,
        log_line_prefix_template=config.log_line_prefix_template,
        log_dir=logs.log_dir,
        redirects=logs.redirects,
        tee=logs.tee,
        local_ranks_filter=logs.local_ranks_filter,
        fault_tolerance=fault_tolerance,
    )
