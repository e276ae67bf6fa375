# SPDX-License-Identifier: Apache-2.0
"""Torch's rendezvous handler over the rounds of a job, in a store that the caller brings."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import api
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
)

from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance._core.cause import Cause
from nvidia_resiliency_ext.fault_tolerance._core.errors import (
    RDZV_NO_RESTART_REASONS,
    RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP,
    RDZV_SHUTDOWN_REASON_FAILURE,
    RDZV_SHUTDOWN_REASON_GRACEFUL,
    UnhealthyNodeException,
)
from nvidia_resiliency_ext.fault_tolerance._core.machine import request_event
from nvidia_resiliency_ext.fault_tolerance._health.admission import NodeChecks, unfit
from nvidia_resiliency_ext.fault_tolerance._hosting.services import (
    CoordinatorServices,
    ServicesPlan,
)
from nvidia_resiliency_ext.fault_tolerance._hosting.thread import CoordinatorThread
from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import NodeSettings
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator_loop import GOODBYE_WAIT_S
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Kind
from nvidia_resiliency_ext.fault_tolerance._rendezvous.session import Placed, SessionEvent
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import (
    JobStore,
    agree_on_secret,
    another_client,
)
from nvidia_resiliency_ext.fault_tolerance.data import WorkloadAction
from nvidia_resiliency_ext.fault_tolerance.rdzv_utils import rdzv_config_get_as_bool
from nvidia_resiliency_ext.shared_utils.clock import Clock, SystemClock

from .membership import LAST_WORDS_S, Membership, RoundMember, read_members
from .settings import NodeOptions


def node_check(conf: Mapping[str, Any]) -> Callable[[], None]:
    """Return what raises `UnhealthyNodeException` where this node must not join.

    Settings: `enable_nic_healthcheck`, `link_state_path_template`,
    `enable_dist_storage_healthcheck`, `storage_healthcheck_paths` and `segment_health_check_dir`;
    those left out have the launcher's defaults.

    Raises:
        ValueError: a setting has an unusable value.
    """
    given: dict[str, Any] = {
        name: rdzv_config_get_as_bool(conf, name)
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


logger = logging.getLogger("nvrx")

REASONS = RDZV_NO_RESTART_REASONS | {RDZV_SHUTDOWN_REASON_GRACEFUL, RDZV_SHUTDOWN_REASON_FAILURE}


class StoreRendezvousHandler(RendezvousHandler):
    """Rounds of a job over a caller's store, with torch's interface.

    Args:
        store: A TCPStore that all nodes reach, or PrefixStores over one.
        run_id: The job's name.
        member: What this node is in the job.
        rules: What the rendezvous host decides by.
        options: What concerns this node alone.

    Raises:
        ValueError: the store is of another kind.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        member: NodeSettings,
        rules: CoordinatorRules,
        options: NodeOptions,
    ) -> None:
        _refuse_other_stores(store)
        self._store = store
        self._run_id = run_id
        self._requests: Callable[[], list[object]] = list
        self._node_check: Callable[[], None] = lambda: None
        self._is_unfit = False
        self._worker_group: Any = None
        clock = SystemClock()
        prefix, me = keys.prefix(run_id), member.arrival.node

        def connect() -> JobStore:
            own = another_client(store)
            return JobStore(own, prefix, options.secret or agree_on_secret(own, prefix))

        def decides(job: JobStore, _stop: threading.Event) -> CoordinatorRules | None:
            first = job.create(keys.HOST, me)
            if first == me:
                return rules
            logger.info("another node decides this job's rounds: %s", first)
            return None

        self._host: CoordinatorThread | None = None
        self._services: CoordinatorServices | None = None
        self._is_stop_requested = False
        if options.is_store_host:
            self._services = self._start_services(options.services, member.arrival.host, clock)
            self._host = CoordinatorThread(
                lambda: _guest_store(connect), decides, me=me, clock=clock, services=self._services
            )
            self._host.start()
        self._member = Membership(member, connect, clock, self._on_event)

    # What torch's agent calls ----------------------------------------------------------------

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
            torch's `RendezvousInfo`; before torch 2.4 the tuple of store, rank and world size.

        Raises:
            RendezvousGracefulExitError: the job ended well while this node had no place in it.
            RendezvousClosedError: there is no further round.
            RendezvousTimeoutError: a round did not close in time.
            RendezvousConnectionError: the store is gone, or the nodes were started differently.
            UnhealthyNodeException: this node failed its checks, or a rank excluded it.
        """
        if self._services is not None:
            self._services.ended(self._services.cycle)
        return self._info(self._member.join(self._before_arrival))

    def is_closed(self) -> bool:
        """Return whether there is no further round."""
        return self._member.is_over

    def set_closed(self) -> None:
        """End the job for everybody, in order."""
        self._member.end(RDZV_SHUTDOWN_REASON_GRACEFUL)

    def num_nodes_waiting(self) -> int:
        """Return how many nodes have gone into a later round; torch's agent then joins them.

        Standbys do not count. A node that cannot reach the store any more must stop, and learns it
        here.

        Raises:
            RendezvousConnectionError: the store is gone or silent.
        """
        if not self.is_next_round_open():
            return 0
        entry = self._member.entry
        assert entry is not None
        counted = self._member.read(lambda store: store.count(keys.arrivals(entry.round), 0))
        return max(1, counted)

    def is_next_round_open(self) -> bool:
        """Return whether another node has opened the next round, be it closed again or not.

        Raises:
            RendezvousConnectionError: the store is gone or silent.
        """
        if not self._member.is_over:
            self._member.check()
        return self._member.is_next_round_open

    def shutdown(self, reason: str = RDZV_SHUTDOWN_REASON_GRACEFUL) -> bool:
        """End the job on all nodes and release all resources.

        Returns False if no node could be notified.

        The first reason stays. A node that has left, such as an unhealthy one, goes alone. The
        rendezvous host waits here for the others, 3 s at most.

        Args:
            reason: `graceful`, `failure`, `attribution_stop` or `no_progress`; the first one given
                counts.

        Raises:
            ValueError: the reason is none of `graceful`, `failure`, `attribution_stop` and
                `no_progress`.
        """
        if reason not in REASONS:
            raise ValueError(f"reason {reason!r}: use one of {', '.join(sorted(REASONS))}")
        is_reported = True
        if not self._member.is_over and not self._member.has_left:
            try:
                self._member.end(reason)
            except RendezvousConnectionError as error:
                logger.warning("the end of the job could not be told: %s", str(error))
                is_reported = False
        self._member.close()
        if self._services is not None:
            self._services.close()
        if self._host is not None and self._member.is_over:
            self._host.join(GOODBYE_WAIT_S + LAST_WORDS_S)
        return is_reported

    # What our agents call --------------------------------------------------------------------

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
        """Do what ranks have asked for since the last call.

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
            what = (
                f"a rank asked to shut the workload down: {asked[WorkloadAction.ShutdownWorkload]}"
            )
            self._member.end(RDZV_SHUTDOWN_REASON_FAILURE, self._cause("shutdown", what))
            raise RendezvousClosedError(what)
        if WorkloadAction.ExcludeThisNode in asked:
            what = f"a rank asked to exclude this node: {asked[WorkloadAction.ExcludeThisNode]}"
            self._leave_unfit(what)
            raise UnhealthyNodeException(what)

    def round(self) -> int:
        """Return the number of the present round, which counts the restarts of the job."""
        entry = self._member.entry
        return entry.round if entry is not None else 0

    def get_shutdown_reason(self) -> str | None:
        """Return how the job ended, or None while it has not."""
        entry = self._member.entry
        return entry.reason if entry is not None and self._member.is_over else None

    def no_restart_reason(self) -> str | None:
        """Return why the job must not be started again, or None."""
        reason = self.get_shutdown_reason()
        return reason if reason in RDZV_NO_RESTART_REASONS else None

    def signal_no_restart(self, reason: str) -> None:
        """End the job for everybody; it must not be started again.

        Args:
            reason: `attribution_stop` or `no_progress`.

        Raises:
            ValueError: the reason is neither `attribution_stop` nor `no_progress`.
        """
        if reason not in RDZV_NO_RESTART_REASONS:
            allowed = ", ".join(sorted(RDZV_NO_RESTART_REASONS))
            raise ValueError(f"reason {reason!r}: use one of {allowed}")
        self._member.end(reason)

    def attribution_stop_requested(self) -> bool:
        """Return whether the attribution service has stopped the job, or asks for it.

        The node that decides the rounds asks the service, where the parameters name one; the other
        nodes learn it from the end of the job.
        """
        return self._is_stop_requested or (
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
        """Set the workers that this node runs.

        Args:
            worker_group: The agent's worker group.
        """
        self._worker_group = worker_group

    # Steps -----------------------------------------------------------------------------------

    def _start_services(self, plan: ServicesPlan, host: str, clock: Clock) -> CoordinatorServices:
        services = CoordinatorServices(
            *(plan, os.environ, None, clock), address="", host=host, run_dir="", is_shared=True
        )
        services.follow_attribution(self._request_stop, lambda *_: None)
        return services

    def _request_stop(self, _reason: str) -> None:
        self._is_stop_requested = True

    def _on_event(self, event: SessionEvent) -> None:
        """Record a decision, in a thread; for records. This does nothing."""

    def _before_arrival(self) -> None:
        if self._is_unfit:
            raise RendezvousClosedError("this node has left the job")
        self.handle_control_requests_from_rank()
        self.ensure_node_is_healthy()

    def _leave_unfit(self, what: str) -> None:
        self._is_unfit = True
        with contextlib.suppress(RendezvousConnectionError):
            self._member.leave(Kind.UNHEALTHY, self._cause("unhealthy", what))

    def _members(self) -> list[RoundMember]:
        """Return the nodes of the present round; none while one is open."""
        entry = self._member.entry
        if entry is None or not entry.active:
            return []
        return self._member.read(lambda store: read_members(store, entry.round))

    def _cause(self, kind: str, what: str) -> Cause:
        return Cause(kind, what, host=self._member.host)

    def _info(self, placed: Placed) -> Any:
        entry, rank = placed.entry, placed.assignment.group_rank
        store = PrefixStore(f"torch.rendezvous.{self._run_id}.{entry.round}", self._store)
        if not hasattr(api, "RendezvousInfo"):
            return store, rank, entry.active
        meeting = api.RendezvousStoreInfo(entry.master_addr, entry.master_port)
        assert rank is not None
        return api.RendezvousInfo(store, rank, entry.active, meeting)


@contextlib.contextmanager
def _guest_store(connect: Callable[[], JobStore]) -> Iterator[JobStore]:
    """Give a connection to the job's store, which stays its owner's."""
    store = connect()
    try:
        yield store
    finally:
        store.cut()


def _refuse_other_stores(store: Store) -> None:
    bottom = store
    while isinstance(bottom, PrefixStore):
        bottom = bottom.underlying_store
    if not hasattr(bottom, "port"):
        raise ValueError(f"a rendezvous over {type(bottom).__name__}: a TCPStore is needed")
