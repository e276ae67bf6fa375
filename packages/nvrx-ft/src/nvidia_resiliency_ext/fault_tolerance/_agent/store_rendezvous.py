# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of many nodes as one launcher sees it, over the job's store.

Calls that wait run in the threads of `_rendezvous`. A timer of the loop evaluates the lease: a
store that stopped answering cannot say so.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._core import machine
from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._monitor.messages import LeaseHeld
from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys, records
from nvidia_resiliency_ext.fault_tolerance._rendezvous import session as sessions
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import NodeClient, NodeSettings
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import JobStore
from nvidia_resiliency_ext.shared_utils.event_loop import Timer
from nvidia_resiliency_ext.shared_utils.hang_culprit import RankState

from .rendezvous import RoundPorts

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator_loop import CoordinatorThread

    from .job import Job

logger = logging.getLogger("nvrx")

LOOKS_PER_LEASE = 5
DEPARTURE_S = 3.0
# Some round trips to the store; ranks are ended this much later where it is slow or lost.
SAID_S = 0.25
STORE_LOST_STOP_S = 5.0


class StoreRendezvous:
    """Rounds of many nodes. The loop's thread only.

    `connect` is called in a thread, and calls its argument whenever it is certain that no store is
    served; `stop` ends its waiting. `coordinator` is its thread, on the node that has it.
    """

    def __init__(
        self,
        job: Job,
        settings: NodeSettings,
        connect: Callable[[Callable[[], None]], JobStore],
        coordinator: CoordinatorThread | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.job, self.settings, self.coordinator, self.stop = job, settings, coordinator, stop
        self.loop, self.clock = job.loop, job.clock
        # The one that this node has workers in. Those of a node that was stopped for a while may
        # be found dead when the others have long begun another round: that one did not fail.
        self._round = 0
        self._previous_rank: int | None = None
        self._is_ending = self.is_over = False
        self._is_lost = False
        self._is_shut = False
        self._join_deadline: Timer | None = None
        self._ports = RoundPorts(settings.master_port)
        self._client = NodeClient(settings, connect, self._push, self.clock)
        # A clock that is set meanwhile must not move this node's times against its record.
        self._wall_ahead_s = self.clock.wall() - self.clock.monotonic()
        self._said_of_clocks = ""
        self._notified_at: float | None = None
        # In the loop, where everything that hears of the lease has been made.
        self._fence = self.loop.call_at(self.clock.monotonic(), self._evaluate_lease)

    def join(self, cycle: int) -> None:  # noqa: ARG002 - the store knows which round is open
        self._ports.end_round()
        port, rank = self._ports.offered, self._previous_rank
        self._client.submit(lambda session: self._arrive(session, port, rank))
        self._cancel_join_deadline()
        at = self.clock.monotonic() + self.settings.join_timeout_s
        self._join_deadline = self.loop.call_at(at, self._join_timed_out)

    def perform(self, effect: machine.Effect) -> None:
        if isinstance(effect, machine.LeaveRendezvous):
            self._leave(effect.cause)
            return
        if isinstance(effect, machine.CloseRendezvous):
            self._is_ending = True
        round_ = self._round
        self._client.submit(lambda session: _record(session, round_, effect))

    def _leave(self, cause: Cause) -> None:
        kind = records.Kind.UNHEALTHY if cause.kind == "unhealthy" else records.Kind.LEFT
        # It says which replacement group goes with this node, which may not have arrived yet.
        me = self.settings.arrival
        is_said = threading.Event()

        def say(session: sessions.NodeSession) -> None:
            try:
                session.send(kind, cause=cause, arrival=me)
                session.confirm()
            finally:
                is_said.set()

        self._client.submit(say, is_urgent=True)
        # This node's ranks are ended next, and those of others fail by that: what comes first in
        # the queue is the cause that all get.
        is_said.wait(SAID_S)

    def hung(self, ranks: Sequence[RankState], complaint: Cause | None) -> None:
        round_, kind, states = self._round, records.Kind.HUNG, tuple(ranks)
        self._client.submit(
            lambda session: session.send(kind, in_round=round_, ranks=states, cause=complaint)
        )

    @property
    def must_stay(self) -> bool:
        return self.coordinator is not None and self.coordinator.is_alive() and not self._is_ending

    def shutdown(self) -> None:
        """Say goodbye, and end the store when all nodes have; a second call does nothing."""
        if self._is_shut:
            return
        self._is_shut = True
        if self.stop is not None:
            self.stop.set()
        for timer in (self._fence, self._join_deadline):
            if timer is not None:
                timer.cancel()
        if not self._is_lost:
            self._client.submit(sessions.NodeSession.say_goodbye, is_urgent=True)
        self._client.close(0.2 if self._is_lost else DEPARTURE_S)
        if self.coordinator is not None:
            self.coordinator.join(DEPARTURE_S + 1.0)
            self.coordinator.stop()
            self.coordinator.join(DEPARTURE_S)
        self._ports.close()

    def _arrive(self, session: sessions.NodeSession, port: int, previous_rank: int | None) -> None:
        """Offer this node; runs in the session's thread, which may wait for the domain."""
        arrival = dataclasses.replace(
            self.settings.arrival,
            master_port=port,
            previous_rank=previous_rank,
            domain=self.settings.domain(),
            clock=round(self.clock.monotonic() + self._wall_ahead_s, 3),
        )
        entry = session.entry
        if entry.phase is records.Phase.OVER:
            self._push(sessions.Over(entry))
            return
        unfit = None
        if entry.phase is records.Phase.OPEN:
            unfit = self.settings.unfit_in(entry.round)
        if unfit is not None:
            self._push(machine.NodeUnfit(unfit))
        elif not session.arrive(arrival):
            self._push(sessions.SpareNode(entry))

    def _push(self, event: sessions.SessionEvent | machine.Event) -> None:
        """Hand something to the loop, from any thread."""
        self.loop.post(lambda: self._receive(event))

    def _receive(self, event: sessions.SessionEvent | machine.Event) -> None:
        happened = None if self._is_shut else self._event(event)
        if happened is not None:
            self.job.post(happened)

    def _event(  # noqa: PLR0911 - one for each kind
        self, event: sessions.SessionEvent | machine.Event
    ) -> machine.Event | None:
        if isinstance(event, (sessions.RankAssigned, sessions.SpareNode)):
            self._say_clocks(event.entry.clocks)
        if isinstance(event, sessions.RankAssigned):
            return self._assigned(event)
        if isinstance(event, sessions.SpareNode):
            self._cancel_join_deadline()
            self._previous_rank = None
            logger.info(
                "round %d goes on without this node: it waits as a spare", event.entry.round
            )
            return None
        if isinstance(event, sessions.Opened):
            cause = event.entry.cause or Cause("opened", "a new round was opened")
            return machine.NextRoundOpened(cause)
        if isinstance(event, sessions.Leaves):
            if event.entry.save_at:
                return machine.SaveAgreed(event.entry.save_at)
            return machine.RoundLeaves(event.entry.cause or Cause("preempted", "a node must go"))
        if isinstance(event, sessions.Hung):
            culprit = event.entry.cause if event.entry.hang == records.HangStage.EVALUATED else None
            return machine.RanksAsked() if culprit is None else machine.HangEvaluated(culprit)
        if isinstance(event, sessions.Over):
            self._is_ending = self.is_over = True
            return machine.RoundClosed(event.entry.reason, event.no_restart, event.entry.cause)
        if isinstance(event, sessions.Lost):
            if self._is_ending or self._is_lost:
                return None  # The store goes when the job is over; that is no failure.
            self._is_lost = True
            fence_s = keys.FENCE_STOP_LEASES * self.settings.lease_s
            return machine.StoreLost(
                event.what, fence_s if event.is_replaced else STORE_LOST_STOP_S
            )
        return event

    def _say_clocks(self, what: str) -> None:
        """Log the nodes whose clocks are off; the same text only once."""
        if what and what != self._said_of_clocks:
            logger.warning("%s", what)
        self._said_of_clocks = what

    def _assigned(self, event: sessions.RankAssigned) -> machine.RoundReady:
        entry, own = event.entry, event.assignment
        self._cancel_join_deadline()
        self._round = entry.round
        self._previous_rank = own.group_rank
        if own.group_rank == 0:
            self._ports.take()
        assignment = machine.Assignment(
            cycle=entry.round,
            group_rank=own.group_rank,
            group_world_size=entry.active,
            rank_offset=own.rank_offset,
            world_size=entry.world_size,
            master_addr=entry.master_addr,
            master_port=entry.master_port,
            restart_ages_s=entry.restart_ages_s,
            clock_off_s=own.clock_off_s,
        )
        return machine.RoundReady(assignment, tuple(range(self.settings.arrival.nproc)))

    def _cancel_join_deadline(self) -> None:
        if self._join_deadline is not None:
            self._join_deadline.cancel()

    def _join_timed_out(self) -> None:
        seconds = self.settings.join_timeout_s
        where = f"; {self.settings.where}" if self.settings.where else ""
        self._push(machine.JoinTimedOut(f"the round did not close within {seconds:.0f} s{where}"))

    def _evaluate_lease(self) -> None:
        """Pass on how long this node may train, and end it when the lease is too old."""
        lease_s, now = self.settings.lease_s, self.clock.monotonic()
        confirmed, fenced_at = self._client.confirmed_at, self._client.fenced_at
        if confirmed is not None and not self._is_lost and not self._is_ending:
            if confirmed != self._notified_at:
                self._notified_at = confirmed
                self.job.monitor.send(LeaseHeld(confirmed + keys.LEASES_TO_KILL * lease_s))
            if fenced_at is not None and now >= fenced_at:
                self._is_lost = True
                what = (
                    f"the job's store has not answered for {now - confirmed:.1f} s;"
                    " this node stops before the others replace it"
                )
                self._push(machine.StoreLost(what, keys.FENCE_STOP_LEASES * lease_s))
                return
        self._fence = self.loop.call_at(now + lease_s / LOOKS_PER_LEASE, self._evaluate_lease)


def _record(session: sessions.NodeSession, round_: int, effect: machine.Effect) -> None:
    """Write an effect decided in `round_` to the log of decisions or to the messages."""
    match effect:
        case machine.OpenNextRound(cause):
            session.open_next(round_, cause)
        case machine.CloseRendezvous(reason):
            session.end(reason, effect.cause)
        case machine.ReportSuccess():
            session.succeeded(round_)
        case machine.ReportBroken(cause, all_gone):
            failed, unhealthy = records.WorkerState.FAILED, records.WorkerState.UNHEALTHY
            state = failed if all_gone else unhealthy
            session.send(records.Kind.STATE, in_round=round_, state=state, cause=cause)
        case machine.Preempted(cause):
            session.send(records.Kind.PREEMPTED, cause=cause)
        case machine.RanksHeld(calls):
            session.send(records.Kind.HELD, calls=calls)


# Not from 0: in containers every launcher may have the same pid, and the same address again when it
# is started anew.
_ids = itertools.count(int.from_bytes(os.urandom(4), "big"))


def node_identity(addr: str) -> str:
    """Return a name for this launcher that no other of the job has: `addr_pid_id`."""
    return f"{addr}_{os.getpid()}_{next(_ids)}"


def own_address(endpoint_host: str, endpoint_port: int) -> str:
    """Return the address of this node by which it reaches the endpoint, or its host name."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(
            endpoint_host, endpoint_port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.getfqdn()
