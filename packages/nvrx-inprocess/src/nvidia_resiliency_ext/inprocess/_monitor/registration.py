# SPDX-License-Identifier: Apache-2.0
"""This node among the nodes of a call: its entry in the store, its lease, the lease it watches.

The state file has process and start of each rank of this node, for a monitor that follows: so
that no process is signalled that took over a number.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from nvidia_resiliency_ext.inprocess._monitor.messages import START_LIMIT_S, MonitorSettings
from nvidia_resiliency_ext.inprocess._monitor.store_threads import StoreWorker
from nvidia_resiliency_ext.inprocess._monitor.timeouts import Ring
from nvidia_resiliency_ext.inprocess._protocol.iteration_store import IterationStore
from nvidia_resiliency_ext.inprocess._protocol.lists import NodeEntry
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file

logger = logging.getLogger("nvrx")
_MAX_BYTES = 1 << 20


class StateFile:
    """The file of one call."""

    def __init__(self, directory: str, prefix: str) -> None:
        name = hashlib.sha256(prefix.encode()).hexdigest()[:16]
        self._path = os.path.join(directory, f"ranks-{name}.json")

    def read(self) -> dict[int, tuple[int, int]]:
        """Return process number and start of each initial rank; empty if there is no such file."""
        try:
            fields = json.loads(read_regular_file(self._path, _MAX_BYTES))
            return {int(rank): (int(pid), int(ticks)) for rank, (pid, ticks) in fields.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("monitor_process: %s cannot be used: %s", self._path, error)
            return {}

    def write(self, ranks: Mapping[int, tuple[int, int]]) -> None:
        """Replace the file; a disk that is full costs a follower some knowledge, no more."""
        try:
            atomic_write(self._path, json.dumps(dict(ranks)).encode(), fsync=False)
        except OSError as error:
            logger.warning("monitor_process: %s cannot be written: %s", self._path, error)

    def remove(self) -> None:
        """Remove it, if it is there."""
        try:
            os.unlink(self._path)
        except OSError as error:
            logger.debug("monitor_process: %s stays: %s", self._path, error)


# One look at the neighbour in so many is left out, as an outcome costs operations as well.
_LEFT_OUT = 4


@dataclass(frozen=True, slots=True)
class Adopted:
    """A rank that an earlier monitor served; one of unknown start must not be signalled."""

    rank: int
    pid: int
    start_ticks: int | None
    has_left: bool


@dataclass(frozen=True, slots=True)
class _Look:
    """What one heartbeat has found."""

    nodes: tuple[NodeEntry, ...] | None
    leases: dict[int, int] | None


class Registration:
    """Keeps the node known, and notices when another node is not heard of."""

    def __init__(
        self,
        settings: MonitorSettings,
        directory: str,
        store_worker: StoreWorker,
        lost: Callable[[Iterable[int]], None],
    ) -> None:
        self._store_worker = store_worker
        self._lost = lost
        self._interval_s = settings.heartbeat_interval_s
        self._ring = Ring(
            settings.heartbeat_interval_s,
            settings.heartbeat_timeout_s,
            # A rank has so much time to find its monitor, and that to find the store.
            settings.heartbeat_timeout_s + START_LIMIT_S,
        )
        self._participants: Collection[int] = ()
        self._state_file = StateFile(directory, settings.prefix)
        self._ranks: dict[int, tuple[int, int | None]] = {}
        self._recorded = self._state_file.read()
        self._was_recorded = bool(self._recorded)
        self._node_id: int | None = None
        self._is_asking = False
        self._is_writing = False
        self._is_behind = False
        self._is_beating = False
        self._beats = 0
        self._beat_s = -math.inf

    def came(
        self,
        rank: int,
        pid: int,
        start_ticks: int,
        adopt: Callable[[Adopted], None],
    ) -> None:
        """A rank of this node has come."""
        if self._ranks.get(rank) == (pid, start_ticks):
            return
        self._ranks[rank] = (pid, start_ticks)
        self._recorded[rank] = (pid, start_ticks)
        self._state_file.write(self._recorded)
        if self._node_id is not None:
            self._register()
        elif not self._is_asking:
            self._is_asking = True
            self._store_worker.submit(
                lambda store: store.nodes(), lambda nodes: self._asked(nodes, adopt)
            )

    def left(self, rank: int) -> None:
        """Remove a rank that left the call, so that a later monitor does not watch it."""
        if self._recorded.pop(rank, None) is not None and self._recorded:
            self._state_file.write(self._recorded)

    def tick(self, now: float, participants: Collection[int]) -> float:
        """Renew the lease and look at the next one, when it is time; return when that is next."""
        if self._node_id is None or now < self._beat_s:
            return self._beat_s if self._node_id is not None else math.inf
        self._beat_s = now + self._interval_s
        if not self._is_beating:
            self._is_beating = True
            self._beats += 1
            self._participants = participants
            node_id = self._node_id
            must_ask = not self._ring.covers(participants)
            wanted = self._ring.to_read(node_id, participants) if self._beats % _LEFT_OUT else []
            self._store_worker.submit(
                lambda store: _beat(store, node_id, wanted, must_ask), self._beaten
            )
        return self._beat_s

    def close(self) -> None:
        """Forget the ranks of this node."""
        self._state_file.remove()

    def _asked(self, nodes: Iterable[NodeEntry], adopt: Callable[[Adopted], None]) -> None:
        nodes = tuple(nodes)
        own = next((node for node in nodes if not self._ranks.keys().isdisjoint(node.ranks)), None)
        self._node_id = min(self._ranks) if own is None else own.node_id
        self._ring.update({node.node_id: node.ranks for node in nodes})
        if own is not None:
            for rank, pid in zip(own.ranks, own.pids, strict=True):
                if rank not in self._ranks:
                    known_pid, ticks = self._recorded.get(rank, (None, None))
                    ticks = ticks if known_pid == pid else None
                    self._ranks[rank] = (pid, ticks)
                    has_left = self._was_recorded and rank not in self._recorded
                    adopt(Adopted(rank, pid, ticks, has_left))
        self._register()

    def _register(self) -> None:
        if self._is_writing:
            self._is_behind = True
            return
        assert self._node_id is not None
        self._is_writing = True
        self._is_behind = False
        ranks = tuple(sorted(self._ranks))
        pids = tuple(self._ranks[rank][0] for rank in ranks)
        node = NodeEntry(self._node_id, ranks, pids, os.uname().nodename)
        self._store_worker.submit(
            lambda store: store.register_node(node), lambda _: self._registered()
        )

    def _registered(self) -> None:
        self._is_writing = False
        if self._is_behind:
            self._register()

    def _beaten(self, look: _Look) -> None:
        self._is_beating = False
        if look.nodes is not None:
            self._ring.update({node.node_id: node.ranks for node in look.nodes})
            unknown = self._ring.unknown(self._participants, time.monotonic())
            if unknown:
                self._lost(unknown)
        if look.leases is not None:
            lost = self._ring.looked(look.leases, time.monotonic())
            if lost:
                self._lost(lost)


def _beat(store: IterationStore, node_id: int, wanted: list[int], must_ask: bool) -> _Look:
    store.renew_lease(node_id)
    return _Look(
        nodes=tuple(store.nodes()) if must_ask else None,
        leases=store.leases(wanted) if wanted else None,
    )
