# SPDX-License-Identifier: Apache-2.0
"""The barrier rendezvous as torch's elastic agent uses one, over a store that the caller brings.

`ft_launcher` uses the same rounds without this module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from ._core.errors import RDZV_SHUTDOWN_REASON_FAILURE
from ._core.infra import default_replacement_group_size
from ._torch.handler import StoreRendezvousHandler
from ._torch.settings import NodeOptions, Timeouts, job_settings, node_options
from .rdzv_utils import rdzv_config_get_as_int

__all__ = [
    "FtRendezvousBarrierHandler", "GroupRankStatus", "RendezvousParticipantInfo",
    "RendezvousSettings", "RendezvousStoreValue", "RendezvousTimeout", "create_handler",
]  # fmt: skip


class RendezvousTimeout(Timeouts):
    """How long the steps of a rendezvous may take: 600 s, 1 s, 30 s and 5 s unless given."""


@dataclass(frozen=True)
class RendezvousSettings:
    """A job's rendezvous settings; the same on all nodes.

    Args:
        run_id: The job's name.
        min_nodes: Number of nodes that work.
        max_nodes: Number of expected nodes; further nodes are also spare nodes.
        timeout: Timeouts of the steps of a rendezvous.
        keep_alive_interval: Time between two lease renewals of a node.
        keep_alive_max_attempt: Number of intervals without a renewal until a node is lost; 3.
        segment: Number of consecutive ranks that must share an NVLink domain.
        replacement_group_size: Number of nodes that a replacement group must have to be used.
        nproc_per_node: Workers on this node.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int
    segment: int | None = None
    replacement_group_size: int | None = None
    nproc_per_node: int = 1


class GroupRankStatus(Enum):
    """Placeholders for the rank of a node that has no rank."""

    UNASSIGNED = -1


@dataclass(frozen=True)
class RendezvousParticipantInfo:
    """Description of a node that joins a round, as data for tools.

    Args:
        addr: Its address.
        pid: Its agent's process.
        local_id: Counts the handlers of that process.
        infra_rank: Its position in the cluster; -1 if unknown.
        domain_id: Its NVLink domain.
        replacement_group_id: Its replacement group.
    """

    addr: str
    pid: int
    local_id: int
    infra_rank: int = -1
    domain_id: str = "none"
    replacement_group_id: str | None = None

    def pack(self) -> str:
        """Return the fields as JSON."""
        return json.dumps(self.__dict__)

    @classmethod
    def unpack(cls, text: str | bytes) -> RendezvousParticipantInfo:
        """Return the value of a `text` that `pack` made; ValueError: it has another form."""
        return cls(**_object(text, cls.__name__, set(cls.__dataclass_fields__)))


@dataclass(frozen=True)
class RendezvousStoreValue:
    """A value of one `round`, as data for tools: `payload`."""

    round: int
    payload: Mapping[str, Any]

    def pack(self) -> str:
        """Return the fields as JSON."""
        return json.dumps({"round": self.round, "payload": dict(self.payload)})

    @classmethod
    def unpack(cls, text: str | bytes) -> RendezvousStoreValue:
        """Return the value of a `text` that `pack` made; ValueError: it has another form."""
        return cls(**_object(text, cls.__name__, {"round", "payload"}))


class FtRendezvousBarrierHandler(StoreRendezvousHandler):
    """Rounds of a job over a caller's store: `min_nodes` nodes work, the others are spare nodes.

    Args:
        store: A TCPStore that all nodes can reach, or PrefixStores over one; the caller owns it.
        settings: Settings of the rendezvous.
        options: Options of this node only.

    Raises:
        ValueError: the store is of another kind, or the settings contradict each other.
    """

    _settings: RendezvousSettings

    def __init__(self, store: Store, settings: RendezvousSettings, options: NodeOptions) -> None:
        super().__init__(
            store,
            settings,
            options,
            nproc=settings.nproc_per_node,
            segment=settings.segment,
            group_size=settings.replacement_group_size,
        )

    @property
    def settings(self) -> RendezvousSettings:
        """Settings of the rendezvous."""
        return self._settings

    def shutdown_due_to_failure(self) -> bool:
        """End the job on all nodes as failed; see `shutdown`."""
        return self.shutdown(RDZV_SHUTDOWN_REASON_FAILURE)

    def is_shutdown_due_to_failure(self) -> bool:
        """Return whether the job ended as failed."""
        return self.get_shutdown_reason() == RDZV_SHUTDOWN_REASON_FAILURE

    def get_active_node_addrs(self) -> list[str]:
        """Return the addresses of the nodes that work, by rank; empty while a round is open."""
        return [member.arrival.addr for member in self._members() if member.group_rank is not None]

    def get_standby_node_addrs(self) -> list[str]:
        """Return the addresses of the spare nodes; empty while a round is open."""
        return [member.arrival.addr for member in self._members() if member.group_rank is None]

    def get_active_ranks(self) -> list[int]:
        """Return the infrastructure ranks of the nodes that work, in the order of their addresses.

        Without infrastructure ranks, return their group ranks.
        """
        members = [member for member in self._members() if member.group_rank is not None]
        ranks = [member.arrival.infra_rank for member in members]
        return ranks if min(ranks, default=0) >= 0 else list(range(len(members)))

    def remove_this_node(self) -> None:
        """Raise NotImplementedError: only `_ft_rendezvous` has it."""
        raise NotImplementedError("a node leaves the barrier rendezvous by ending its agent")

    def num_nodes(self) -> int:
        """Raise NotImplementedError: only `_ft_rendezvous` has it."""
        raise NotImplementedError("the world size of next_rendezvous() is the number of nodes")


_Handler = TypeVar("_Handler", bound=FtRendezvousBarrierHandler)


def create_handler(
    store: Store, backend: Any, params: RendezvousParameters
) -> FtRendezvousBarrierHandler:
    """Return a handler over `store`.

    Settings in `params.config`: `join_timeout`, `last_call_timeout`, `close_timeout` and
    `heartbeat_timeout` (seconds), `segment`, `replacement_group_size`, `nproc_per_node`,
    `is_store_host` or `is_host`, `rdzv_token_file`, and for the health checks before each round
    `enable_nic_healthcheck`, `link_state_path_template`, `enable_dist_storage_healthcheck`,
    `storage_healthcheck_paths` and `segment_health_check_dir`; on the rendezvous host
    `cycle_info_dir`, `cycle_log_prefix`, `attribution_endpoint` and
    `attribution_enforce_stop`. Other settings are not used here.

    Args:
        store: A TCPStore that all nodes can reach, or PrefixStores over one; the caller owns it.
        backend: Not used: the rounds are kept in `store`.
        params: Job, nodes, endpoint, and settings.

    Raises:
        ValueError: a setting has an unusable value, or the store is of another kind.
    """
    del backend
    return make_handler(FtRendezvousBarrierHandler, store, params)


def make_handler(
    kind: Callable[[Store, RendezvousSettings, NodeOptions], _Handler],
    store: Store,
    params: RendezvousParameters,
) -> _Handler:
    """Return a handler of a kind over `store`; see `create_handler`."""
    group_size = rdzv_config_get_as_int(params.config, "replacement_group_size")
    settings = RendezvousSettings(
        **job_settings(params, RendezvousTimeout),
        segment=rdzv_config_get_as_int(params.config, "segment"),
        replacement_group_size=(
            default_replacement_group_size(os.environ) if group_size is None else group_size
        ),
        nproc_per_node=rdzv_config_get_as_int(params.config, "nproc_per_node", 1) or 1,
    )
    return kind(store, settings, node_options(params))


def _object(text: str | bytes, name: str, fields: set[str]) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a {name}: {error}") from None
    if not isinstance(document, dict) or not document.keys() <= fields:
        raise ValueError(f"not a {name}")
    return document
