# SPDX-License-Identifier: Apache-2.0
"""Timeouts and parameters of a rendezvous handler of torch's kind."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._agent.store_rendezvous import node_identity
from nvidia_resiliency_ext.fault_tolerance._config.attribution import (
    AttributionConfig,
    client_endpoint,
)
from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance._core.infra import (
    default_replacement_group_size,
    infrastructure_rank,
    replacement_group_id,
)
from nvidia_resiliency_ext.fault_tolerance._hosting.services import ServicesPlan
from nvidia_resiliency_ext.fault_tolerance._plan import environment
from nvidia_resiliency_ext.fault_tolerance._plan.log_plan import LogPlan
from nvidia_resiliency_ext.fault_tolerance._rendezvous.agreement import settings_of
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import NodeSettings
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.domain import own_domain
from nvidia_resiliency_ext.fault_tolerance._rendezvous.endpoint import read_token
from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import PlacementRules, validate
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Arrival
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import Budget
from nvidia_resiliency_ext.fault_tolerance.rdzv_utils import (
    rdzv_config_get_as_bool,
    rdzv_config_get_as_float,
    rdzv_config_get_as_int,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters


# Restarts are counted by the agent that uses the handler.
_NO_LIMIT = 1 << 30
KEEP_ALIVE_MAX_ATTEMPT = 3

Duration = timedelta | None


@dataclass(frozen=True, init=False)
class Timeouts:
    """How long the steps of a rendezvous may take.

    Args:
        join: For an open round to close.
        last_call: For more nodes to come when there are enough.
        close: For the end of the job to be told, and any other short answer.
        heartbeat: Between two signs of life of a node.

    Raises:
        ValueError: one of them is not positive; `last_call` may be zero.
    """

    _DEFAULTS: ClassVar[Mapping[str, timedelta]] = {}
    join: timedelta
    last_call: timedelta
    close: timedelta
    heartbeat: timedelta

    def __init__(
        self,
        join: Duration = None,
        last_call: Duration = None,
        close: Duration = None,
        heartbeat: Duration = None,
    ) -> None:
        given = {"join": join, "last_call": last_call, "close": close, "heartbeat": heartbeat}
        for name, default in self._DEFAULTS.items():
            value = default if (value := given[name]) is None else value
            least = "zero or more" if name == "last_call" else "more than zero"
            if value < timedelta(0) or (not value and name != "last_call"):
                raise ValueError(f"{name} timeout of {value}: must be {least}")
            object.__setattr__(self, name, value)

    @classmethod
    def from_configuration(cls, conf: Mapping[str, Any]) -> Any:
        """Return the timeouts of a rendezvous configuration: `join_timeout=...` and so on.

        Args:
            conf: Keys such as `join_timeout`, in seconds.

        Raises:
            ValueError: A value is no number above 0.
        """
        given = {name: rdzv_config_get_as_float(conf, f"{name}_timeout") for name in cls._DEFAULTS}
        return cls(**{k: None if v is None else timedelta(seconds=v) for k, v in given.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What concerns this node alone.

    Attributes:
        addr: By which other nodes reach it.
        is_store_host: Whether it decides the rounds; of several the first one does.
        secret: Key of the digests of the job's values; None takes a generated one.
        infra_rank: Its place in the cluster; -1 where that is unknown.
        services: What it runs beside that, if this node decides the rounds.
    """

    addr: str
    is_store_host: bool
    secret: bytes | None = None
    infra_rank: int = -1
    services: ServicesPlan = field(default_factory=ServicesPlan)


def node_options(params: RendezvousParameters) -> NodeOptions:
    """Return what `params` and the environment say of this node.

    `is_store_host` decides who is the rendezvous host, else `is_host`, else whether the endpoint is
    on this machine.

    Raises:
        ValueError: a value is unusable; ConfigError for the token file.
        RuntimeError: Slurm does not tell the place of this node.
    """
    token_file = params.get("rdzv_token_file")
    return NodeOptions(
        addr=params.local_addr or socket.getfqdn(),
        is_store_host=_is_store_host(params),
        secret=read_token(token_file) if token_file else None,
        infra_rank=infrastructure_rank(os.environ),
        services=services_of(params.config),
    )


def services_of(conf: Mapping[str, Any]) -> ServicesPlan:
    """Return what the node that decides the rounds runs beside that, as `conf` asks for it.

    Raises:
        ValueError: a value is unusable, or the service would have no logs to read.
    """
    endpoint = conf.get("attribution_endpoint") or None
    prefix = conf.get("cycle_log_prefix") or None
    if endpoint is not None and prefix is None:
        raise ValueError(
            "attribution_endpoint needs cycle_log_prefix: the service reads cycle logs"
        )
    enforces = rdzv_config_get_as_bool(conf, "attribution_enforce_stop", False)
    return ServicesPlan(
        fault_tol_cfg=FaultToleranceConfig(
            cycle_info_dir=conf.get("cycle_info_dir") or None,
            rdzv_token_file=conf.get("rdzv_token_file") or None,
        ),
        logs=LogPlan(applog_prefix=prefix),
        attribution=AttributionConfig(
            None if endpoint is None else client_endpoint(endpoint),
            stop_action="no-restart" if enforces else "log",
        ),
    )


def job_settings(params: RendezvousParameters, timeouts: type[Timeouts]) -> dict[str, Any]:
    """Return the fields that the settings of both kinds of handler have in common."""
    timeout: Timeouts = timeouts.from_configuration(params.config)
    return {
        "run_id": params.run_id,
        "min_nodes": params.min_nodes,
        "max_nodes": params.max_nodes,
        "timeout": timeout,
        "keep_alive_interval": timeout.heartbeat,
        "keep_alive_max_attempt": KEEP_ALIVE_MAX_ATTEMPT,
    }


def _is_store_host(params: RendezvousParameters) -> bool:
    for key in ("is_store_host", "is_host"):
        said = rdzv_config_get_as_bool(params.config, key)
        if said is not None:
            return said
    if not params.endpoint:
        return False
    from torch.distributed.elastic.rendezvous.utils import (
        _matches_machine_hostname,
        parse_rendezvous_endpoint,
    )

    return _matches_machine_hostname(parse_rendezvous_endpoint(params.endpoint, 0)[0])


def group_size(conf: Mapping[str, Any]) -> int | None:
    """Return `replacement_group_size`, by default the nodes of a task of a Slurm job array.

    Raises:
        ValueError: it is no whole number.
        RuntimeError: Slurm does not tell how many nodes a task has.
    """
    size = rdzv_config_get_as_int(conf, "replacement_group_size")
    return default_replacement_group_size(os.environ) if size is None else size


def host_rules(
    min_nodes: int,
    max_nodes: int,
    timeout: Timeouts,
    *,
    min_healthy: bool = False,
    **placement: Any,
) -> CoordinatorRules:
    """Return what the rendezvous host decides by; `placement` are further rules of that name.

    Raises:
        ValueError: The rules contradict each other.
    """
    many = environment.allows_many_launchers(os.environ)
    rules = PlacementRules(min_nodes, max_nodes, one_launcher_per_addr=not many, **placement)
    validate(rules)
    return CoordinatorRules(
        placement=rules,
        budget=Budget(_NO_LIMIT),
        lease_s=timeout.heartbeat.total_seconds(),
        last_call_s=timeout.last_call.total_seconds(),
        min_healthy=min_healthy,
        counts_unhealthy=not os.environ.get(_env.SLURM_ARRAY_TASK_ID),
    )


def node_settings(
    options: NodeOptions,
    rules: CoordinatorRules,
    timeout: Timeouts,
    *,
    nproc: int,
    grows: bool = False,
) -> NodeSettings:
    """Return what this node is in the job."""
    placement, join_s = rules.placement, timeout.join.total_seconds()
    return NodeSettings(
        arrival=Arrival(
            node=node_identity(options.addr),
            addr=options.addr,
            host=socket.gethostname(),
            infra_rank=options.infra_rank,
            domain=own_domain() if placement.segment else "none",
            group=replacement_group_id(os.environ) if placement.group_size else None,
            nproc=nproc,
        ),
        lease_s=rules.lease_s,
        join_timeout_s=join_s,
        connect_timeout_s=2 * join_s,
        answer_timeout_s=timeout.close.total_seconds(),
        must_agree=settings_of(rules),
        grows=grows,
        max_nodes=placement.max_nodes,
    )
