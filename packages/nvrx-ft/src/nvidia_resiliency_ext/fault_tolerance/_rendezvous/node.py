# SPDX-License-Identifier: Apache-2.0
"""One node's side of the rendezvous: follows the log of decisions, and adds to it.

`NodeSession` knows the steps and blocks; it has no thread and may be driven by a test or a
simulation. `NodeThreads` runs it beside a launcher's loop: one thread waits in the store for the
next decision, the other does everything else and keeps the lease alive.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from nvidia_resiliency_ext.fault_tolerance._infra.rdzv_reasons import RDZV_NO_RESTART_REASONS
from nvidia_resiliency_ext.fault_tolerance._launch.cause import Cause
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from . import keys
from .agreement import differences, read_settings, write_settings
from .host import LEASES_TO_EXPIRY
from .log import DecisionLog
from .records import (
    Arrival,
    Entry,
    ForeignValueError,
    Kind,
    Note,
    Phase,
    Place,
    WorkerState,
    decode,
    encode,
)
from .store import JobStore, StoreLostError

logger = logging.getLogger("nvrx")

# A healthy node costs the store a lease every few seconds; waiting anew must not add to that.
WATCH_WAIT_S = 600.0
FOREIGN_PAUSE_S = 0.5
ATTACH_TRIES = 20
ENTRY_TRIES = 3
CUT_WAIT_S = 1.0
# A store that was killed may take connections for some milliseconds more, and a client that comes
# in then leaves a thread that tries to connect for half a minute.
DYING_S = 0.1

# Notes about the round, and not about who is there.
_OF_A_ROUND = (Kind.STATE, Kind.PREEMPTED, Kind.HELD)

_T = TypeVar("_T")


# What a session tells ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """This node has a place in a closed round."""

    entry: Entry
    place: Place


@dataclass(frozen=True, slots=True)
class Spare:
    """The round closed without a place for this node; it waits for the next."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Opened:
    """Somebody else opened a round."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Leaves:
    """Ranks of the present round are to save and leave, at an agreed call once there is one."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Over:
    """The job is over for everybody."""

    entry: Entry

    @property
    def no_restart(self) -> bool:
        """Whether the job must not be started again."""
        return self.entry.reason in RDZV_NO_RESTART_REASONS


@dataclass(frozen=True, slots=True)
class Lost:
    """The store is gone, or others have taken this node's place; nothing more will be told."""

    what: str
    is_replaced: bool = False


News = Placed | Spare | Opened | Leaves | Over | Lost


class NodeSession:
    """The steps of one node, over a connection of one thread.

    Args:
        store: A connection for the calling thread alone.
        node: This node's identity, unique in the job.
        host: Its name for people.
    """

    def __init__(self, store: JobStore, node: str, host: str) -> None:
        self._store = store
        self._log = DecisionLog(store)
        self.node = node
        self._host = host
        self.entry: Entry | None = None
        # What the launcher knows, which may be less; None: whatever comes is new to it.
        self._told: Entry | None = None
        self._opened_round = -1
        self._ended_at = -1
        self._arrived_in: int | None = None
        self._arrival: Arrival | None = None
        self._place: Place | None = None
        # What was known when the store was lost, and what the launcher knew of it.
        self._resumes: tuple[Entry, Entry | None] | None = None
        # What this node said of the present round: another host has to be told again.
        self._said_in = -1
        self._said: dict[Kind, Note] = {}

    def attach(self, timeout_s: float) -> Entry:
        """Begin to live, and return where the job stands.

        Raises:
            StoreLostError: there is no job in the store in time.
        """
        self.renew_lease()
        missing = StoreLostError(f"the store holds no job after {timeout_s:.0f} s")
        if not self._store.wait_until_set(keys.HEAD, timeout_s):
            raise missing
        for _ in range(ATTACH_TRIES):
            try:
                entry = self._log.last_known()
            except ForeignValueError as error:
                self._store.report_foreign(error)
                entry = None
            if entry is not None:
                self.entry = self._told = entry
                return entry
            # The host puts right what somebody else has written over.
            self.ring()
            self._store.wait_until_set(keys.NEVER, FOREIGN_PAUSE_S)
        raise missing

    @property
    def told_seq(self) -> int:
        """The last decision of which the launcher knows."""
        return -1 if self._told is None else self._told.seq

    @property
    def is_resuming(self) -> bool:
        """Whether a new host has still to say how the job goes on."""
        return self._resumes is not None

    def resume(self, store: JobStore, timeout_s: float) -> News | None:
        """Go on over a new connection, to the same store or to one that knows nothing yet.

        Raises:
            StoreLostError: as `attach`.
        """
        # A store that goes while it is told of the one before leaves this as it was.
        old, told = self._resumes or (self._present(), self._told)
        self._resumes = old, told
        self._store, self._log = store, DecisionLog(store)
        present = self.attach(timeout_s)
        if present.epoch == old.epoch:
            self._resumes = None
            self.entry, self._told = old, told
            return None
        self._opened_round = self._ended_at = -1
        if present.seq > 0 or (old.phase is Phase.OPEN and old.round == 0):
            if present.phase is Phase.CLOSED:
                self._say_it_is_there(present.round)
            self._resumes = self._told = None
            return self.take(present)
        note = Note(Kind.RESUMED, self.node, arrival=self._arrival, entry=old, place=self._place)
        self._send(note, present.round)
        self.ring()
        return None

    def renew_lease(self) -> None:
        """Say that this node lives; when it returns, the store knows."""
        self._store.count(keys.lease(self.node), 1)

    def acknowledge(self) -> None:
        """Say that this node lives and has seen that a round was opened."""
        self._store.count(keys.lease(self.node), keys.ACKNOWLEDGED)

    def arrive(self, arrival: Arrival) -> bool:
        """Offer this node in the present round; False when that is closed, so it is a spare.

        Who is in a round is what the host found in its inbox when it closed it, and this node
        learns that from its place. The counter only wakes the host at the right time.
        """
        entry = self._present()
        self._arrival, self._place = arrival, None
        self._arrived_in = entry.round
        self._send(Note(Kind.ARRIVED, self.node, arrival=arrival), entry.round)
        if entry.phase is not Phase.OPEN:
            return False
        if self._store.count(keys.arrivals(entry.round), 1) >= entry.bell_from:
            self.ring()
        return True

    def take(self, entry: Entry) -> News | None:
        """Take note of a decision; return what it means for this node."""
        present, told = self._present(), self._told
        if told is not None and entry.seq <= told.seq:
            return None
        self._told = entry
        if entry.seq > present.seq:
            self.entry = entry
        resumes = None if self._resumes is None else self._resumes[0]
        self._resumes = None
        # No other host closes a round that it has not opened.
        is_taken_up = resumes is not None or (told is not None and told.round != entry.round)
        if is_taken_up and entry.phase is Phase.CLOSED and not self._works_in(entry):
            # What it told may have come too late, or to the inbox of another round.
            self._say_it_is_there(entry.round)
        if resumes is not None and entry.phase is Phase.CLOSED and entry.round == resumes.round:
            self._say_again(entry.round)
            return self._leaves(entry) if entry.follows(resumes) else None
        if told is not None and resumes is None and not entry.follows(told):
            return None
        if entry.phase is Phase.OVER:
            return None if entry.seq == self._ended_at else Over(entry)
        if entry.phase is Phase.OPEN:
            self.acknowledge()
            return None if entry.round <= self._opened_round else Opened(entry)
        if entry.is_leaving:
            return self._leaves(entry)
        return self._part_in(entry)

    def _leaves(self, entry: Entry) -> Leaves | None:
        """Return what a round that is left means for this node: nothing for a spare."""
        return Leaves(entry) if self._works_in(entry) else None

    def _works_in(self, entry: Entry) -> bool:
        return self._place is not None and self._place.round == entry.round

    def _part_in(self, entry: Entry) -> News:
        """Return this node's part in a closed round."""
        if self._arrived_in != entry.round:
            return Spare(entry)
        try:
            text = self._store.peek(keys.place(self.node))
            place = decode(Place, text) if text is not None else Place(entry.round)
        except ForeignValueError as error:
            self._store.report_foreign(error)
            what = f"what the store held as the place of host {self._host} was no place"
            cause = Cause("foreign_value", what, host=self._host, detected_by="rendezvous")
            self.tell(Kind.STATE, state=WorkerState.UNHEALTHY, cause=cause)
            return Spare(entry)
        if place.round != entry.round or place.group_rank is None:
            return Spare(entry)
        self._place = place
        return Placed(entry, place)

    def open_next(self, round_: int, cause: Cause) -> None:
        """Open the round after `round_`, unless that has happened or the job is over."""
        self._opened_round = max(self._opened_round, round_ + 1)
        self._decide(
            lambda now: dataclasses.replace(
                _blank(now), phase=Phase.OPEN, round=round_ + 1, cause=cause
            ),
            until=lambda now: now.phase is not Phase.CLOSED or now.round != round_,
        )

    def end(self, reason: str, cause: Cause | None) -> None:
        """End the job for everybody, unless it is over."""
        self._decide(
            lambda now: dataclasses.replace(
                _blank(now), phase=Phase.OVER, reason=reason, cause=cause
            ),
            until=lambda now: now.phase is Phase.OVER,
        )

    def tell(
        self,
        kind: Kind,
        *,
        state: WorkerState | None = None,
        cause: Cause | None = None,
        text: str = "",
        arrival: Arrival | None = None,
        calls: int = 0,
    ) -> None:
        """Leave a note for the host."""
        note = Note(
            kind, self.node, state=state, cause=cause, text=text, arrival=arrival, calls=calls
        )
        self._send(note, self._present().round)
        self.ring()

    def broken(self, round_: int, state: WorkerState, cause: Cause) -> None:
        """Say that workers failed in `round_`; what a round before has left means nothing now."""
        if self._is_in(round_):
            self.tell(Kind.STATE, state=state, cause=cause)

    def succeeded(self, round_: int) -> None:
        """Say that all workers of this node ended well in `round_`; the last one wakes the host."""
        if not self._is_in(round_):
            return
        self._send(Note(Kind.STATE, self.node, state=WorkerState.SUCCEEDED), round_)
        if self._store.count(keys.successes(round_), 1) >= self._present().active:
            self.ring()

    def read(self, reader: Callable[[JobStore], _T]) -> _T:
        """Return what `reader` finds in the store."""
        return reader(self._store)

    def ring(self) -> None:
        """Wake the host."""
        self._store.put(keys.BELL, "1")

    def _present(self) -> Entry:
        if self.entry is None:
            raise RuntimeError("attach first")
        return self.entry

    def _send(self, note: Note, round_: int) -> None:
        self._store.append_line(keys.inbox(round_), encode(note))
        if note.kind in _OF_A_ROUND:
            if round_ != self._said_in:
                self._said_in, self._said = round_, {}
            self._said[note.kind] = note

    def _say_it_is_there(self, round_: int) -> None:
        """Tell another host of a closed round that it has this node as a spare."""
        if self._arrival is not None:
            self._send(Note(Kind.ARRIVED, self.node, arrival=self._arrival), round_)
            self.ring()

    def _say_again(self, round_: int) -> None:
        """Tell another host what this node said of a round that goes on."""
        said = tuple(self._said.values()) if round_ == self._said_in else ()
        for note in said:
            if note.state is WorkerState.SUCCEEDED:
                self.succeeded(round_)
            else:
                self._send(note, round_)
        if said:
            self.ring()

    def _is_in(self, round_: int) -> bool:
        entry = self._present()
        return entry.phase is Phase.CLOSED and entry.round == round_

    def _decide(self, make: Callable[[Entry], Entry], *, until: Callable[[Entry], bool]) -> None:
        """Add to the log what `make` says, or follow it until `until` holds."""
        while not until(present := self._present()):
            wanted = dataclasses.replace(make(present), seq=present.seq + 1, by=self.node)
            self.entry = self._log.add(wanted)
            if wanted.phase is Phase.OVER and encode(self.entry) == encode(wanted):
                self._ended_at = wanted.seq
        self.ring()


def _blank(entry: Entry) -> Entry:
    """Return an entry without what holds for one decision only."""
    return dataclasses.replace(
        entry,
        cause=None,
        reason="",
        active=0,
        world_size=0,
        master_addr="",
        master_port=0,
        is_leaving=False,
        save_at=0,
        clocks="",
    )


class LeaseExpiredError(NvrxError):
    """This node was away for so long that the others have replaced it."""


_Command = Callable[[NodeSession], None]


@dataclass(frozen=True, slots=True)
class _Decided:
    number: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class _WatchEnded:
    number: int
    why: str


def _is_first(entry: Entry) -> bool:
    """Whether no round has been closed: the host can still refuse the job as a whole."""
    return entry.phase is Phase.OPEN and entry.round == 0


def _store_gone(error: StoreLostError) -> str:
    return f"the store host of the job is gone, or cannot be reached any more ({error})"


class NodeThreads:
    """Runs a session beside a loop. Commands return at once; news come through `post`.

    Both threads are daemons, and `close` cuts their connections: whatever they wait for then ends.

    Args:
        connect: Makes the connection; called in the thread, may take long, may raise NvrxError. It
            gets what to call whenever it is certain that nobody serves a store.
        node: This node's identity.
        host: Its name.
        post: Takes news, from any thread.
        clock: Where the time is read.
        lease_s: Seconds between signs of life.
        connect_timeout_s: How long the job may take to appear in the store.
        settings: What this node was started with, by flag.
    """

    def __init__(  # noqa: PLR0913 - named, and each of them a fact of its own
        self,
        connect: Callable[[Callable[[], None]], JobStore],
        *,
        node: str,
        host: str,
        post: Callable[[News], None],
        clock: Clock,
        lease_s: float,
        connect_timeout_s: float,
        settings: dict[str, str],
    ) -> None:
        self._connect = connect
        self._node = node
        self._host = host
        self._post = post
        self._clock = clock
        self._lease_s = lease_s
        self._connect_timeout_s = connect_timeout_s
        self._settings = settings
        self._commands: queue.SimpleQueue[_Command | _Decided | _WatchEnded | None]
        self._commands = queue.SimpleQueue()
        self._held: collections.deque[_Command] = collections.deque()
        self._watch_number = 0
        self._confirmed_at: float | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._stores: list[JobStore] = []
        self._mismatch = ""
        self._is_controlled: bool | None = None
        self._watcher: threading.Thread | None = None
        self._worker = threading.Thread(target=self._work, name="nvrx-rendezvous", daemon=True)
        self._worker.start()

    @property
    def confirmed_at(self) -> float | None:
        """When the last lease that the store confirmed was sent (monotonic s); None before."""
        return self._confirmed_at

    def submit(self, command: _Command) -> None:
        """Do `command` in the session's thread, after those before it."""
        self._commands.put(command)

    def close(self, timeout_s: float) -> None:
        """End the session; what was submitted before is still done, `timeout_s` long."""
        self._commands.put(None)
        self._worker.join(timeout_s)
        self._ended.set()
        self._cut()
        for thread in (self._worker, self._watcher):
            if thread is not None:
                thread.join(CUT_WAIT_S)

    def _work(self) -> None:
        """Run; that it ends is news, whatever the reason."""
        try:
            self._live()
        except StoreLostError as error:
            self._tell_lost(_store_gone(error))
        except NvrxError as error:
            self._tell_lost(str(error), is_replaced=isinstance(error, LeaseExpiredError))
        except Exception as error:
            logger.exception("a defect in the rendezvous of this node")
            self._tell_lost(f"the rendezvous of this node failed: {error!r}")

    def _live(self) -> None:
        session = self._begin()
        while True:
            try:
                self._serve(session)
            except StoreLostError as error:
                self._wait_for_another(session, error)
            else:
                return

    def _tell_lost(self, what: str, *, is_replaced: bool = False) -> None:
        if not self._ended.is_set():
            self._post(Lost(what, is_replaced))

    def _keep(self, store: JobStore) -> JobStore:
        """Note a connection, so that `close` can cut it."""
        with self._lock:
            if not self._ended.is_set():
                self._stores.append(store)
                return store
        store.cut()
        raise StoreLostError("this node's part is over")

    def _cut(self) -> None:
        """End all connections, and with them what waits."""
        with self._lock:
            stores, self._stores = self._stores, []
        for store in stores:
            store.cut()

    def _begin(self) -> NodeSession:
        """Enter the job; a store that goes meanwhile is waited for where it may come back."""
        deadline = self._clock.monotonic() + self._connect_timeout_s
        for tries in itertools.count(1):
            store = self._keep(self._connect(lambda: None))
            try:
                return self._enter(store)
            except StoreLostError as error:
                may_come_back = self._is_controlled
                if may_come_back is None:
                    # It did not live long enough to be asked.
                    may_come_back = tries < ENTRY_TRIES
                is_late = self._clock.monotonic() >= deadline
                if not may_come_back or is_late or self._ended.is_set():
                    raise
                logger.warning("%s; waiting for it to come back", _store_gone(error))
                self._cut()
                self._ended.wait(DYING_S)
        raise AssertionError("unreachable")

    def _enter(self, store: JobStore) -> NodeSession:
        session = NodeSession(store, self._node, self._host)
        self._renew(session)
        different = self._differences(store)
        entry = session.attach(self._connect_timeout_s)
        if different:
            session.tell(Kind.MISMATCH, text=different)
            if not _is_first(entry):
                raise NvrxError(different)
            self._mismatch = different
        if entry.phase is Phase.OVER:
            self._post(Over(entry))
        else:
            self._start_watch(store, entry.seq)
        return session

    def _start_watch(self, store: JobStore, seq: int) -> None:
        self._watch_number += 1
        watched, number = self._keep(store.another()), self._watch_number

        def watch() -> None:
            try:
                self._watch(watched, seq, number)
            except StoreLostError as error:
                self._commands.put(_WatchEnded(number, str(error)))
            except Exception as error:
                logger.exception("a defect in the rendezvous of this node")
                self._commands.put(_WatchEnded(number, repr(error)))

        self._watcher = threading.Thread(target=watch, name="nvrx-rendezvous-watch", daemon=True)
        self._watcher.start()

    def _serve(self, session: NodeSession) -> None:
        """Do what is asked for, one thing after the other, and keep the lease alive.

        What the store did not survive is done again when there is another one.

        Raises:
            StoreLostError: the store is gone.
            LeaseExpiredError: this node was away for too long.
        """
        # However long it took to come here.
        self._renew(session)
        next_lease = self._clock.monotonic() + self._lease_period()
        while True:
            self._check_lease(session)
            is_due = next_lease <= self._clock.monotonic()
            if self._held and not session.is_resuming and not is_due:
                self._held[0](session)
                self._held.popleft()
                continue
            wait_s = next_lease - self._clock.monotonic()
            if wait_s <= 0:
                self._renew(session)
                next_lease = self._clock.monotonic() + self._lease_period()
                continue
            try:
                command = self._commands.get(timeout=wait_s)
            except queue.Empty:
                continue
            if command is None:
                return
            self._check_lease(session)
            if isinstance(command, _Decided):
                # What an earlier watch has heard is of a store that is gone.
                if command.number == self._watch_number:
                    self._take(session, command.entry)
            elif isinstance(command, _WatchEnded):
                if command.number == self._watch_number:
                    raise StoreLostError(command.why)
            else:
                self._held.append(command)

    def _wait_for_another(self, session: NodeSession, error: StoreLostError) -> None:
        """Connect again, where the store may come back: one that a control plane serves.

        Raises:
            StoreLostError: it does not come back.
        """
        if session.entry is None or not session.entry.is_controlled or self._ended.is_set():
            raise error
        while True:
            logger.warning("%s; going on, and waiting for it to come back", _store_gone(error))
            self._cut()
            self._ended.wait(DYING_S)
            store = self._keep(self._connect(self._store_is_absent))
            try:
                self._resume(session, store)
            except StoreLostError as lost_again:
                if self._ended.is_set():
                    raise
                error = lost_again
            else:
                logger.info("the store is back")
                return

    def _resume(self, session: NodeSession, store: JobStore) -> None:
        """Go on with another store.

        Raises:
            StoreLostError: it is gone again.
        """
        self._renew_over(store)
        store.create(keys.SETTINGS, write_settings(self._host, self._settings))
        news = session.resume(store, self._connect_timeout_s)
        self._confirmed_at = self._clock.monotonic()
        if news is not None:
            self._post(news)
        self._start_watch(store, session.told_seq)

    def _renew_over(self, store: JobStore) -> None:
        store.count(keys.lease(self._node), 1)

    def _store_is_absent(self) -> None:
        """Take note that nobody serves a store: then nobody can have replaced this node either."""
        self._confirmed_at = self._clock.monotonic()

    def _check_lease(self, session: NodeSession) -> None:
        """Never renew a lease that has expired, though the store would take it.

        A node that was stopped would else be a spare, or in the way of its replacement, or end,
        by which of its threads comes first.
        """
        confirmed = self._confirmed_at
        if confirmed is None or (session.entry and session.entry.phase is Phase.OVER):
            return
        quiet_s = self._clock.monotonic() - confirmed
        if quiet_s >= LEASES_TO_EXPIRY * self._lease_s:
            raise LeaseExpiredError(
                f"this node gave no sign of life for {quiet_s:.1f} s;"
                " it ends, for the others may have replaced it"
            )

    def _lease_period(self) -> float:
        # Spread, so that thousands of nodes do not speak in the same instant.
        return self._lease_s * random.uniform(0.95, 1.1)  # noqa: S311

    def _renew(self, session: NodeSession) -> None:
        sent_at = self._clock.monotonic()
        session.renew_lease()
        self._confirmed_at = sent_at

    def _differences(self, store: JobStore) -> str:
        """Leave this launcher's settings if it is the first; say how they differ from others'."""
        own = write_settings(self._host, self._settings)
        of_control = store.peek(keys.CONTROL_SETTINGS)
        self._is_controlled = of_control is not None
        others = [store.create(keys.SETTINGS, own), of_control]
        different = [
            sentence
            for text in others
            if text is not None
            for sentence in differences(self._settings, self._host, read_settings(text))
        ]
        if not different:
            return ""
        return f"launchers were started differently: {'; '.join(different)}"

    def _watch(self, store: JobStore, seq: int, number: int) -> None:
        """Wait for one decision after the other and hand it to the session's thread."""
        log = DecisionLog(store)
        while not self._ended.is_set():
            try:
                entry = log.wait_for(seq + 1, WATCH_WAIT_S)
            except ForeignValueError as error:
                # The host puts a decision in its place.
                store.report_foreign(error)
                store.put(keys.BELL, "1")
                self._ended.wait(FOREIGN_PAUSE_S)
                continue
            if entry is None:
                continue
            seq = entry.seq
            self._commands.put(_Decided(number, entry))
            if entry.phase is Phase.OVER:
                return

    def _take(self, session: NodeSession, entry: Entry) -> None:
        if self._mismatch and entry.phase is not Phase.OVER and not _is_first(entry):
            raise NvrxError(self._mismatch)
        news = session.take(entry)
        if news is not None:
            self._post(news)
