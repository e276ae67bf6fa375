# SPDX-License-Identifier: Apache-2.0
"""Who is in the present round, read from the store on request by any node.

What `StoreRendezvous` is to the launcher's loop, this is to a caller that has threads to wait in:
`NodeClient` brings events, and whoever waits is woken. What goes wrong is one of torch's errors.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from nvidia_resiliency_ext.fault_tolerance._agent.rendezvous import RoundPorts
from nvidia_resiliency_ext.fault_tolerance._core.cause import Cause
from nvidia_resiliency_ext.fault_tolerance._core.errors import RDZV_SHUTDOWN_REASON_GRACEFUL
from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys, records
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import NodeClient, NodeSettings
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import arrived
from nvidia_resiliency_ext.fault_tolerance._rendezvous.keys import LEASES_TO_FENCE
from nvidia_resiliency_ext.fault_tolerance._rendezvous.session import (
    Lost,
    NodeSession,
    Opened,
    Over,
    Placed,
    SessionEvent,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import JobStore
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError

_LEFT = "this node has left the rendezvous"
FINAL = frozenset(
    {records.WorkerState.SUCCEEDED, records.WorkerState.FAILED, records.WorkerState.UNKNOWN}
)


@dataclass(frozen=True, slots=True)
class RoundMember:
    """One node of a round; `group_rank` is None for a spare, `state` is that of its workers."""

    arrival: records.Arrival
    group_rank: int | None
    state: records.WorkerState = records.WorkerState.HEALTHY


def read_members(store: JobStore, round_: int) -> list[RoundMember]:
    """Return the nodes of a closed round: those with a place by rank, then the spares.

    It costs one operation, and one more for each node.
    """
    messages = read_messages(store, round_)
    states = worker_states(messages)
    there = arrived(messages)
    members = []
    everybody = {
        n.node: n.arrival for n in messages if n.kind is records.Kind.ARRIVED and n.arrival
    }
    for node, arrival in everybody.items():
        text = store.peek(keys.assignment(node))
        place = None if text is None else records.decode(records.RankAssignment, text)
        rank = place.group_rank if place is not None and place.round == round_ else None
        if rank is not None or node in there:
            members.append(
                RoundMember(arrival, rank, states.get(node, records.WorkerState.HEALTHY))
            )
    return sorted(members, key=lambda member: (member.group_rank is None, member.group_rank or 0))


def read_messages(store: JobStore, round_: int) -> tuple[records.NodeMessage, ...]:
    """Return what nodes have sent the coordinator in a round, as far as it is this job's."""

    def read(line: str) -> records.NodeMessage:
        return records.decode(records.NodeMessage, line)

    return tuple(store.lines(keys.messages(round_), 0, read)[0])


def worker_states(messages: Iterable[records.NodeMessage]) -> dict[str, records.WorkerState]:
    """Return what is said of each node's workers; the first final word stays."""
    states: dict[str, records.WorkerState] = {}
    for message in messages:
        if states.get(message.node) in FINAL:
            continue
        if message.kind is records.Kind.STATE and message.state is not None:
            states[message.node] = message.state
        elif message.kind in (records.Kind.LEFT, records.Kind.UNHEALTHY):
            states[message.node] = records.WorkerState.UNKNOWN
    return states


LAST_WORDS_S = 3.0

_T = TypeVar("_T")


class Membership:
    """This node in the rounds. Methods may be called from any thread, `join` from one.

    Attributes:
        node: This node's identity.
        host: Its name for people.
        entry: The last decision that it knows; None before it has reached the store.
        placed: The last place that it had.
        has_left: Whether it has said that it takes part no longer.
    """

    def __init__(
        self,
        settings: NodeSettings,
        connect: Callable[[], JobStore],
        clock: Clock,
        on_event: Callable[[SessionEvent], None] = lambda _event: None,
    ) -> None:
        self._settings = settings
        self.node = settings.arrival.node
        self.host = settings.arrival.host
        self._clock = clock
        self._on_event = on_event
        # Guards what follows.
        self._changed = threading.Condition()
        self._event: SessionEvent | None = None
        self.entry: records.Entry | None = None
        self.placed: Placed | None = None
        self._joined_round: int | None = None
        self._lost = ""
        self.has_left = False
        self._is_closed = False
        self._ports = RoundPorts()
        self._client = NodeClient(settings, lambda _refused: connect(), self._take, clock)

    # Where the job stands --------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether there is no further round."""
        return self.entry is not None and self.entry.phase is records.Phase.OVER

    @property
    def is_next_round_open(self) -> bool:
        """Whether a round was opened after the last one that `join` gave this node a place in.

        It may have closed since: a node that was too slow for it must stop its workers, too.
        """
        entry, joined = self.entry, self._joined_round
        if entry is None or joined is None or entry.phase is records.Phase.OVER:
            return False
        return entry.round > joined

    def check(self) -> None:
        """Make sure that this node may go on. Raises RendezvousConnectionError."""
        if self._lost:
            raise RendezvousConnectionError(self._lost)
        fence_s = self._fence_s()
        if fence_s is not None and fence_s <= 0 and not self._is_closed:
            limit_s = LEASES_TO_FENCE * self._settings.lease_s
            raise RendezvousConnectionError(
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
            RendezvousGracefulExitError: the job ended well while this node had no place in it.
            RendezvousClosedError: there is no further round.
            RendezvousTimeoutError: a round that this node arrived in did not close in time.
            RendezvousConnectionError: the store is gone, or the nodes were started differently.
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

    def end(self, reason: str, cause: Cause | None = None) -> None:
        """End the job for everybody; the first reason stays."""
        self.ask(lambda session: session.end(reason, cause))

    def leave(self, kind: records.Kind, cause: Cause) -> None:
        """Say that this node takes part no longer."""
        arrival = self._settings.arrival
        self.ask(lambda session: session.send(kind, cause=cause, arrival=arrival))
        self.has_left = True

    def ask(self, command: Callable[[NodeSession], _T], timeout_s: float | None = None) -> _T:
        """Do `command` with the session, in its thread, and return what it returned.

        Raises:
            RendezvousConnectionError: the store is gone, or gives no answer in time.
        """
        answers: list[Future[_T]] = []

        def run(session: NodeSession) -> None:
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

        if self._is_closed:
            raise RendezvousConnectionError(_LEFT)
        self._client.submit(run)
        limit_s = self._settings.answer_timeout_s if timeout_s is None else timeout_s
        deadline = self._clock.monotonic() + limit_s
        with self._changed:
            while not answers:
                left_s = deadline - self._clock.monotonic()
                if self._lost or left_s <= 0:
                    late = f"the job's store gives no answer within {limit_s:.0f} s"
                    raise RendezvousConnectionError(self._lost or late)
                self._changed.wait(left_s)
        try:
            return answers[0].result()
        except NvrxError as error:
            raise RendezvousConnectionError(str(error)) from None

    def read(self, reader: Callable[[JobStore], _T]) -> _T:
        """Return what `reader` finds in the store."""
        return self.ask(lambda session: session.read(reader))

    def close(self) -> None:
        """Say goodbye and let everything go; the job goes on without this node, if it does."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        if not self._lost:
            self._client.say_goodbye()
        # Before the job is there the thread still waits for it, and ends by itself.
        self._client.close(LAST_WORDS_S if self.entry is not None and not self._lost else 0.0)
        self._ports.close()

    # Steps of joining ------------------------------------------------------------------------

    def _open_own_next(self) -> None:
        placed, entry = self.placed, self.entry
        if placed is None or entry is None:
            return
        if entry.phase is records.Phase.CLOSED and entry.round == placed.entry.round:
            what = f"host {self.host} began another rendezvous"
            cause, round_ = Cause("opened", what, host=self.host), entry.round
            self.ask(lambda session: session.open_next(round_, cause))

    def _arrive(self) -> tuple[int, bool]:
        """Offer this node; return the round, and whether it came in time for a place."""
        with self._changed:
            self.has_left = False
            self._ports.end_round()
            previous = self.placed.assignment.group_rank if self.placed is not None else None
        arrival = dataclasses.replace(
            self._settings.arrival, master_port=self._ports.offered, previous_rank=previous
        )

        def arrive(session: NodeSession) -> tuple[int, bool]:
            entry = session.entry
            assert entry is not None
            if entry.phase is records.Phase.OVER:
                raise self._over(entry)
            is_in_time = session.arrive(arrival)
            late = entry.phase is records.Phase.CLOSED and entry.active < self._settings.max_nodes
            if late and self._settings.grows:
                what = f"host {arrival.host} wants to work, too"
                session.open_next(entry.round, Cause("opened", what, host=arrival.host))
                # Not the round that it arrived in: that one is over.
            return entry.round, is_in_time

        if self.entry is None:
            try:
                return self.ask(arrive, self._settings.join_timeout_s)
            except RendezvousConnectionError as error:
                if self._lost:
                    raise
                raise RendezvousTimeoutError(
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
                    raise RendezvousConnectionError(_LEFT)
                entry, event = self.entry, self._event
                if entry is not None and entry.phase is records.Phase.OVER:
                    raise self._over(entry)
                self.check()
                if (
                    isinstance(event, Placed)
                    and event.entry.round >= round_
                    and event.entry == entry
                ):
                    return event
                if entry is not None and entry.round > round_ and entry.phase is records.Phase.OPEN:
                    return None
                is_closed = entry is not None and entry.phase is records.Phase.CLOSED
                left_s = deadline - self._clock.monotonic()
                if is_closed or not is_in_time:
                    self._changed.wait(self._fence_s())
                elif left_s > 0:
                    fence_s = self._fence_s()
                    self._changed.wait(left_s if fence_s is None else min(left_s, fence_s))
                else:
                    break
        what = f"round {round_} did not close within {self._settings.join_timeout_s:.0f} s"
        self.leave(records.Kind.LEFT, Cause("left", what, host=self.host))
        raise RendezvousTimeoutError(what)

    # What the threads bring ------------------------------------------------------------------

    def _take(self, event: SessionEvent) -> None:
        self._on_event(event)
        with self._changed:
            self._event = event
            if isinstance(event, Lost):
                self._lost = event.what
            else:
                self._record(event.entry)
            if isinstance(event, Placed):
                self.placed = event
                if event.assignment.group_rank == 0:
                    self._ports.take()
            elif not isinstance(event, (Opened, Over, Lost)):
                self.placed = None
            self._changed.notify_all()

    def _record(self, entry: records.Entry | None) -> None:
        if entry is not None and (self.entry is None or entry.seq >= self.entry.seq):
            self.entry = entry

    def _fence_s(self) -> float | None:
        """Return after how many seconds this node must stop unless the store answers."""
        fenced_at = self._client.fenced_at
        return None if fenced_at is None else fenced_at - self._clock.monotonic()

    def _over(self, entry: records.Entry) -> Exception:
        """Return how a caller learns that the job is over: a node without a place just goes."""
        why = f": {entry.cause.what}" if entry.cause is not None else ""
        text = f"the job is over ({entry.reason}){why}"
        if entry.reason == RDZV_SHUTDOWN_REASON_GRACEFUL and self.placed is None:
            return RendezvousGracefulExitError(text)
        return RendezvousClosedError(text)
