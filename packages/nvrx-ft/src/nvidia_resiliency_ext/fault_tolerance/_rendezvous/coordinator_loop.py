# SPDX-License-Identifier: Apache-2.0
"""The coordinator: waits for its notification key, reads messages, does what `decide` says.

It has a thread of its own, where the job's store is served or beside somebody else's store.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError

from . import agreement, coordinator, keys, records, restarts
from . import store as stores
from .log import DecisionLog, ResumeState, resume_state_from
from .placement import Placement, check_texts, summary
from .records import Entry, ForeignValueError, Kind, NodeMessage, Phase, RankAssignment
from .restarts import Denylist, is_named

logger = logging.getLogger("nvrx")

GOODBYE_WAIT_S = 3.0
# Nobody may still be about to read or write a decision as old as this: a node that was held up for
# two leases has given up by then.
KEEP_DECISIONS_S = 60.0


@dataclass(eq=False)
class Coordinator:
    """Decides the rounds of one job until it is over, in a thread of its own."""

    store: stores.JobStore  # A connection for this thread alone.
    rules: coordinator.CoordinatorRules
    _: KW_ONLY
    me: str  # Signs the decisions.
    epoch: str  # Which life of the store this is.
    clock: Clock
    is_controlled: bool = False  # Whether the store outlives the nodes.
    # Get a closed round and when nobody works in it any more, as `CoordinatorServices` takes that,
    # in the thread of the rounds: they must not wait. The second may be repeated.
    begins: Callable[..., None] = lambda *_, **__: None
    ended: Callable[[int, Cause | None], None] = lambda *_: None
    # Called with the cause when a node is lost, blamed, or has failed repeatedly.
    on_bad_node: Callable[[Cause], None] = lambda _: None
    # Hosts that get a place only if there are not enough others.
    denylist: Denylist = field(default_factory=Denylist)
    # Makes `run` return soon; for a host that goes before the job is over.
    stop: threading.Event = field(default_factory=threading.Event)
    entry: Entry = field(init=False)  # The last decision.

    def __post_init__(self) -> None:
        self._log = DecisionLog(self.store)
        self._keep_s = max(KEEP_DECISIONS_S, 2 * coordinator.expiry_s(self.rules))
        self._memory = coordinator.Memory()
        self._messages: list[NodeMessage] = []
        self._read_to = 0
        self._leases: dict[str, tuple[int, float]] = {}
        self._leases_at = -math.inf
        self._is_last_call = False
        self._opened_at: list[float] = []
        self._waits_for = ""
        self._reported: set[str] = set()
        self._announced: set[str] = set()
        self._entry_at = self._looked_at = self._looks_at = self.clock.monotonic()
        # A clock that is set meanwhile must not move what was read before.
        self._wall_ahead_s = self.clock.wall() - self._entry_at
        self._clocks: dict[str, agreement.Reading] = {}
        self._resuming_since: float | None = None
        # Written once, by whatever thread asks for the end.
        self._end_asked: tuple[str, Cause] | None = None
        first = Entry(
            seq=0,
            phase=Phase.OPEN,
            round=0,
            epoch=self.epoch,
            by=self.me,
            notify_from=self.rules.placement.min_nodes,
            is_controlled=self.is_controlled,
        )
        self._adopted = collections.deque([(0, self.clock.monotonic())])
        self.entry = self._log.add(first)
        self.store.put(keys.HEAD, str(self.entry.seq))

    def run(self) -> None:
        """Decide until the job is over and everybody knows, or `stop` is set.

        Raises StoreLostError, and ForeignValueError for another program's decision.
        """
        wake_at = self.clock.monotonic()
        while not self.stop.is_set() and self.entry.phase is not Phase.OVER:
            wait_s = min(coordinator.LOOK_AGAIN_S, wake_at - self.clock.monotonic())
            if wait_s > 0 and self.store.wait_until_set(keys.NOTIFY, wait_s):
                self.store.delete(keys.NOTIFY)
            self._looked_at, self._looks_at = self._looks_at, self.clock.monotonic()
            while (entry := self._log.next_after(self.entry.seq)) is not None:
                self._adopt(entry)
            asked = self._end_asked
            wake_at = self._act(self.entry.over(self.me, *asked) if asked else self._decide())
        if self.entry.phase is Phase.OVER:
            self._wait_for_goodbyes()

    def end_job(self, reason: str, cause: Cause) -> None:
        """End the job for everybody, within a second; from any thread. The first reason stays."""
        self._end_asked = self._end_asked or (reason, cause)

    def _adopt(self, entry: Entry) -> None:
        before, self.entry = self.entry, entry
        now = self._entry_at = self.clock.monotonic()
        goes_on = entry.phase is Phase.CLOSED and entry.round == before.round
        if before.phase is Phase.CLOSED and not goes_on:
            self.ended(before.round, entry.cause)
        self.store.put(keys.HEAD, str(entry.seq))
        self._adopted.append((entry.seq, now))
        while now - self._adopted[1][1] > self._keep_s:
            self.store.delete(keys.log(self._adopted.popleft()[0]))
        self._messages = [message for message in self._messages if message.kind is not Kind.RESUMED]
        if entry.round != before.round:
            if entry.round > 0:
                self._opened_at.append(now)
            self._read_messages_of(before.round)
            self._memory = coordinator.carried_over(self._memory, tuple(self._messages))
            self._messages, self._read_to = [], 0
            if self._memory.spares - self._leases.keys():
                self._leases_at = -math.inf  # They came just now, and are to be waited for.
            self._record_blame(entry)
            if entry.round > 1:
                for key in (keys.messages, keys.arrivals, keys.successes):
                    self.store.delete(key(entry.round - 2))

    def _record_blame(self, entry: Entry) -> None:
        cause, rules, now = entry.cause, self.rules.blame, self.clock.monotonic()
        if cause is None or not cause.host or cause.kind not in restarts.OF_THE_NODE:
            return
        if cause.kind == "node_lost":
            self.on_bad_node(cause)
        before = restarts.blamed(self._memory.failures, now, rules)
        failures = restarts.record_failure(self._memory.failures, cause.host, now, rules)
        self._memory.failures = failures
        if cause.host in restarts.blamed(failures, now, rules) - before:
            what = (
                f"host {cause.host} caused {rules.limit} restarts within {rules.window_s:g} s: "
                "it works only where there is no spare"
            )
            logger.warning("%s; the last one: %s", what, cause.what)
            detail = {"last": cause.what, "failures": rules.limit, "window_s": rules.window_s}
            self.on_bad_node(Cause("blamed", what, host=cause.host, detail=detail))

    def _read_messages_of(self, round_: int) -> None:
        new, self._read_to = self.store.lines(keys.messages(round_), self._read_to, _read_message)
        self._messages += new
        for message in new:
            arrival = message.arrival
            if message.kind is Kind.ARRIVED and arrival is not None and arrival.clock:
                # It has arrived since the last look.
                not_before, now = self._looked_at + self._wall_ahead_s, self.clock.monotonic()
                self._clocks[message.node] = agreement.read(
                    arrival.clock, not_before, now + self._wall_ahead_s
                )

    def _read_leases(self) -> None:
        began = self.clock.monotonic()
        known = {n.node for n in self._messages if n.kind is Kind.ARRIVED}
        known |= {member.node for member in self._memory.active} | self._memory.spares
        for node in known - self._leases.keys():
            # To read many counters waits for those that are missing; this makes them.
            self._leases[node] = (self.store.count(keys.lease(node), 0), self.clock.monotonic())
        self._forget_nodes(known, began)
        nodes = sorted(self._leases)
        if nodes:
            values = self.store.counters(map(keys.lease, nodes))
            # Not `began`: this host may be held up, and a node renew its lease, before the answer.
            now = self.clock.monotonic()
            for node, value in zip(nodes, values, strict=True):
                if self._leases[node][0] != value:
                    self._leases[node] = (value, now)
        self._leases_at = began

    def _forget_nodes(self, known: set[str], now: float) -> None:
        """Drop nodes that are long gone and of which nothing in the present round speaks."""
        limit = 2 * coordinator.expiry_s(self.rules)
        gone = {node for node, (_, at) in self._leases.items() if now - at > limit}
        for node in gone - known:
            del self._leases[node]
            self.store.delete(keys.lease(node))
            self.store.delete(keys.assignment(node))

    def _resume(self) -> bool:
        """Take the job up where its launchers say it stands; False when there is nothing to do."""
        state = resume_state_from(tuple(self._messages)) if self.entry.is_controlled else None
        is_new = self.entry.seq == 0
        if state is None or not (is_new or state.entry.round > self.entry.round):
            return False
        now, old = self.clock.monotonic(), state.entry
        if self._resuming_since is None:
            self._resuming_since = now
        missing = old.active - len(state.members)
        is_late = now - self._resuming_since >= coordinator.expiry_s(self.rules)
        # A round that other launchers have begun beside it cannot just be taken up.
        if is_new and old.phase is not Phase.OPEN and missing > 0 and not is_late:
            return True
        self._resuming_since = None
        self._opened_at = [now - age for age in old.restart_ages_s]
        if old.phase is Phase.OPEN:
            cause = old.cause or Cause("opened", "a round was open when the store was lost")
            self._reopen(old.round, cause)
        elif missing > 0:
            what = f"{missing} of {old.active} nodes were lost while the store was away"
            self._reopen(old.round + 1, Cause("node_lost", what, detected_by="lease"))
        elif not is_new:
            what = "the job had begun anew beside its own launchers"
            self._reopen(old.round + 1, Cause("opened", what))
        else:
            self._go_on(state)
        return True

    def _reopen(self, round_: int, cause: Cause) -> None:
        # Who knows the begin of the round before may not know its end.
        self.ended(round_ - 1, cause)
        self._create(self.entry.next(self.me, Phase.OPEN, round_, cause=cause))

    def _announce_named(self) -> None:
        for name, why in self.denylist.why.items():
            if name not in self._announced:
                self._announced.add(name)
                text = "attribution names bad nodes, which get no place in the next round: %s: %s"
                logger.warning(text, name, why)

    def _go_on(self, state: ResumeState) -> None:
        old, opened_at = state.entry, list(self._opened_at)
        # First: a node that comes back once more finds there that it was counted.
        places = {n.node: n.assignment for n in state.members if n.assignment is not None}
        self.store.put_all(
            {keys.assignment(n): records.encode(place) for n, place in places.items()}
        )
        own = self.entry
        closed = dataclasses.replace(
            old,
            seq=own.seq + 1,
            phase=Phase.CLOSED,
            by=self.me,
            epoch=own.epoch,
            notify_from=own.notify_from,
            is_controlled=own.is_controlled,
            clocks="",
        )
        if self._create(closed):
            # That the round is another one than here before is no restart.
            self._opened_at = opened_at
            arrivals = [n.arrival for n in state.members if n.arrival is not None]
            members = tuple(sorted(arrivals, key=lambda arrival: places[arrival.node].group_rank))
            self._memory.active, self._memory.spares = members, frozenset()
            self._memory.enough_since, self._memory.resumed_at = None, self.clock.monotonic()
            # First, so that what a spare said since, perhaps that it leaves, still holds.
            spares = [NodeMessage(Kind.ARRIVED, n.node, arrival=n.arrival) for n in state.spares]
            self._messages[:0] = [*spares, *state.gone]
            self._leases_at = -math.inf
            logger.info("round %d goes on: all its nodes have come back", old.round)
            self.begins(closed.round, members, goes_on=True)

    def _decide(self) -> coordinator.Decision:
        now = self.clock.monotonic()
        if self._is_last_call or now - self._leases_at >= self.rules.lease_s / 4:
            self._read_leases()
        self._read_messages_of(self.entry.round)
        if self._resume():
            return coordinator.Wait(now + coordinator.LOOK_AGAIN_S)
        self._announce_named()
        if self.entry.phase is Phase.OPEN:
            self._memory.excluded = frozenset(self.denylist.why)
        messages = tuple(self._messages)
        view = coordinator.View(
            self.rules,
            self._memory,
            now,
            entry=self.entry,
            messages=messages,
            quiet_s={node: now - at for node, (_, at) in self._leases.items()},
            entry_age_s=now - self._entry_at,
            me=self.me,
        )
        decision = coordinator.decide(view)
        if isinstance(decision, coordinator.Wait):
            self._record_wait(decision, now)
            for message in coordinator.losses(view):
                # The others cannot see leases, and may want to know.
                self.store.append_line(keys.messages(self.entry.round), records.encode(message))
        return decision

    def _record_wait(self, decision: coordinator.Wait, now: float) -> None:
        self._is_last_call = decision.is_last_call
        if self._memory.enough_since is None and decision.is_last_call:
            self._memory.enough_since = now
        if decision.why and decision.why != self._waits_for:
            logger.info("round %d: %s", self.entry.round, decision.why)
        self._waits_for = decision.why

    def _act(self, decision: coordinator.Decision) -> float:
        if isinstance(decision, coordinator.Wait):
            return decision.until
        if isinstance(decision, Placement):
            self._close_round(decision)
        else:
            self._create(decision)
        return self.clock.monotonic()

    def _close_round(self, placement: Placement) -> None:
        """Write the rank assignments; nodes that arrive from here on are spare nodes.

        Nodes learn from their place alone who is in the round, so there cannot be two views of it.
        """
        entry = self.entry
        there = coordinator.arrived(tuple(self._messages))
        *offsets, world_size = itertools.accumulate((n.nproc for n in placement.active), initial=0)
        self._clocks = {n: reading for n, reading in self._clocks.items() if n in there}
        off = agreement.off_by(self._clocks)
        self.store.put_all(
            {
                keys.assignment(one.node): records.encode(
                    RankAssignment(entry.round, rank, offset, round(off.get(one.node, 0.0), 3))
                )
                for rank, (one, offset) in enumerate(zip(placement.active, offsets, strict=True))
            }
        )
        first = placement.active[0]
        closed = entry.next(
            self.me,
            Phase.CLOSED,
            entry.round,
            active=len(placement.active),
            world_size=world_size,
            master_addr=first.addr,
            master_port=first.master_port,
            clocks=agreement.sentence((there[n].host or n, off_s) for n, off_s in off.items()),
        )
        if self._create(closed):
            self._memory.active = placement.active
            self._memory.gone -= there.keys()
            logger.info("round %d: %s", entry.round, summary(placement))
            self._report_named(placement)
            self._is_last_call = False
            # From here on nobody who works counts as lost only because nobody has looked.
            self._read_leases()
            waiting = (*placement.spare, *placement.excluded)
            self.begins(closed.round, placement.active, waiting)

    def _report_named(self, placement: Placement) -> None:
        """Log named nodes that work all the same, and report each named node once."""
        why = self.denylist.why
        for node in (*placement.active, *placement.spare, *placement.excluded):
            name = next((n for n in why if is_named(node.host, node.addr, [n])), None)
            if name is None or name not in self._memory.excluded:
                continue
            if node in placement.active:
                what = f"host {node.host} works although attribution names it: others are too few"
                logger.warning("round %d: %s", self.entry.round, what)
            if name not in self._reported:
                self._reported.add(name)
                what = f"attribution names host {node.host}: {why[name]}"
                self.on_bad_node(Cause("attribution", what, host=node.host))

    def _create(self, entry: Entry) -> bool:
        """Put a decision into the log; False when another stands there, which then holds."""
        window, now = self.rules.budget.window_s, self.clock.monotonic()
        ages = [now - at for at in self._opened_at if window is not None and now - at < window]
        entry = dataclasses.replace(entry, restart_ages_s=tuple(round(age, 3) for age in ages))
        stands = self._log.add(entry)
        self._adopt(stands)
        return records.encode(stands) == records.encode(entry)

    def _wait_for_goodbyes(self) -> None:
        """Keep the store until all known nodes have read how the job ended, 3 s at most."""
        now = self.clock.monotonic()
        deadline, limit = now + GOODBYE_WAIT_S, coordinator.expiry_s(self.rules)
        # Before the first round, or soon after another host had the job, others may be there.
        may_be_more = coordinator.may_have_more_nodes(self.rules, self._memory, now)
        all_known = bool(self._memory.active) and not may_be_more
        while not self.stop.is_set():
            try:
                self._read_messages_of(self.entry.round)
                said = {n.node for n in self._messages if n.kind in (Kind.GOODBYE, Kind.LEFT)}
                now = self.clock.monotonic()
                awaited = {n for n, (_, at) in self._leases.items() if now - at < limit}
                if (all_known and awaited <= said) or now >= deadline:
                    return
                if self.store.wait_until_set(keys.NOTIFY, deadline - now):
                    self.store.delete(keys.NOTIFY)
            except (StoreLostError, ForeignValueError):
                return


def _read_message(line: str) -> NodeMessage:
    message = records.decode(NodeMessage, line)
    if message.arrival is not None:
        if message.arrival.node != message.node:
            raise ForeignValueError(
                f"{message.node} speaks of the arrival of {message.arrival.node}"
            )
        try:
            check_texts(message.arrival)
        except ValueError as error:
            raise ForeignValueError(f"not an arrival: {error}") from None
    return message


@contextlib.contextmanager
def served_store(  # noqa: PLR0913 - named, and each of them a fact of its own
    listener: socket.socket,
    host: str,
    port: int,
    prefix: str,
    secret: bytes | None,
    *,
    nodes: int,
    timeout_s: float,
    says: Mapping[str, str],
) -> Iterator[stores.JobStore]:
    """Serve a job's store on `listener`, and connect to it within `timeout_s`.

    Without a `secret` for digests one is made, and left in the store; `says` stands there first.
    """
    server = stores.serve(listener, host, nodes)
    secret = secret or stores.agree_on_secret(server, prefix)
    own = stores.connect(host, port, prefix, secret, timeout_s)
    try:
        own.put_all(says)
        yield own
    finally:
        own.cut()
        del server


@dataclass(eq=False, repr=False)
class CoordinatorThread(threading.Thread):
    """Decides the job's rounds; it ends, and the store with it, when the job is over for all."""

    # Gives the job's store for as long as it is needed; used in the thread.
    store: Callable[[], contextlib.AbstractContextManager[stores.JobStore]]
    # Returns what decisions go by, once that is known; None: nothing will be decided.
    rules: Callable[[stores.JobStore, threading.Event], coordinator.CoordinatorRules | None]
    # Makes the `Coordinator` of a store and these rules; further fields of it are given here.
    coordinator: Callable[..., Coordinator]
    on_end: Callable[[], None] = lambda: None  # Called in the thread.

    def __post_init__(self) -> None:
        super().__init__(name="nvrx-store-host", daemon=True)
        self._end_asked = threading.Event()
        self._host: Coordinator | None = None
        self.problem = ""
        self.outcome: Entry | None = None

    def run(self) -> None:
        """Serve until the job is over. A failure is seen by all nodes: their store is gone."""
        try:
            self._serve()
        except NvrxError as error:
            # Its text alone: an exception keeps frames, and with them the store.
            self.problem = str(error)
            logger.error("nobody decides this job's rounds any more: %s", self.problem)  # noqa: TRY400
        except Exception as error:
            self.problem = f"a defect in the rendezvous host: {error!r}"
            logger.exception("a defect in the rendezvous host ended the job's store")
        finally:
            self.on_end()

    def stop(self) -> None:
        """End within a second, though the job may go on elsewhere."""
        self._end_asked.set()

    def end_job(self, reason: str, cause: Cause) -> None:
        """End the job for everybody; from any thread, and in vain before its first round."""
        if self._host is not None:
            self._host.end_job(reason, cause)

    def _serve(self) -> None:
        with self.store() as store:
            rules = self.rules(store, self._end_asked)
            if rules is None:
                return
            epoch = os.urandom(8).hex()
            self._host = self.coordinator(store, rules, epoch=epoch, stop=self._end_asked)
            self._host.run()
            entry = self._host.entry
            self.outcome = entry if entry.phase is Phase.OVER else None
