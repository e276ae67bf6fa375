# SPDX-License-Identifier: Apache-2.0
"""This node among the nodes of a call: its entry in the store, its lease, the lease it watches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable

from nvidia_resiliency_ext.inprocess._monitor.messages import START_LIMIT_S, MonitorSettings
from nvidia_resiliency_ext.inprocess._monitor.store_threads import StoreWorker
from nvidia_resiliency_ext.inprocess._monitor.timeouts import Ring
from nvidia_resiliency_ext.inprocess._protocol.decision import NodeEntry
from nvidia_resiliency_ext.inprocess._protocol.iteration_store import IterationStore

# One look at the neighbour in so many is left out, as an outcome costs operations as well.
_LEFT_OUT = 4
_HAS_LEFT = 0  # in place of the start of a process


class Registration:
    """Renew the node's entry and lease, and find nodes whose lease is stale."""

    def __init__(
        self,
        settings: MonitorSettings,
        store_worker: StoreWorker,
        lost: Callable[[Iterable[int]], None],
        adopt: Callable[..., None],
    ) -> None:
        """`adopt` gets the ranks of this node that an earlier monitor served."""
        self._store_worker = store_worker
        self._lost, self._adopt = lost, adopt
        self._interval_s = settings.heartbeat_interval_s
        self._ring = Ring(
            settings.heartbeat_interval_s,
            settings.heartbeat_timeout_s,
            # A rank has so much time to find its monitor, and that to find the store.
            settings.heartbeat_timeout_s + START_LIMIT_S,
        )
        self._ranks: dict[int, tuple[int, int]] = {}
        self._node_id: int | None = None
        self._is_asking = False
        self._is_writing = False
        self._is_beating = False
        self._beats = 0
        self._beat_s = -math.inf

    def came(self, rank: int, pid: int, start_ticks: int) -> None:
        """Register a rank of this node."""
        if self._ranks.get(rank) == (pid, start_ticks):
            return
        self._ranks[rank] = (pid, start_ticks)
        if self._node_id is not None:
            self._register()
        elif not self._is_asking:
            self._is_asking = True
            self._store_worker.submit(lambda store: store.nodes(), self._asked)

    def left(self, rank: int) -> None:
        """Remove a rank that left the call, so that a later monitor does not watch it."""
        pid, _ = self._ranks[rank]
        self._ranks[rank] = (pid, _HAS_LEFT)
        if self._node_id is not None:
            self._register()

    def tick(self, now: float, participants: Collection[int]) -> float:
        """Renew the lease and look at the next one, when it is time; return when that is next."""
        if self._node_id is None:
            return math.inf
        if now >= self._beat_s:
            self._beat_s = now + self._interval_s
            if not self._is_beating:
                self._is_beating = True
                self._beat(self._node_id, participants)
        return self._beat_s

    def _beat(self, node_id: int, participants: Collection[int]) -> None:
        self._beats += 1
        must_ask = not self._ring.covers(participants)
        wanted = self._ring.to_read(node_id, participants) if self._beats % _LEFT_OUT else []

        def run(store: IterationStore) -> tuple[list[NodeEntry] | None, dict[int, int]]:
            store.renew_lease(node_id)
            return (store.nodes() if must_ask else None, store.leases(wanted) if wanted else {})

        def done(found: tuple[list[NodeEntry] | None, dict[int, int]]) -> None:
            self._is_beating = False
            nodes, leases = found
            if nodes is not None:
                self._ring.update({node.node_id: node.ranks for node in nodes})
                self._lost(self._ring.unknown(participants, time.monotonic()))
            if wanted:
                self._lost(self._ring.looked(leases, time.monotonic()))

        self._store_worker.submit(run, done)

    def _asked(self, nodes: list[NodeEntry]) -> None:
        own = next((node for node in nodes if not self._ranks.keys().isdisjoint(node.ranks)), None)
        self._node_id = min(self._ranks) if own is None else own.node_id
        self._ring.update({node.node_id: node.ranks for node in nodes})
        if own is not None:
            for rank, (pid, start_ticks) in own.processes.items():
                if rank not in self._ranks:
                    self._ranks[rank] = (pid, start_ticks)
                    self._adopt(rank, pid, start_ticks, has_left=start_ticks == _HAS_LEFT)
        self._register()

    def _register(self) -> None:
        if self._is_writing:
            return
        assert self._node_id is not None
        self._is_writing = True
        node = NodeEntry(self._node_id, dict(sorted(self._ranks.items())))

        def done(_: object) -> None:
            self._is_writing = False
            if node.processes != self._ranks:
                self._register()  # ranks came or left meanwhile

        self._store_worker.submit(lambda store: store.register_node(node), done)
