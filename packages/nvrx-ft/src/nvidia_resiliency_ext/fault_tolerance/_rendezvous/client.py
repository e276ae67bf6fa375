# SPDX-License-Identifier: Apache-2.0
"""The client of the rendezvous: one thread waits for decisions, one runs the node's session."""

from __future__ import annotations

import collections
import itertools
import logging
import queue
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError

from . import keys
from .agreement import differences, read_settings, write_settings
from .keys import LEASES_TO_EXPIRY, LEASES_TO_FENCE
from .log import DecisionLog
from .records import Arrival, Entry, Kind, Phase
from .session import Lost, NodeSession, Over, SessionEvent
from .store import JobStore, NoJobError

logger = logging.getLogger("nvrx")

# A healthy node costs the store a lease every few seconds; waiting anew must not add to that.
# A wait that ends in vain is one line in the log where the store's client is torch's.
WATCH_WAIT_S = 86400.0
ENTRY_TRIES = 3
CUT_WAIT_S = 1.0
# A store that was killed may take connections for some milliseconds more, and a client that comes
# in then leaves a thread that tries to connect for half a minute.
DYING_S = 0.1


class LeaseExpiredError(NvrxError):
    """This node was away for so long that the others have replaced it."""


_Command = Callable[[NodeSession], None]


@dataclass(frozen=True, slots=True)
class _Order:
    do: _Command
    at_once: bool = False
    is_urgent: bool = False  # Done also before a new host has said how the job goes on.


def _is_first(entry: Entry) -> bool:
    """Return whether no round was closed yet: the coordinator can still refuse the whole job."""
    return entry.phase is Phase.OPEN and entry.round == 0


def _store_gone(error: StoreLostError) -> str:
    if isinstance(error, NoJobError):
        return str(error)
    return f"the rendezvous host of the job is gone or does not answer ({error})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Properties of this node in the job, and its timeouts in seconds."""

    arrival: Arrival  # Sent to the coordinator once port, clock and earlier rank are filled in.
    lease_s: float  # The longest time between two renewals of the lease.
    join_timeout_s: float = 0.0  # How long to wait until an open round closes.
    connect_timeout_s: float  # How long to wait until the store has the job.
    must_agree: Mapping[str, str] = field(default_factory=dict)  # By flag; equal on all nodes.
    answer_timeout_s: float = 0.0  # How long to wait for an answer of the store.
    master_port: int | None = None  # MASTER_PORT of every round; None: rank 0 reserves a new one.
    domain: Callable[[], str] = lambda: "none"  # Finds the NVLink domain, which may take long.
    # Returns why this node must not take part in a round, or None.
    unfit_in: Callable[[int], Cause | None] = lambda _round: None
    grows: bool = False  # Whether a late node opens the next round, up to `max_nodes` nodes.
    max_nodes: int = 1
    where: str = ""  # The rendezvous endpoint in words, for messages.


class NodeClient:
    """Runs a session beside a caller. Commands return at once; events come through `post`.

    Both threads are daemons, and `close` cuts their connections: whatever they wait for then ends.
    `post` takes events from either. `connect` is called in the thread, may take long and raise
    NvrxError; it gets what to call whenever it is certain that nobody serves a store.
    """

    def __init__(
        self,
        settings: NodeSettings,
        connect: Callable[[Callable[[], None]], JobStore],
        post: Callable[[SessionEvent], None],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._connect = connect
        self._post = post
        self._clock = clock
        self._commands: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._held: collections.deque[_Command] = collections.deque()
        self._watch_number = 0
        self.confirmed_at: float | None = None
        """When the last lease that the store confirmed was sent (monotonic s); None before."""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._stores: list[JobStore] = []
        self._mismatch = ""
        self._is_controlled: bool | None = None
        self._watcher: threading.Thread | None = None
        self._worker = threading.Thread(target=self._work, name="nvrx-rendezvous", daemon=True)
        self._worker.start()

    @property
    def fenced_at(self) -> float | None:
        """When this node must stop unless the store answers until then; None before the first."""
        confirmed = self.confirmed_at
        return None if confirmed is None else confirmed + LEASES_TO_FENCE * self._settings.lease_s

    def submit(self, command: _Command, *, is_urgent: bool = False) -> None:
        """Do `command` in the session's thread, after those before it.

        An `is_urgent` one, such as a departure notice, does not wait for a new host's decision.
        """
        self._commands.put(_Order(command, is_urgent=is_urgent))

    def close(self, timeout_s: float) -> None:
        """End the session; what was submitted before is still done, `timeout_s` long."""
        self._commands.put(None)
        self._worker.join(timeout_s)
        self._ended.set()
        self._cut()
        for thread in (self._worker, self._watcher):
            if thread is not None:
                thread.join(CUT_WAIT_S)
        # An error that nobody takes any more holds the frames of its thread, and they hold this.
        self._commands = queue.SimpleQueue()

    def _work(self) -> None:
        try:
            self._live()
        except StoreLostError as error:
            self._report_lost(_store_gone(error))
        except NvrxError as error:
            self._report_lost(str(error), is_replaced=isinstance(error, LeaseExpiredError))
        except Exception as error:
            logger.exception("a defect in the rendezvous of this node")
            self._report_lost(f"the rendezvous of this node failed: {error!r}")

    def _live(self) -> None:
        """Serve one store after the other, where one that goes may come back."""
        deadline = self._clock.monotonic() + self._settings.connect_timeout_s
        session: NodeSession | None = None
        for tries in itertools.count(1):
            store = self._keep(self._connect(self._store_is_absent))
            try:
                if session is None:
                    session = self._enter(store)
                else:
                    self._resume(session, store)
                self._serve(session)
            except StoreLostError as error:
                is_late = self._clock.monotonic() >= deadline
                if not self._may_come_back(session, tries, is_late=is_late):
                    raise
                goes_on = "" if session is None else "going on, and "
                logger.warning("%s; %swaiting for it to come back", _store_gone(error), goes_on)
                self._cut()
                self._ended.wait(DYING_S)
            else:
                return
            finally:
                store.close()

    def _may_come_back(self, session: NodeSession | None, tries: int, *, is_late: bool) -> bool:
        """Return whether another store may follow this lost one, as under a control plane."""
        if self._ended.is_set():
            return False
        if session is not None:
            return session.entry.is_controlled
        if self._is_controlled is None:
            # This store was lost before it could be asked.
            return not is_late and tries < ENTRY_TRIES
        return not is_late and self._is_controlled

    def _report_lost(self, what: str, *, is_replaced: bool = False) -> None:
        if not self._ended.is_set():
            self._post(Lost(what, is_replaced))

    def _keep(self, store: JobStore) -> JobStore:
        """Record a connection, so that `close` can cut it."""
        with self._lock:
            if not self._ended.is_set():
                self._stores.append(store)
                return store
        store.cut()
        raise StoreLostError("this node's part is over")

    def _cut(self) -> None:
        with self._lock:
            stores, self._stores = self._stores, []
        for store in stores:
            store.cut()

    def _enter(self, store: JobStore) -> NodeSession:
        arrival, timeout_s = self._settings.arrival, self._settings.connect_timeout_s
        different = self._differences(store)
        session = NodeSession(store, arrival.node, arrival.host, timeout_s)
        entry = session.entry
        if different:
            session.send(Kind.MISMATCH, text=different)
            if not _is_first(entry):
                raise NvrxError(different)
            self._mismatch = different
        if entry.phase is Phase.OVER:
            self._post(Over(entry))
        else:
            self._start_watch(store, entry.seq)
        return session

    def _start_watch(self, store: JobStore, seq: int) -> None:
        """Wait for one decision after the other in a thread, and hand it to the session's."""
        self._watch_number += 1
        watched, number = self._keep(store.another()), self._watch_number
        log = DecisionLog(watched)

        def hand_over(what: Entry | NvrxError) -> None:
            def take(session: NodeSession) -> None:
                nonlocal what
                if number != self._watch_number:
                    return  # That store is gone.
                if isinstance(what, NvrxError):
                    try:
                        raise what
                    finally:
                        del what  # The frames of an error must not hold it.
                self._take(session, what)

            self._commands.put(_Order(take, at_once=True))

        def watch() -> None:
            known, is_over = seq, False
            try:
                while not is_over and not self._ended.is_set():
                    entry = log.wait_for(known + 1, WATCH_WAIT_S)
                    if entry is not None:
                        known, is_over = entry.seq, entry.phase is Phase.OVER
                        hand_over(entry)
            except NvrxError as error:
                hand_over(error)
            except Exception as error:
                logger.exception("a defect in the rendezvous of this node")
                hand_over(NvrxError(f"the rendezvous of this node failed: {error!r}"))
            finally:
                watched.close()

        self._watcher = threading.Thread(target=watch, name="nvrx-rendezvous-watch", daemon=True)
        self._watcher.start()

    def _serve(self, session: NodeSession) -> None:
        """Run commands in order, again after a lost store, and keep the lease alive."""
        # At once where that was not done in this job.
        confirmed, next_lease = self.confirmed_at, self._clock.monotonic()
        if confirmed is not None:
            next_lease = confirmed + self._lease_period()
        while True:
            self._check_lease(session)
            wait_s = next_lease - self._clock.monotonic()
            if wait_s <= 0:
                self._renew(session)
                next_lease = self._clock.monotonic() + self._lease_period()
                continue
            if self._held and not session.is_resuming:
                self._held[0](session)  # It stays first if the store does not survive it.
                self._held.popleft()
                continue
            try:
                order = self._commands.get(timeout=wait_s)
            except queue.Empty:
                continue
            if order is None:
                return
            self._check_lease(session)
            if order.at_once or (order.is_urgent and session.is_resuming):
                order.do(session)
            else:
                self._held.append(order.do)

    def _resume(self, session: NodeSession, store: JobStore) -> None:
        self._check_lease(session)
        self._first_settings(store)
        event = session.resume(store, self._settings.connect_timeout_s)
        self._renew(session)
        if event is not None:
            self._post(event)
        self._start_watch(store, session.notified_seq)
        logger.info("the store is back")

    def _store_is_absent(self) -> None:
        """Record that nobody serves a store: then nobody can have replaced this node either."""
        if self.confirmed_at is not None:
            self.confirmed_at = self._clock.monotonic()

    def _check_lease(self, session: NodeSession) -> None:
        """Raise if the lease has expired: the store would renew it, but the node may be lost."""
        confirmed = self.confirmed_at
        if confirmed is None or session.entry.phase is Phase.OVER:
            return
        quiet_s = self._clock.monotonic() - confirmed
        if quiet_s >= LEASES_TO_EXPIRY * self._settings.lease_s:
            raise LeaseExpiredError(
                f"this node gave no sign of life for {quiet_s:.1f} s;"
                " it ends, for the others may have replaced it"
            )

    def _lease_period(self) -> float:
        # Spread, so that thousands of nodes do not speak in the same instant.
        return self._settings.lease_s * random.uniform(0.95, 1.1)  # noqa: S311

    def _renew(self, session: NodeSession) -> None:
        sent_at = self._clock.monotonic()
        session.renew_lease()
        self.confirmed_at = sent_at

    def _differences(self, store: JobStore) -> str:
        """Publish this launcher's settings if none are there; describe how others' differ."""
        of_control = store.peek(keys.CONTROL_SETTINGS)
        self._is_controlled = of_control is not None
        own, host = self._settings.must_agree, self._settings.arrival.host
        different = differences(own, host, self._first_settings(store))
        if of_control is not None:
            different += differences(own, host, read_settings(of_control))
        return f"launchers were started differently: {'; '.join(different)}" if different else ""

    def _first_settings(self, store: JobStore) -> dict[str, str]:
        """Publish this launcher's settings if none are there; return those of the first launcher.

        Raises ForeignValueError: this launcher has another token than the job.
        """
        own = write_settings(self._settings.arrival.host, self._settings.must_agree)
        return read_settings(store.create(keys.SETTINGS, own))

    def _take(self, session: NodeSession, entry: Entry) -> None:
        if self._mismatch and entry.phase is not Phase.OVER and not _is_first(entry):
            raise NvrxError(self._mismatch)
        event = session.take(entry)
        if event is not None:
            self._post(event)
