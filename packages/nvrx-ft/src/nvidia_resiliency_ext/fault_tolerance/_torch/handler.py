# SPDX-License-Identifier: Apache-2.0
"""Torch's rendezvous handler over the rounds of a job, in a store that the caller brings.

For callers that have threads to wait in, as `StoreRendezvous` is for the launcher's loop:
`NodeClient` brings events, and whoever waits is woken. What goes wrong is one of torch's errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import MethodType
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import api

from nvidia_resiliency_ext.fault_tolerance._agent.rendezvous import RoundPorts
from nvidia_resiliency_ext.fault_tolerance._core.errors import (
    RDZV_NO_RESTART_REASONS,
    RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP,
    RDZV_SHUTDOWN_REASON_FAILURE,
    RDZV_SHUTDOWN_REASON_GRACEFUL,
    UnhealthyNodeException,
)
from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause, request_event
from nvidia_resiliency_ext.fault_tolerance._hosting.services import CoordinatorServices
from nvidia_resiliency_ext.fault_tolerance._rendezvous import coordinator_loop, keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous import session as sessions
from nvidia_resiliency_ext.fault_tolerance._rendezvous import store as stores
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import NodeClient
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.log import RoundMember, read_members
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Entry, Kind, Phase
from nvidia_resiliency_ext.fault_tolerance.data import WorkloadAction
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError

from .settings import NodeOptions, rules_and_node

logger = logging.getLogger("nvrx")

REASONS = RDZV_NO_RESTART_REASONS | {RDZV_SHUTDOWN_REASON_GRACEFUL, RDZV_SHUTDOWN_REASON_FAILURE}
DEPARTURE_S = 3.0
_LEFT = "this node has left the rendezvous"

_T = TypeVar("_T")


class StoreRendezvousHandler(api.RendezvousHandler):
    """Rounds of a job over a caller's store, with torch's interface.

    `settings`, `options` and `rules` are those of `rules_and_node`. Methods may be called from any
    thread, `next_rendezvous` from one. Raises ValueError for another kind of store.
    """

    def __init__(self, store: Store, settings: Any, options: NodeOptions, **rules: Any) -> None:
        bottom = store
        while isinstance(bottom, PrefixStore):
            bottom = bottom.underlying_store
        if not hasattr(bottom, "port"):
            raise ValueError(f"a rendezvous over {type(bottom).__name__}: a TCPStore is needed")
        decided_by, self._node = rules_and_node(settings, options, **rules)
        self._me = self._node.arrival
        self._settings = settings
        self._store = store
        self._run_id: str = settings.run_id
        self._requests: Callable[[], list[object]] = list
        self._node_check = options.check
        self._is_unfit = False
        self._worker_group: Any = None
        self._clock = SystemClock()
        self._changed = threading.Condition()  # guards what follows
        self._entry: Entry | None = None  # the last known decision; None: not at the store yet
        self._assigned: sessions.RankAssigned | None = None
        self._joined_round: int | None = None
        self._lost = ""
        self._has_left = False
        self._is_let_go = False
        self._ports = RoundPorts()
        prefix = keys.prefix(self._run_id)

        def connect() -> stores.JobStore:
            own = stores.another_client(store)
            return stores.JobStore(
                own, prefix, options.secret or stores.agree_on_secret(own, prefix)
            )

        def decides(job: stores.JobStore, _stop: threading.Event) -> CoordinatorRules | None:
            first = job.create(keys.HOST, self._me.node)
            if first == self._me.node:
                return decided_by
            logger.info("another node decides this job's rounds: %s", first)
            return None

        self._coordinator: coordinator_loop.CoordinatorThread | None = None
        self._services: CoordinatorServices | None = None
        self._stop_requested = threading.Event()
        if options.is_store_host:
            self._services = CoordinatorServices(
                *(options.services, os.environ, None, self._clock),
                address="", host=self._me.host, run_dir="", is_shared=True,
            )  # fmt: skip
            self._services.follow_attribution(lambda _: self._stop_requested.set(), lambda *_: None)
            self._coordinator = coordinator_loop.CoordinatorThread(
                lambda: contextlib.closing(connect()),  # The store stays its owner's.
                decides,
                partial(
                    coordinator_loop.Coordinator,
                    me=self._me.node,
                    clock=self._clock,
                    begins=self._services.begins,
                    ended=self._services.ended,
                ),
            )
            self._coordinator.start()
        self._client = NodeClient(self._node, lambda _refused: connect(), self._take, self._clock)

    def get_backend(self) -> str:
        """Return `c10d`: the rounds are kept in a store of torch's c10d."""
        return "c10d"

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the agent's store as theirs: False."""
        return False

    def next_rendezvous(self) -> Any:
        """Take part in the next round, and wait until this node has a place in one.

        Standbys wait here until they are needed or the job is over. Whoever has a place opens the
        next round for all by this call.

        Returns:
            torch's `RendezvousInfo`.

        Raises:
            RendezvousGracefulExitError: the job ended well while this node had no place in it.
            RendezvousClosedError: there is no further round.
            RendezvousTimeoutError: a round did not close in time.
            RendezvousConnectionError: the store is gone, or the nodes were started differently.
            UnhealthyNodeException: this node failed its checks, or a rank excluded it.
        """
        if self._services is not None:
            self._services.ended(self._services.cycle)
        self._open_own_next()
        self._joined_round = None
        current = None
        while current is None:
            if self._is_unfit:
                raise api.RendezvousClosedError("this node has left the job")
            self.handle_control_requests_from_rank()
            self.ensure_node_is_healthy()
            current = self._outcome(*self._arrive())
        entry, rank = current.entry, current.assignment.group_rank
        self._joined_round = entry.round
        store = PrefixStore(f"torch.rendezvous.{self._run_id}.{entry.round}", self._store)
        master = api.RendezvousStoreInfo(entry.master_addr, entry.master_port)
        assert rank is not None
        return api.RendezvousInfo(store, rank, entry.active, master)

    def is_closed(self) -> bool:
        """Return whether there is no further round."""
        return self._entry is not None and self._entry.phase is Phase.OVER

    def set_closed(self) -> None:
        """End the job for everybody, in order."""
        self._end(RDZV_SHUTDOWN_REASON_GRACEFUL)

    def num_nodes_waiting(self) -> int:
        """Return how many nodes have gone into a later round, without spare nodes.

        torch's agent then joins them. A node that cannot reach the store any more must stop, and
        learns it here.

        Raises:
            RendezvousConnectionError: the store is gone or silent.
        """
        if not self.is_next_round_open():
            return 0
        entry = self._entry
        assert entry is not None
        counted = self._ask(lambda session: session.store.count(keys.arrivals(entry.round), 0))
        return max(1, counted)

    def is_next_round_open(self) -> bool:
        """Return whether another node has opened the next round, be it closed again or not.

        Raises:
            RendezvousConnectionError: the store is gone or silent.
        """
        if not self.is_closed():
            self._check()
        entry, joined = self._entry, self._joined_round
        if entry is None or joined is None or entry.phase is Phase.OVER:
            return False
        # It may have closed since: a node that was too slow for it must stop its workers, too.
        return entry.round > joined

    def shutdown(self, reason: str = RDZV_SHUTDOWN_REASON_GRACEFUL) -> bool:
        """End the job on all nodes and release all resources; False: no node could be notified.

        The first `reason` stays. A node that has left, such as an unhealthy one, goes alone. The
        rendezvous host waits here for the others, 3 s at most.

        Raises:
            ValueError: the reason is none of `graceful`, `failure`, `attribution_stop` and
                `no_progress`.
        """
        if reason not in REASONS:
            raise ValueError(f"reason {reason!r}: use one of {', '.join(sorted(REASONS))}")
        is_reported = True
        if not self.is_closed() and not self._has_left:
            try:
                self._end(reason)
            except api.RendezvousConnectionError as error:
                logger.warning("the end of the job could not be told: %s", str(error))
                is_reported = False
        self._let_go()
        if self._services is not None:
            self._services.close()
        if self._coordinator is not None and self.is_closed():
            self._coordinator.join(coordinator_loop.GOODBYE_WAIT_S + DEPARTURE_S)
        return is_reported

    def set_node_check(self, check: Callable[[], None]) -> None:
        """Let `check` decide before each arrival: it raises where this node must not join."""
        self._node_check = check

    def ensure_node_is_healthy(self) -> None:
        """Make sure that this node may join; it leaves the job if not.

        Raises:
            UnhealthyNodeException: it must not.
        """
        try:
            self._node_check()
        except UnhealthyNodeException as error:
            self._leave_unfit(str(error))
            raise

    def handle_control_requests_from_rank(self) -> None:
        """Carry out the requests of ranks since the last call.

        Raises:
            UnhealthyNodeException: a rank excluded this node, which has left now.
            RendezvousClosedError: a rank shut the workload down, for everybody.
        """
        asked = {}
        for message in self._requests():
            event = request_event(message)
            if event is not None:
                asked[event.request] = event.description
        if WorkloadAction.ShutdownWorkload in asked:
            why = asked[WorkloadAction.ShutdownWorkload]
            what = f"a rank asked to shut the workload down: {why}"
            self._end(RDZV_SHUTDOWN_REASON_FAILURE, self._cause("shutdown", what))
            raise api.RendezvousClosedError(what)
        if WorkloadAction.ExcludeThisNode in asked:
            what = f"a rank asked to exclude this node: {asked[WorkloadAction.ExcludeThisNode]}"
            self._leave_unfit(what)
            raise UnhealthyNodeException(what)

    def round(self) -> int:
        """Return the number of the present round, which counts the restarts of the job."""
        return self._entry.round if self._entry is not None else 0

    def get_shutdown_reason(self) -> str | None:
        """Return how the job ended, or None while it has not."""
        entry = self._entry
        return entry.reason if entry is not None and entry.phase is Phase.OVER else None

    def no_restart_reason(self) -> str | None:
        """Return why the job must not be started again, or None."""
        reason = self.get_shutdown_reason()
        return reason if reason in RDZV_NO_RESTART_REASONS else None

    def signal_no_restart(self, reason: str) -> None:
        """End the job for everybody, for a `reason`; it must not be started again.

        Raises:
            ValueError: the reason is neither `attribution_stop` nor `no_progress`.
        """
        if reason not in RDZV_NO_RESTART_REASONS:
            allowed = ", ".join(sorted(RDZV_NO_RESTART_REASONS))
            raise ValueError(f"reason {reason!r}: use one of {allowed}")
        self._end(reason)

    def attribution_stop_requested(self) -> bool:
        """Return whether the attribution service has stopped the job, or asks for it.

        The rendezvous host asks the service, if the parameters name one; the others learn it from
        the end of the job.
        """
        return self._stop_requested.is_set() or (
            self.get_shutdown_reason() == RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP
        )

    def shutdown_cycle_info_reporter(self) -> None:
        """Finish the files about cycles, for 2 s at most; nothing on nodes that write none."""
        if self._services is not None:
            self._services.end_cycle_info()

    def set_agent(self, agent: Any) -> None:
        """Take requests of ranks from `agent.fetch_control_requests()`, if it has that."""
        fetch = getattr(agent, "fetch_control_requests", None)
        if isinstance(fetch, MethodType):
            held = weakref.WeakMethod(fetch)
            self._requests = lambda: method() if (method := held()) is not None else []

    def set_worker_group(self, worker_group: Any) -> None:
        """Set the agent's `worker_group`, the workers that this node runs."""
        self._worker_group = worker_group

    def _ask(
        self, command: Callable[[sessions.NodeSession], _T], timeout_s: float | None = None
    ) -> _T:
        """Run `command` with the session, in the session's thread, and return its result.

        Raises RendezvousConnectionError where the store is gone, or gives no answer in time.
        """
        answers: list[Future[_T]] = []

        def run(session: sessions.NodeSession) -> None:
            answer: Future[_T] = Future()
            try:
                answer.set_result(command(session))
            except StoreLostError:
                raise  # it is done again over the next store
            except Exception as problem:  # noqa: BLE001 - raised again in the caller's thread
                answer.set_exception(problem)
            with self._changed:
                answers.append(answer)
                self._record(session.entry)
                self._changed.notify_all()

        if self._is_let_go:
            raise api.RendezvousConnectionError(_LEFT)
        self._client.submit(run)
        limit_s = self._node.answer_timeout_s if timeout_s is None else timeout_s
        deadline = self._clock.monotonic() + limit_s
        with self._changed:
            while not answers:
                left_s = deadline - self._clock.monotonic()
                if self._lost or left_s <= 0:
                    late = f"the job's store gives no answer within {limit_s:.0f} s"
                    raise api.RendezvousConnectionError(self._lost or late)
                self._changed.wait(left_s)
        try:
            return answers[0].result()
        except NvrxError as error:
            raise api.RendezvousConnectionError(str(error)) from None

    def _members(self) -> list[RoundMember]:
        """Return the nodes of the present round; none while one is open."""
        entry = self._entry
        if entry is None or not entry.active:
            return []
        return self._ask(lambda session: read_members(session.store, entry.round))

    def _cause(self, kind: str, what: str) -> Cause:
        return Cause(kind, what, host=self._me.host)

    def _end(self, reason: str, cause: Cause | None = None) -> None:
        self._ask(lambda session: session.end(reason, cause))

    def _leave(self, kind: Kind, cause: Cause) -> None:
        """Announce that this node leaves the job."""
        self._ask(lambda session: session.send(kind, cause=cause, arrival=self._me))
        self._has_left = True

    def _leave_unfit(self, what: str) -> None:
        self._is_unfit = True
        with contextlib.suppress(api.RendezvousConnectionError):
            self._leave(Kind.UNHEALTHY, self._cause("unhealthy", what))

    def _let_go(self) -> None:
        """Say goodbye and close session and ports; the job may go on without this node."""
        with self._changed:
            if self._is_let_go:
                return
            self._is_let_go = True
            self._changed.notify_all()
        if not self._lost:
            self._client.submit(sessions.NodeSession.say_goodbye, is_urgent=True)
        # Before the job is there the thread still waits for it, and ends by itself.
        self._client.close(DEPARTURE_S if self._entry is not None and not self._lost else 0.0)
        self._ports.close()

    def _open_own_next(self) -> None:
        current, entry = self._assigned, self._entry
        if current is None or entry is None:
            return
        if entry.phase is Phase.CLOSED and entry.round == current.entry.round:
            cause = self._cause("opened", f"host {self._me.host} began another rendezvous")
            self._ask(lambda session: session.open_next(entry.round, cause))

    def _arrive(self) -> tuple[int, bool]:
        """Offer this node; return the round, and whether it came in time for that round."""
        with self._changed:
            self._has_left = False
            self._ports.end_round()
            previous = self._assigned.assignment.group_rank if self._assigned is not None else None
        arrival = dataclasses.replace(
            self._me, master_port=self._ports.offered, previous_rank=previous
        )

        def arrive(session: sessions.NodeSession) -> tuple[int, bool]:
            entry = session.entry
            if entry.phase is Phase.OVER:
                raise self._over(entry)
            is_in_time = session.arrive(arrival)
            late = entry.phase is Phase.CLOSED and entry.active < self._node.max_nodes
            if late and self._node.grows:
                cause = self._cause("opened", f"host {arrival.host} wants to work, too")
                session.open_next(entry.round, cause)
                # Not the round that it arrived in: that one is over.
            return entry.round, is_in_time

        if self._entry is not None:
            return self._ask(arrive)
        try:
            return self._ask(arrive, self._node.join_timeout_s)
        except api.RendezvousConnectionError as error:
            if self._lost:
                raise
            raise api.RendezvousTimeoutError(
                f"no rendezvous host has begun the job ({error}):"
                " is_store_host must be true on one node"
            ) from None

    def _outcome(self, round_: int, is_in_time: bool) -> sessions.RankAssigned | None:
        """Wait for a place in the round of an arrival; None when another round is open."""
        deadline = self._clock.monotonic() + self._node.join_timeout_s
        with self._changed:
            while True:
                if self._is_let_go:
                    raise api.RendezvousConnectionError(_LEFT)
                entry, current = self._entry, self._assigned
                if entry is not None and entry.phase is Phase.OVER:
                    raise self._over(entry)
                self._check()
                if current is not None and current.entry == entry and current.entry.round >= round_:
                    return current
                if entry is not None and entry.round > round_ and entry.phase is Phase.OPEN:
                    return None
                is_closed = entry is not None and entry.phase is Phase.CLOSED
                left_s = deadline - self._clock.monotonic()
                if is_closed or not is_in_time:
                    self._changed.wait(self._fence_s())
                elif left_s > 0:
                    fence_s = self._fence_s()
                    self._changed.wait(left_s if fence_s is None else min(left_s, fence_s))
                else:
                    break
        what = f"round {round_} did not close within {self._node.join_timeout_s:.0f} s"
        self._leave(Kind.LEFT, self._cause("left", what))
        raise api.RendezvousTimeoutError(what)

    def _check(self) -> None:
        """Make sure that this node may go on. Raises RendezvousConnectionError."""
        if self._lost:
            raise api.RendezvousConnectionError(self._lost)
        fence_s = self._fence_s()
        if fence_s is not None and fence_s <= 0 and not self._is_let_go:
            limit_s = keys.LEASES_TO_FENCE * self._node.lease_s
            raise api.RendezvousConnectionError(
                f"the job's store has not answered for {limit_s:.1f} s: this node stops before the"
                " others replace it"
            )

    def _fence_s(self) -> float | None:
        """Return after how many seconds this node must stop unless the store answers."""
        fenced_at = self._client.fenced_at
        return None if fenced_at is None else fenced_at - self._clock.monotonic()

    def _over(self, entry: Entry) -> Exception:
        """Return how a caller learns that the job is over: a node without a place just goes."""
        why = f": {entry.cause.what}" if entry.cause is not None else ""
        text = f"the job is over ({entry.reason}){why}"
        if entry.reason == RDZV_SHUTDOWN_REASON_GRACEFUL and self._assigned is None:
            return api.RendezvousGracefulExitError(text)
        return api.RendezvousClosedError(text)

    def _take(self, event: sessions.SessionEvent) -> None:
        with self._changed:
            if isinstance(event, sessions.Lost):
                self._lost = event.what
            else:
                self._record(event.entry)
            if isinstance(event, sessions.RankAssigned):
                self._assigned = event
                if event.assignment.group_rank == 0:
                    self._ports.take()
            elif not isinstance(event, (sessions.Opened, sessions.Over, sessions.Lost)):
                self._assigned = None
            self._changed.notify_all()

    def _record(self, entry: Entry | None) -> None:
        if entry is not None and (self._entry is None or entry.seq >= self._entry.seq):
            self._entry = entry
