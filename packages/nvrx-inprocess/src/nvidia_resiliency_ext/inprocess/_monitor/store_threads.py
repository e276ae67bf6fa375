# SPDX-License-Identifier: Apache-2.0
"""Use the store from two threads of the monitor: one writes, one waits for outcomes.

The first also keeps this node's entry and lease, and looks at another node's. Results return as
calls in the event loop's thread. A store that hangs holds up these threads only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.inprocess._monitor import messages
from nvidia_resiliency_ext.inprocess._monitor.messages import START_LIMIT_S, MonitorSettings
from nvidia_resiliency_ext.inprocess._monitor.timeouts import Ring
from nvidia_resiliency_ext.inprocess._protocol.decision import NodeEntry
from nvidia_resiliency_ext.inprocess._protocol.iteration_store import IterationStore, Outcome

if TYPE_CHECKING:
    from .serving import Serving

logger = logging.getLogger("nvrx")
CONNECT = f"{__name__}:connect_store"
"""The name of `connect_store`: the one factory that needs no torch."""
_CONNECT_LIMIT = timedelta(seconds=60)
# Modules of torch import each other in a circle: two threads in it are a deadlock to Python.
_importing = threading.RLock()


def open_iteration_store(settings: MonitorSettings) -> IterationStore:
    """Connect to the store of a call; called in the thread that will use it."""
    with _importing:
        if settings.store_factory != CONNECT:
            warm_up()
        make = messages.load_named(settings.store_factory, settings.store_file)
    return IterationStore(make(**messages.load_kwargs(settings.store_kwargs)), settings.prefix)


def connect_store(host: str, port: int) -> Any:
    """Connect to a TCPStore that is served; without torch, where that is possible."""
    from nvidia_resiliency_ext.shared_utils.store_client import StoreClient, StrangeStoreError

    try:
        return StoreClient(host, port, _CONNECT_LIMIT)
    except StrangeStoreError as error:
        logger.info("monitor_process: %s; torch's own client is used", error)
    warm_up()
    from nvidia_resiliency_ext.inprocess._store.endpoint import Endpoint
    from nvidia_resiliency_ext.inprocess.store import TCPStore

    return TCPStore.connect(Endpoint(host, port, is_served=True), _CONNECT_LIMIT)


def store_name(settings: MonitorSettings) -> str:
    """Return the name of a call's store for messages."""
    if settings.store_factory != CONNECT:
        return f"the store of {settings.store_factory}"
    where = messages.load_kwargs(settings.store_kwargs)
    return f"the store at {where['host']}:{where['port']}"


def warm_up() -> None:
    """Import torch and all of this package, for a connection that needs them."""
    with _importing:
        # `boot.py` leaves it where it has put an empty package in place.
        complete = getattr(sys.modules["nvidia_resiliency_ext.inprocess"], "_nvrx_complete", None)
        if complete is not None:
            complete()
        with contextlib.suppress(ImportError):
            import torch.distributed  # noqa: F401 - for its effect


_Run = Callable[[IterationStore], Any]
_Done = Callable[[Any], None]
_Post = Callable[[Callable[[], None]], None]
_Lost = Callable[[str], None]


class StoreWorker:
    """Own one thread with one store connection, and the operations that wait for it."""

    def __init__(
        self, settings: MonitorSettings, post: _Post, lost: _Lost, name: str = "nvrx-store"
    ) -> None:
        self._settings = settings
        self._post = post
        self._lost = lost
        self._waiting: queue.SimpleQueue[tuple[_Run, _Done | None] | None] = queue.SimpleQueue()
        # Since when connecting, or the present operation, has been running; and since when there
        # has been no connection, after one broke.
        self.started_s: float | None = time.monotonic()
        self.broken_s: float | None = None
        self._pending = 0  # operations not done; written by the loop's thread only
        self._has_failed = False
        self._store: IterationStore | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._store is not None

    @property
    def pending(self) -> int:
        """How many operations are not done, and will be."""
        return 0 if self._has_failed else self._pending

    def submit(self, run: _Run, done: _Done | None = None) -> None:
        """Queue an operation, which may run twice; `done` gets its result in the loop's thread."""
        self._pending += 1
        self._waiting.put((run, done))

    def close(self) -> None:
        """End the thread after the queued operations."""
        self._closed.set()
        self._waiting.put(None)

    def _run(self) -> None:
        lost = ""
        try:
            self._store = open_iteration_store(self._settings)
            self.started_s = None
            while (operation := self._waiting.get()) is not None:
                run, done = operation
                self.started_s = time.monotonic()
                result = self._perform(run)
                self.started_s = None
                self._post(functools.partial(self._finish, done, result))
        except Exception as error:  # noqa: BLE001 - it is reported as the store's loss
            logger.debug("monitor_process: the store is lost\n%s", traceback.format_exc())
            lost = f"{type(error).__name__}: {error}"
            self._has_failed = True
        finally:
            self.started_s = None
            self._store = None
        # Not before: by then the connections are closed, which the error's frames held.
        if lost and not self._closed.is_set():
            self._post(lambda: self._lost(lost))

    def _perform(self, run: _Run) -> Any:
        assert self._store is not None
        try:
            return run(self._store)
        except Exception as error:
            if self._closed.is_set():
                raise
            # A connection may break without the store being lost; all operations may be repeated.
            # As text: a handler that keeps its records must not keep the connection.
            logger.info("monitor_process: the store is connected to again: %s", str(error))
        self.broken_s = time.monotonic()
        self._store = open_iteration_store(self._settings)
        self.broken_s = None
        return run(self._store)

    def _finish(self, done: _Done | None, result: Any) -> None:
        self._pending -= 1
        if done is not None:
            done(result)


_LONGEST_WAIT_S = 10.0


class OutcomeReader(StoreWorker):
    """Follow iterations in turn, with a thread and a connection of its own."""

    def __init__(self, settings: MonitorSettings, post: _Post, listener: Serving) -> None:
        self._listener = listener
        self.skipped = -1  # an iteration for whose records no rank of this node waits
        super().__init__(settings, post, listener.store_lost, "nvrx-outcomes")

    def follow(self, iteration: int, participants: frozenset[int]) -> None:
        self.submit(lambda store: self._follow(store, iteration, participants))

    def _follow(self, store: IterationStore, iteration: int, participants: frozenset[int]) -> None:
        outcome = None
        while outcome is None:
            if self._closed.is_set():
                return
            outcome = store.outcome(iteration, _LONGEST_WAIT_S)
        since_s = time.monotonic()
        if self._report(iteration, outcome):
            return
        left_s = self._settings.last_call_wait_s - (time.monotonic() - since_s)
        has_all = left_s > 0 and store.wait_all_reported(iteration, left_s)
        # With all reported, the records came along; else reading them costs an operation, and the
        # decision brings them, too.
        is_skipped = self.skipped == iteration and not has_all
        records = (store.first_records if is_skipped else store.records)(iteration)
        waited_s = time.monotonic() - since_s
        self._post(lambda: self._listener.last_call_over(iteration, records, waited_s))
        while (decision := store.decision(iteration, self._settings.heartbeat_interval_s)) is None:
            if self._closed.is_set():
                return
            # The monitor that counted last may have died before it decided.
            store.look(iteration, participants)
        self._post(lambda: self._listener.decided(iteration, decision))

    def catch_up(self, store: IterationStore, iteration: int) -> None:
        """Report the outcome of an iteration, without waiting; in the thread of `store`."""
        outcome = store.outcome(iteration, 0.0)
        if outcome is None or self._report(iteration, outcome):
            return
        records, decision = store.records(iteration), store.decision(iteration, 0.0)
        self._post(lambda: self._listener.last_call_over(iteration, records, 0.0))
        if decision is not None:
            self._post(lambda: self._listener.decided(iteration, decision))

    def _report(self, iteration: int, outcome: Outcome) -> bool:
        """Report an outcome; return whether nothing can follow it."""
        is_completed = outcome is Outcome.COMPLETED
        self._post(lambda: self._listener.outcome(iteration, is_completed=is_completed))
        return is_completed


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
        """Renew the own lease and read the next node's when due; return the next due time."""
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
