# SPDX-License-Identifier: Apache-2.0
"""The older rendezvous (`--ft-rdzv-impl legacy`) as torch's elastic agent uses one.

All nodes work that come, up to `max_nodes`; each publishes the state of its workers. The rounds
are the barrier's; nothing in the store is pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from ._rendezvous import records
from ._rendezvous.keys import NodeIdentity
from ._rendezvous.log import FINAL
from ._rendezvous.records import Kind
from ._rendezvous.session import NodeSession
from ._torch.handler import StoreRendezvousHandler
from ._torch.settings import NodeOptions, Timeouts, job_settings, node_options
from .rdzv_utils import rdzv_config_get_as_bool, rdzv_config_get_as_int

__all__ = ["FtRendezvousHandler", "RendezvousSettings", "RendezvousTimeout", "create_handler"]


class RendezvousTimeout(Timeouts):
    """How long the steps of a rendezvous may take: 600 s, 30 s, 30 s and 5 s unless given."""

    _LAST_CALL_S = 30.0


@dataclass(frozen=True)
class RendezvousSettings:
    """Settings of a job's rendezvous, the same on all nodes.

    Args:
        run_id: The job's name.
        min_nodes: The fewest nodes that work.
        max_nodes: The most; more stand by.
        timeout: How long its steps may take.
        keep_alive_interval: Between two lease renewals of a node.
        keep_alive_max_attempt: After how many intervals without one a node counts as lost; 3.
        upscaling_enabled: Whether a node that comes late opens the next round while there is room.
        use_infra_group_rank: Whether ranks follow the scheduler's order of nodes, where all have
            one; else nodes keep their ranks.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int
    upscaling_enabled: bool = True
    use_infra_group_rank: bool = True


class FtRendezvousHandler(StoreRendezvousHandler):
    """A job's rounds over a caller's store: all nodes work that come, up to `max_nodes`.

    The rendezvous host opens the next round when fewer than `min_nodes` nodes are healthy or done,
    and ends the job when none is healthy and enough are done.

    Args:
        store: A TCPStore that all nodes reach, or PrefixStores over one; it stays the caller's.
        settings: What the rendezvous goes by.
        options: What concerns this node alone.
        nproc: Workers on this node.

    Raises:
        ValueError: the store is of another kind, or the settings contradict each other.
    """

    _settings: RendezvousSettings

    def __init__(
        self, store: Store, settings: RendezvousSettings, options: NodeOptions, nproc: int = 1
    ) -> None:
        super().__init__(
            store,
            settings,
            options,
            nproc=nproc,
            grows=settings.upscaling_enabled,
            min_healthy=True,
            elastic=True,
            use_infra_rank=settings.use_infra_group_rank,
        )

    @property
    def settings(self) -> RendezvousSettings:
        """Return the settings of this rendezvous."""
        return self._settings

    def num_nodes(self) -> int:
        """Return how many nodes work in the present round; 0 while one is open."""
        return self._entry.active if self._entry is not None else 0

    def remove_this_node(self) -> None:
        """Take this node out of the present round; it may come back by `next_rendezvous`.

        Raises:
            RendezvousConnectionError: the store is gone.
        """
        self._leave(Kind.LEFT, self._cause("left", f"host {self._me.host} leaves"))

    def get_worker_states(self) -> dict[NodeIdentity, WorkerState]:
        """Return each node's worker state in the present round; `UNKNOWN`: it is lost or has left.

        Raises:
            RendezvousConnectionError: the store is gone.
        """
        return {
            NodeIdentity.parse(member.arrival.node): WorkerState[member.state.name]
            for member in self._members()
            if member.group_rank is not None
        }

    def try_set_worker_state(self, state: WorkerState) -> WorkerState:
        """Publish the state of this node's workers and return the one that stands.

        `SUCCEEDED`, `FAILED` and `UNKNOWN` are final in a round. A node that has no place in the
        round is `UNKNOWN`.

        Raises:
            ValueError: it is no state to publish: `INIT` or `STOPPED`.
            RendezvousConnectionError: the store is gone.
        """
        try:
            wanted = records.WorkerState[state.name]
        except KeyError:
            names = ", ".join(known.name for known in records.WorkerState)
            raise ValueError(f"worker state {state.name}: use one of {names}") from None
        me = NodeIdentity.parse(self._me.node)
        current = self._assigned
        stands = self.get_worker_states().get(me, WorkerState.UNKNOWN)
        if current is None or records.WorkerState[stands.name] in FINAL:
            return stands
        cause = None
        if wanted is not records.WorkerState.HEALTHY:
            cause = self._cause("worker", f"workers of host {self._me.host} are {wanted.value}")

        def send(session: NodeSession) -> None:
            if wanted is records.WorkerState.SUCCEEDED:
                session.succeeded(current.entry.round)
            else:
                session.send(Kind.STATE, state=wanted, cause=cause)

        self._ask(send)
        return state


def create_handler(store: Store, backend: Any, params: RendezvousParameters) -> FtRendezvousHandler:
    """Return a handler over `store`, as `ft_rendezvous_barrier.create_handler`, with its errors.

    The settings in `params.config` are the same but for `segment` and `replacement_group_size`; two
    more are the switches `upscaling_enabled` and `use_infra_group_rank`, true unless given.
    `backend` is not used.
    """
    del backend
    conf = params.config
    settings = RendezvousSettings(
        **job_settings(params, RendezvousTimeout),
        upscaling_enabled=bool(rdzv_config_get_as_bool(conf, "upscaling_enabled", True)),
        use_infra_group_rank=bool(rdzv_config_get_as_bool(conf, "use_infra_group_rank", True)),
    )
    nproc = rdzv_config_get_as_int(conf, "nproc_per_node", 1) or 1
    return FtRendezvousHandler(store, settings, node_options(params), nproc)
