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
from nvidia_resiliency_ext.fault_tolerance._core.infra import (
    default_replacement_group_size,
    infrastructure_rank,
    replacement_group_id,
)
from nvidia_resiliency_ext.fault_tolerance._hosting.services import ServicesPlan
from nvidia_resiliency_ext.fault_tolerance._plan import environment
from nvidia_resiliency_ext.fault_tolerance._rendezvous.agreement import settings_of
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

from .followers import follower_plan
from .membership import MemberSettings

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters


# Restarts are counted by the agent that uses the handler.
_NO_LIMIT = 1 << 30

Duration = timedelta | None


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

    def __init__(
        self,
        join: Duration = None,
        last_call: Duration = None,
        close: Duration = None,
        heartbeat: Duration = None,
    ) -> None:
        given = {"join": join, "last_call": last_call, "close": close, "heartbeat": heartbeat}
        self._values = {
            name: self._DEFAULTS[name] if value is None else value for name, value in given.items()
        }
        for name, value in self._values.items():
            least = "zero or more" if name == "last_call" else "more than zero"
            if value < timedelta(0) or (not value and name != "last_call"):
                raise ValueError(f"{name} timeout of {value}: must be {least}")

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

    @property
    def join(self) -> timedelta:
        """For an open round to close."""
        return self._values["join"]

    @property
    def last_call(self) -> timedelta:
        """For more nodes to come when there are enough."""
        return self._values["last_call"]

    @property
    def close(self) -> timedelta:
        """For the end of the job to be told, and any other short answer."""
        return self._values["close"]

    @property
    def heartbeat(self) -> timedelta:
        """Between two signs of life of a node."""
        return self._values["heartbeat"]

    def __eq__(self, other: object) -> bool:
        """Return whether these are the same times."""
        return isinstance(other, Timeouts) and self._values == other._values

    def __hash__(self) -> int:
        """Return a hash that fits `==`."""
        return hash(tuple(self._values.values()))

    def __repr__(self) -> str:
        """Return the times in seconds."""
        parts = (f"{name}={value.total_seconds():g}" for name, value in self._values.items())
        return f"{type(self).__name__}({', '.join(parts)})"


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
        services=follower_plan(params.config),
    )


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
    placement: PlacementRules, timeout: Timeouts, *, min_healthy: bool
) -> CoordinatorRules:
    """Return what the rendezvous host decides by.

    Raises:
        ValueError: The rules contradict each other.
    """
    validate(placement)
    return CoordinatorRules(
        placement=placement,
        budget=Budget(_NO_LIMIT),
        lease_s=timeout.heartbeat.total_seconds(),
        last_call_s=timeout.last_call.total_seconds(),
        min_healthy=min_healthy,
        counts_unhealthy=not os.environ.get(_env.SLURM_ARRAY_TASK_ID),
    )


def placement_rules(
    min_nodes: int, max_nodes: int, *, segment: int | None = None, group: int | None = None
) -> PlacementRules:
    """Return the rules by which nodes get their ranks, as far as all handlers share them."""
    return PlacementRules(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        segment=segment,
        group_size=group,
        one_launcher_per_addr=not environment.allows_many_launchers(os.environ),
    )


def member_settings(
    options: NodeOptions,
    rules: CoordinatorRules,
    timeout: Timeouts,
    *,
    nproc: int = 1,
    implementation: str,
    grows: bool = False,
) -> MemberSettings:
    """Return what this node is in the job."""
    placement = rules.placement
    arrival = Arrival(
        node=node_identity(options.addr),
        addr=options.addr,
        host=socket.gethostname(),
        infra_rank=options.infra_rank,
        domain=own_domain() if placement.segment else "none",
        group=replacement_group_id(os.environ) if placement.group_size else None,
        nproc=nproc,
    )
    return MemberSettings(
        arrival=arrival,
        lease_s=rules.lease_s,
        join_timeout_s=timeout.join.total_seconds(),
        answer_timeout_s=timeout.close.total_seconds(),
        must_agree=settings_of(
            rules, "min-healthy" if rules.min_healthy else "any-failed", implementation
        ),
        grows=grows,
        max_nodes=placement.max_nodes,
    )
