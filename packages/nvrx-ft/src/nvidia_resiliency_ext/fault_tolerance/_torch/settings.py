# SPDX-License-Identifier: Apache-2.0
"""What a rendezvous handler of torch's kind goes by, read from torch's parameters."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from nvidia_resiliency_ext.fault_tolerance import _env, rdzv_utils
from nvidia_resiliency_ext.fault_tolerance._agent.store_rendezvous import node_identity
from nvidia_resiliency_ext.fault_tolerance._config import attribution
from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance._core import infra
from nvidia_resiliency_ext.fault_tolerance._core.errors import UnhealthyNodeException
from nvidia_resiliency_ext.fault_tolerance._health.admission import NodeChecks, unfit
from nvidia_resiliency_ext.fault_tolerance._hosting.services import ServicesPlan
from nvidia_resiliency_ext.fault_tolerance._plan.log_plan import LogPlan
from nvidia_resiliency_ext.fault_tolerance._plan.plan import allows_many_launchers
from nvidia_resiliency_ext.fault_tolerance._rendezvous.agreement import settings_of
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import NodeSettings
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.domain import own_domain
from nvidia_resiliency_ext.fault_tolerance._rendezvous.endpoint import read_token
from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import PlacementRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Arrival
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import Budget

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
        heartbeat: Between two lease renewals of a node.

    Raises:
        ValueError: one of them is not positive; `last_call` may be zero.
    """

    _LAST_CALL_S: ClassVar[float] = 1.0
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
        for name, given, default_s in (
            ("join", join, 600.0),
            ("last_call", last_call, self._LAST_CALL_S),
            ("close", close, 30.0),
            ("heartbeat", heartbeat, 5.0),
        ):
            value = timedelta(seconds=default_s) if given is None else given
            least = "zero or more" if name == "last_call" else "more than zero"
            if value < timedelta(0) or (not value and name != "last_call"):
                raise ValueError(f"{name} timeout of {value}: must be {least}")
            object.__setattr__(self, name, value)

    @classmethod
    def from_configuration(cls, conf: Mapping[str, Any]) -> Any:
        """Return the timeouts of a rendezvous configuration `conf`: `join_timeout` (s) and so on.

        Raises:
            ValueError: A value is no number above 0.
        """
        names = (item.name for item in fields(cls))
        given = {
            name: rdzv_utils.rdzv_config_get_as_float(conf, f"{name}_timeout") for name in names
        }
        return cls(**{k: timedelta(seconds=v) for k, v in given.items() if v is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of this node, which differ between nodes."""

    addr: str  # by which other nodes reach it
    is_store_host: bool  # decides the rounds; of several the first one does
    secret: bytes | None = None  # key of the digests of the job's values; None: a generated one
    infra_rank: int = -1  # -1: its place in the cluster is unknown
    services: ServicesPlan = field(default_factory=ServicesPlan)  # if it decides the rounds
    check: Callable[[], None] = lambda: None  # raises UnhealthyNodeException: it must not join


def node_options(params: RendezvousParameters) -> NodeOptions:
    """Return this node's options from `params` and the environment.

    Raises ValueError for an unusable value (ConfigError for the token file), RuntimeError where
    Slurm does not tell the place of this node.
    """
    token_file = params.get("rdzv_token_file")
    return NodeOptions(
        addr=params.local_addr or socket.getfqdn(),
        is_store_host=_is_store_host(params),
        secret=read_token(token_file) if token_file else None,
        infra_rank=infra.infrastructure_rank(os.environ),
        services=services_of(params.config),
        check=node_check(params.config),
    )


def node_check(conf: Mapping[str, Any]) -> Callable[[], None]:
    """Return a check that raises `UnhealthyNodeException` where this node must not join.

    Settings that are left out have the launcher's defaults; ValueError: one is unusable.
    """
    given: dict[str, Any] = {
        name: rdzv_utils.rdzv_config_get_as_bool(conf, name)
        for name in ("enable_nic_healthcheck", "enable_dist_storage_healthcheck")
    }
    for name in ("link_state_path_template", "segment_health_check_dir"):
        given[name] = conf.get(name)
    paths = conf.get("storage_healthcheck_paths")
    given["storage_healthcheck_path"] = paths if isinstance(paths, str) else ",".join(paths or ())
    wanted = {name: value for name, value in given.items() if value not in (None, "")}
    checks = NodeChecks(FaultToleranceConfig.from_kwargs(**wanted), None, os.environ)

    def check() -> None:
        cause = unfit(checks.run(), socket.gethostname())
        if cause is not None:
            raise UnhealthyNodeException(cause.what)

    return check


def services_of(conf: Mapping[str, Any]) -> ServicesPlan:
    """Return the services that `conf` asks for on the node with the coordinator."""
    endpoint = conf.get("attribution_endpoint") or None
    prefix = conf.get("cycle_log_prefix") or None
    if endpoint is not None and prefix is None:
        raise ValueError(
            "attribution_endpoint needs cycle_log_prefix: the service reads cycle logs"
        )
    enforces = rdzv_utils.rdzv_config_get_as_bool(conf, "attribution_enforce_stop", False)
    return ServicesPlan(
        fault_tol_cfg=FaultToleranceConfig(
            cycle_info_dir=conf.get("cycle_info_dir") or None,
            rdzv_token_file=conf.get("rdzv_token_file") or None,
        ),
        logs=LogPlan(applog_prefix=prefix),
        attribution=attribution.AttributionConfig(
            None if endpoint is None else attribution.client_endpoint(endpoint),
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
    """Return whether this node is to decide: where nobody says, whether the endpoint is here."""
    for key in ("is_store_host", "is_host"):
        said = rdzv_utils.rdzv_config_get_as_bool(params.config, key)
        if said is not None:
            return said
    if not params.endpoint:
        return False
    from torch.distributed.elastic.rendezvous.utils import (
        _matches_machine_hostname,
        parse_rendezvous_endpoint,
    )

    return _matches_machine_hostname(parse_rendezvous_endpoint(params.endpoint, 0)[0])


def rules_and_node(
    settings: Any,
    options: NodeOptions,
    *,
    nproc: int,
    grows: bool = False,
    min_healthy: bool = False,
    **placement: Any,
) -> tuple[CoordinatorRules, NodeSettings]:
    """Return the coordinator's rules and this node's settings.

    `settings` are `RendezvousSettings` of either kind, `placement` are further `PlacementRules`;
    ValueError: they contradict each other.
    """
    timeout: Timeouts = settings.timeout
    placed_by = PlacementRules(
        settings.min_nodes,
        settings.max_nodes,
        one_launcher_per_addr=not allows_many_launchers(os.environ),
        **placement,
    )
    rules = CoordinatorRules(
        placement=placed_by,
        budget=Budget(_NO_LIMIT),
        lease_s=timeout.heartbeat.total_seconds(),
        last_call_s=timeout.last_call.total_seconds(),
        min_healthy=min_healthy,
        counts_unhealthy=not os.environ.get(_env.SLURM_ARRAY_TASK_ID),
    )
    join_s = timeout.join.total_seconds()
    node = NodeSettings(
        arrival=Arrival(
            node=node_identity(options.addr),
            addr=options.addr,
            host=socket.gethostname(),
            infra_rank=options.infra_rank,
            domain=own_domain() if placed_by.segment else "none",
            group=infra.replacement_group_id(os.environ) if placed_by.group_size else None,
            nproc=nproc,
        ),
        lease_s=rules.lease_s,
        join_timeout_s=join_s,
        connect_timeout_s=2 * join_s,
        answer_timeout_s=timeout.close.total_seconds(),
        must_agree=settings_of(rules),
        grows=grows,
        max_nodes=settings.max_nodes,
    )
    return rules, node
