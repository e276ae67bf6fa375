# SPDX-License-Identifier: Apache-2.0
"""Who is in the present round, read from the store on request by any node.

What `StoreRendezvous` is to the launcher's loop, this is to a caller that has threads to wait in:
the threads of `NodeThreads` bring events, and whoever waits is woken. No torch class is used here.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from nvidia_resiliency_ext.fault_tolerance._core.cause import Cause
from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import arrived
from nvidia_resiliency_ext.fault_tolerance._rendezvous.keys import LEASES_TO_FENCE
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import (
    Arrival,
    Entry,
    ForeignValueError,
    Kind,
    NodeMessage,
    Phase,
    RankAssignment,
    WorkerState,
    decode,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.session import (
    Lost,
    NodeSession,
    Opened,
    Over,
    Placed,
    SessionEvent,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import JobStore
from nvidia_resiliency_ext.fault_tolerance._rendezvous.threads import NodeThreads
from nvidia_resiliency_ext.fault_tolerance._workers.command import PortReservation
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError

FINAL = frozenset({WorkerState.SUCCEEDED, WorkerState.FAILED, WorkerState.UNKNOWN})


@dataclass(frozen=True, slots=True)
class RoundMember:
    """One node of a round; `group_rank` is None for a spare, `state` is that of its workers."""

    arrival: Arrival
    group_rank: int | None
    state: WorkerState = WorkerState.HEALTHY


def read_members(store: JobStore, round_: int) -> list[RoundMember]:
    """Return the nodes of a closed round: those with a place by rank, then the spares.

    It costs one operation, and one more for each node.
    """
    messages = read_messages(store, round_)
    states = worker_states(messages)
    there = arrived(messages)
    members = []
    for node, arrival in _everybody(messages).items():
        rank = _rank(store, node, round_)
        if rank is not None or node in there:
            members.append(RoundMember(arrival, rank, states.get(node, WorkerState.HEALTHY)))
    return sorted(members, key=lambda member: (member.group_rank is None, member.group_rank or 0))


def read_messages(store: JobStore, round_: int) -> tuple[NodeMessage, ...]:
    """Return what nodes have sent the coordinator in a round, as far as it is this job's."""
    messages = []
    for line in store.lines(keys.messages(round_), 0)[0]:
        try:
            messages.append(decode(NodeMessage, line))
        except ForeignValueError as error:
            store.report_foreign(error)
    return tuple(messages)


def worker_states(messages: Iterable[NodeMessage]) -> dict[str, WorkerState]:
    """Return what is said of each node's workers; the first final word stays."""
    states: dict[str, WorkerState] = {}
    for message in messages:
        if states.get(message.node) in FINAL:
            continue
        if message.kind is Kind.STATE and message.state is not None:
            states[message.node] = message.state
        elif message.kind in (Kind.LEFT, Kind.UNHEALTHY):
            states[message.node] = WorkerState.UNKNOWN
    return states


def _everybody(messages: Iterable[NodeMessage]) -> dict[str, Arrival]:
    return {n.node: n.arrival for n in messages if n.kind is Kind.ARRIVED and n.arrival is not None}


def _rank(store: JobStore, node: str, round_: int) -> int | None:
    text = store.peek(keys.assignment(node))
    if text is None:
        return None
    assignment = decode(RankAssignment, text)
    return assignment.group_rank if assignment.round == round_ else None


LAST_WORDS_S = 3.0

_T = TypeVar("_T")


class JobOverError(NvrxError):
    """There is no further round."""

    def __init__(self, entry: Entry) -> None:
        why = f": {entry.cause.what}" if entry.cause is not None else ""
        super().__init__(f"the job is over ({entry.reason}){why}")
        self.entry = entry


class JoinTimeoutError(NvrxError):
    """A round did not close in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    """What this node is in the job, and how long it waits. Times are seconds.

    Attributes:
        arrival: What the host must know of this node; port and earlier rank are filled in.
        lease_s: Between two signs of life.
        join_timeout_s: For an open round to close, and for the job to appear in the store.
        answer_timeout_s: For a call that waits for nobody but the store.
        must_agree: By flag, what all nodes must have been started with alike.
        grows: Whether a node that comes late opens the next round while there is room.
        max_nodes: How much room there is.
    """

    arrival: Arrival
    lease_s: float
    join_timeout_s: float
    answer_timeout_s: float
    must_agree: Mapping[str, str]
    grows: bool = False
    max_nodes: int = 1


class _Answer(Generic[_T]):
    """What a command came to; empty until then."""

    def __init__(self) -> None:
        self.value: list[_T] = []
        self.error: Exception | None = None

    @property
    def is_there(self) -> bool:
        return bool(self.value) or self.error is not None


class Membership:
    """This node in the rounds. Methods may be called from any thread, `join` from one."""

    def __init__(
        self,
        settings: MemberSettings,
        connect: Callable[[], JobStore],
        clock: Clock,
        on_event: Callable[[SessionEvent], None] = lambda _event: None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._on_event = on_event
        # Guards what follows.
        self._changed = threading.Condition()
        self._event: SessionEvent | None = None
        self._entry: Entry | None = None
        self._placed: Placed | None = None
        self._joined_round: int | None = None
        self._lost = ""
        self._has_left = False
        self._is_closed = False
        self._offered = PortReservation()
        self._in_use: PortReservation | None = None
        self._threads = NodeThreads(
            lambda _refused: connect(),
            node=settings.arrival.node,
            host=settings.arrival.host,
            post=self._take,
            clock=clock,
            lease_s=settings.lease_s,
            connect_timeout_s=2 * settings.join_timeout_s,
            settings=dict(settings.must_agree),
        )

    # Where the job stands --------------------------------------------------------------------

    @property
    def node(self) -> str:
        """This node's identity."""
        return self._settings.arrival.node

    @property
    def host(self) -> str:
        """This node's name for people."""
        return self._settings.arrival.host

    @property
    def entry(self) -> Entry | None:
        """The last decision that this node knows; None before it has reached the store."""
        return self._entry

    @property
    def placed(self) -> Placed | None:
        """The last place that this node had."""
        return self._placed

    @property
    def has_left(self) -> bool:
        """Whether this node has said that it takes part no longer."""
        return self._has_left

    @property
    def is_over(self) -> bool:
        """Whether there is no further round."""
        return self._entry is not None and self._entry.phase is Phase.OVER

    @property
    def is_next_round_open(self) -> bool:
        """Whether a round was opened after the last one that `join` gave this node a place in.

        It may have closed since: a node that was too slow for it must stop its workers, too.
        """
        entry, joined = self._entry, self._joined_round
        if entry is None or joined is None or entry.phase is Phase.OVER:
            return False
        return entry.round > joined

    def check(self) -> None:
        """Make sure that this node may go on. Raises StoreLostError."""
        if self._lost:
            raise StoreLostError(self._lost)
        fence_s = self._fence_s()
        if fence_s is not None and fence_s <= 0 and not self._is_closed:
            limit_s = LEASES_TO_FENCE * self._settings.lease_s
            raise StoreLostError(
                f"the job's store has not answered for {limit_s:.1f} s: this node stops before the"
                " others replace it"
            )

    # What this node does ---------------------------------------------------------------------

    def join(self, before_arrival: Callable[[], None]) -> Placed:
        """Take part in the next round, and wait until this node has a place in one.

        A node that has a place opens the next round by this. One that gets none waits for the
        round after, without limit.

        Args:
            before_arrival: Called before each arrival; what it raises ends the attempt.

        Raises:
            JobOverError: there is no further round.
            JoinTimeoutError: a round that this node arrived in did not close in time.
            StoreLostError: the store is gone.
        """
        self._open_own_next()
        self._joined_round = None
        while True:
            before_arrival()
            round_, is_in_time = self._arrive()
            placed = self._outcome(round_, is_in_time)
            if placed is not None:
                self._joined_round = placed.entry.round
                return placed

    def open_next(self, round_: int, cause: Cause) -> None:
        """Open the round after `round_` for everybody, unless that has happened."""
        self.ask(lambda session: session.open_next(round_, cause))

    def end(self, reason: str, cause: Cause | None = None) -> None:
        """End the job for everybody; the first reason stays."""
        self.ask(lambda session: session.end(reason, cause))

    def leave(self, kind: Kind, cause: Cause) -> None:
        """Say that this node takes part no longer."""
        arrival = self._settings.arrival
        self.ask(lambda session: session.send(kind, cause=cause, arrival=arrival))
        self._has_left = True

    def ask(self, command: Callable[[NodeSession], _T], timeout_s: float | None = None) -> _T:
        """Do `command` with the session, in its thread, and return what it returned.

        Raises:
            StoreLostError: the store is gone, or gives no answer in time.
        """
        answer: _Answer[_T] = _Answer()

        def run(session: NodeSession) -> None:
            value: list[_T] = []
            error: Exception | None = None
            try:
                value = [command(session)]
            except StoreLostError:
                raise
            except Exception as problem:  # noqa: BLE001 - raised again in the caller's thread
                error = problem
            with self._changed:
                answer.value, answer.error = value, error
                self._record(session.entry)
                self._changed.notify_all()

        if self._is_closed:
            raise StoreLostError("this node has left the rendezvous")
        self._threads.submit(run)
        limit_s = self._settings.answer_timeout_s if timeout_s is None else timeout_s
        deadline = self._clock.monotonic() + limit_s
        with self._changed:
            while not answer.is_there:
                if self._lost:
                    raise StoreLostError(self._lost)
                left_s = deadline - self._clock.monotonic()
                if left_s <= 0:
                    raise StoreLostError(f"the job's store gives no answer within {limit_s:.0f} s")
                self._changed.wait(left_s)
        if answer.error is not None:
            raise answer.error
        return answer.value[0]

    def close(self) -> None:
        """Say goodbye and let everything go; the job goes on without this node, if it does."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        if not self._lost:
            kind = Kind.GOODBYE if self.is_over else Kind.LEFT
            if self.is_over or not self._has_left:
                self._threads.submit(lambda session: session.send(kind))
        # Before the job is there the thread still waits for it, and ends by itself.
        self._threads.close(LAST_WORDS_S if self._entry is not None and not self._lost else 0.0)
        for reservation in (self._offered, self._in_use):
            if reservation is not None:
                reservation.release()

    # Steps of joining ------------------------------------------------------------------------

    def _open_own_next(self) -> None:
        placed, entry = self._placed, self._entry
        if placed is None or entry is None:
            return
        if entry.phase is Phase.CLOSED and entry.round == placed.entry.round:
            host = self._settings.arrival.host
            cause = Cause("opened", f"host {host} began another rendezvous", host=host)
            self.open_next(entry.round, cause)

    def _arrive(self) -> tuple[int, bool]:
        """Offer this node; return the round, and whether it came in time for a place."""
        with self._changed:
            self._has_left = False
            if self._in_use is not None:
                self._in_use.release()
                self._in_use = None
            previous = self._placed.assignment.group_rank if self._placed is not None else None
        arrival = dataclasses.replace(
            self._settings.arrival, master_port=self._offered.port, previous_rank=previous
        )

        def arrive(session: NodeSession) -> tuple[int, bool]:
            entry = session.entry
            assert entry is not None
            if entry.phase is Phase.OVER:
                raise JobOverError(entry)
            is_in_time = session.arrive(arrival)
            late = entry.phase is Phase.CLOSED and entry.active < self._settings.max_nodes
            if late and self._settings.grows:
                what = f"host {arrival.host} wants to work, too"
                session.open_next(entry.round, Cause("opened", what, host=arrival.host))
                # Not the round that it arrived in: that one is over.
            return entry.round, is_in_time

        if self._entry is None:
            try:
                return self.ask(arrive, self._settings.join_timeout_s)
            except StoreLostError as error:
                if self._lost:
                    raise
                raise JoinTimeoutError(
                    f"no rendezvous host has begun the job ({error}):"
                    " is_store_host must be true on one node"
                ) from None
        return self.ask(arrive)

    def _outcome(self, round_: int, is_in_time: bool) -> Placed | None:
        """Wait for a place in the round of an arrival; None when another round is open."""
        deadline = self._clock.monotonic() + self._settings.join_timeout_s
        with self._changed:
            while True:
                if self._is_closed:
                    raise StoreLostError("this node has left the rendezvous")
                entry, event = self._entry, self._event
                if entry is not None and entry.phase is Phase.OVER:
                    raise JobOverError(entry)
                self.check()
                if (
                    isinstance(event, Placed)
                    and event.entry.round >= round_
                    and event.entry == entry
                ):
                    return event
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
        what = f"round {round_} did not close within {self._settings.join_timeout_s:.0f} s"
        self.leave(Kind.LEFT, Cause("left", what, host=self._settings.arrival.host))
        raise JoinTimeoutError(what)

    # What the threads bring ------------------------------------------------------------------

    def _take(self, event: SessionEvent) -> None:
        """Handle an event, in the session's thread."""
        self._on_event(event)
        with self._changed:
            self._event = event
            if isinstance(event, Lost):
                self._lost = event.what
            else:
                self._record(event.entry)
            if isinstance(event, Placed):
                self._placed = event
                if event.assignment.group_rank == 0:
                    # Kept while rank 0 is here; the next round offers another.
                    self._in_use, self._offered = self._offered, PortReservation()
            elif not isinstance(event, (Opened, Over, Lost)):
                self._placed = None
            self._changed.notify_all()

    def _record(self, entry: Entry | None) -> None:
        if entry is not None and (self._entry is None or entry.seq >= self._entry.seq):
            self._entry = entry

    def _fence_s(self) -> float | None:
        """Return after how many seconds this node must stop unless the store answers."""
        confirmed = self._threads.confirmed_at
        if confirmed is None:
            return None
        limit_s = LEASES_TO_FENCE * self._settings.lease_s
        return confirmed + limit_s - self._clock.monotonic()
