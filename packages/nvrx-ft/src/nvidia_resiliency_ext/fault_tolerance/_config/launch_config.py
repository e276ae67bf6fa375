# SPDX-License-Identifier: Apache-2.0
"""Public value types that describe a launch to `elastic_launch`; ours is `plan.LaunchPlan`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._core.errors import DEFAULT_NO_RESTART_EXIT_CODE

from .settings import FaultToleranceConfig
from .syntax import parse_min_max_nnodes

# Settings of the rendezvous that stand for `--ft-rdzv-impl` and `--ft-use-infra-group-rank`.
RDZV_IMPL = "rdzv_impl"
USE_INFRA_GROUP_RANK = "use_infra_group_rank"

_HIGHEST_PORT = 65535
_NODES_PER_LOG_SERVER = 1536
_RDZV_DEFAULTS: Mapping[str, int] = {
    "timeout": 900,
    "join_timeout": 300,
    "last_call_timeout": 1,
    "close_timeout": 30,
    "read_timeout": 60,
    "store_connect_wait_seconds": 120,
}
_LAST_CALL_WHERE_ALL_WORK_S = 30


@dataclass
class LaunchConfig:
    """Describe the job that `elastic_launch` starts.

    Args:
        min_nodes: Nodes without which the job does not start.
        max_nodes: Nodes that work at most.
        nproc_per_node: Workers on each node.
        fault_tol_cfg: How faults are noticed and handled.
        logs_specs: Where the workers' output goes; as `config_from_args` returns it.
        run_id: The job's name.
        role: The workers' role.
        rdzv_endpoint: Where nodes meet; without effect on one node, as all of `rdzv_*`.
        rdzv_backend: How they meet: `c10d` or `static`, which are the same here.
        rdzv_configs: Settings of the rendezvous; those left out are filled in.
        rdzv_timeout: Seconds for a whole rendezvous; -1 takes it from `rdzv_configs`.
        max_restarts: Restarts before the job fails.
        restart_policy: When workers are restarted.
        term_timeout: Seconds from SIGTERM to SIGKILL when the launcher was signalled.
        workers_stop_timeout: Seconds from SIGTERM to SIGKILL when workers are restarted.
        monitor_interval: Without effect: a death is noticed at once.
        start_method: Without effect: functions start in fresh interpreters.
        log_line_prefix_template: Prefix of the workers' lines on the console.
        metrics_cfg: Without effect: torch's metrics are not written.
        local_addr: Address of this node.
        rank_monitors: Must be empty: the launcher starts its own monitor.
        event_log_handler: A handler of torch that is notified of starts and ends.
        numa_options: torch's `NumaOptions`, or the name of a mode: CPUs near GPUs.
        duplicate_stdout_filters: Texts; lines of redirected stdout with one are also elsewhere.
        duplicate_stderr_filters: The same for stderr.
        virtual_local_rank: Whether every worker has LOCAL_RANK 0 and one visible device.
        signals_to_handle: Signals that the launcher passes to the workers.
        shutdown_timeout: torch's name for `workers_stop_timeout`; wins where it is given.
        master_addr: Address of rank 0 on one node.
        master_port: Port of rank 0 in every cycle; None takes a fresh one for each.
        node_rank: The order of this node where no scheduler knows one.
        node_health_check_endpoint: Socket of a service that evaluates this node's health.
        no_restart_exit_code: Exit code of a job that must not be started again.
        cycle_info_job_id: The job in the names of files about cycles.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    fault_tol_cfg: FaultToleranceConfig
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    restart_policy: str = "any-failed"
    term_timeout: float = 1800
    workers_stop_timeout: float = 15
    monitor_interval: float = 30
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    rank_monitors: dict[int, Any] = field(default_factory=dict)
    event_log_handler: str = "null"
    numa_options: Any = None
    duplicate_stdout_filters: Sequence[str] | None = None
    duplicate_stderr_filters: Sequence[str] | None = None
    virtual_local_rank: bool = False
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    shutdown_timeout: float | None = None
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    node_rank: int | None = None
    node_health_check_endpoint: str | None = None
    no_restart_exit_code: int = DEFAULT_NO_RESTART_EXIT_CODE
    cycle_info_job_id: str | None = None

    def __post_init__(self) -> None:
        defaults = dict(_RDZV_DEFAULTS)
        if self.restart_policy == "min-healthy" or self.rdzv_configs.get(RDZV_IMPL) == "legacy":
            defaults["last_call_timeout"] = _LAST_CALL_WHERE_ALL_WORK_S
        self.rdzv_configs = {**defaults, **self.rdzv_configs}
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout


@dataclass(frozen=True)
class LogFunnelPorts:
    """The ports of the log servers, from `base_port` on.

    Nodes send to `first_level_count` servers; above several of them there is one more.
    """

    base_port: int
    first_level_count: int

    def __post_init__(self) -> None:
        if self.first_level_count < 1:
            raise ValueError(f"first_level_count={self.first_level_count} is not at least 1")
        if not 0 < self.base_port <= self.root_listen_port <= _HIGHEST_PORT:
            raise ValueError(
                f"ports {self.base_port} to {self.root_listen_port} are not within 1 to "
                f"{_HIGHEST_PORT}; choose a lower --ft-log-server-port"
            )

    @classmethod
    def from_launcher_args(cls, args: argparse.Namespace) -> LogFunnelPorts:
        """Return the ports of the log servers of a parsed command line, `args`.

        Raises:
            ValueError: A port is out of range, or the number of servers is negative.
        """
        _, max_nodes = parse_min_max_nnodes(args.nnodes)
        count = args.ft_log_aggregator_count or -(-max_nodes // _NODES_PER_LOG_SERVER)
        return cls(args.ft_log_server_port, count)

    @property
    def uses_two_level(self) -> bool:
        """Whether the servers that nodes send to pass everything on to another one."""
        return self.first_level_count > 1

    @property
    def root_listen_port(self) -> int:
        """The port of the server that writes the files."""
        return self.base_port + self.first_level_count if self.uses_two_level else self.base_port

    def leaf_listen_port(self, index: int) -> int:
        """Return the port of the leaf server `index`, from 0; ValueError: it is out of range."""
        if not 0 <= index < self.first_level_count:
            raise ValueError(f"server {index} is not one of {self.first_level_count}")
        return self.base_port + index

    def client_connect_port(self) -> int:
        """Return the port that this node sends to."""
        if not self.uses_two_level:
            return self.base_port
        from nvidia_resiliency_ext.fault_tolerance._core.infra import get_log_aggregator_shard_index

        return self.leaf_listen_port(get_log_aggregator_shard_index(self.first_level_count))

    def listen_ports(self) -> tuple[int, ...]:
        """Return all ports, the root's last."""
        leaves = tuple(self.base_port + index for index in range(self.first_level_count))
        return (*leaves, self.root_listen_port) if self.uses_two_level else leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class LogServerPlan:
    """The log servers of a job."""

    ports: LogFunnelPorts
    leaf_queue_chunks: int
    log_prefix: str | None  # of the names of their own logs; None: the launcher's stderr
    grace_s: float  # for a leaf to write what it has; the root has twice as long
    allowed_roots: tuple[str, ...] = ()  # directories below which logs may lie


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """Return the rendezvous endpoint of `args`: the given one, else the master's with its port."""
    return str(args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}")


def get_use_env(args: argparse.Namespace) -> bool:
    """Return whether a worker gets its local rank from the environment only, by `args`."""
    return bool(getattr(args, "use_env", True))
