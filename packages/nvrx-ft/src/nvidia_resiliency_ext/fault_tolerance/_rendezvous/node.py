# SPDX-License-Identifier: Apache-2.0
"""One node's side of the rendezvous: follows the log of decisions, and adds to it.

`NodeSession` knows the steps and blocks; it has no thread and may be driven by a test or a
simulation. `NodeThreads` runs it beside a launcher's loop: one thread waits in the store for the
next decision, the other does everything else and keeps the lease alive.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance._infra.rdzv_reasons import RDZV_NO_RESTART_REASONS
from nvidia_resiliency_ext.fault_tolerance._launch.decide import Cause
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from . import keys
from .agreement import differences, read_settings, write_settings
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
    decode_entry,
    encode,
)
from .store import JobStore, StoreLostError

logger = logging.getLogger("nvrx")

# A healthy node costs the store a lease every few seconds; waiting anew must not add to that.
WATCH_WAIT_S = 600.0
FOREIGN_PAUSE_S = 0.5
CREATE_TRIES = 50
# A store that was killed may take connections for some milliseconds more, and torch then tries to
# connect for half a minute, in which nobody hears that the machine refuses.
DYING_S = 0.1


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
    """The store is gone; nothing more will be told."""

    what: str


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
        self.node = node
        self._host = host
        self.entry: Entry | None = None
        self._arrived_in: int | None = None
        self._arrival: Arrival | None = None
        self._place: Place | None = None
        self._succeeded_in: int | None = None
        self._resumes: Entry | None = None

    def attach(self, timeout_s: float) -> Entry:
        """Begin to live, and return where the job stands.

        Raises:
            StoreLostError: there is no job in the store in time.
        """
        self.renew_lease()
        head = self._store.wait_for(keys.HEAD, timeout_s)
        if head is None or not head.isdigit():
            raise StoreLostError(f"the store holds no job after {timeout_s:.0f} s")
        text = self._store.wait_for(keys.log(int(head)), timeout_s)
        if text is None:
            raise StoreLostError(f"decision {head} of the job is missing in the store")
        self.entry = decode(Entry, text)
        return self.entry

    @property
    def is_resuming(self) -> bool:
        """Whether a new host has still to say how the job goes on."""
        return self._resumes is not None

    def resume(self, store: JobStore, timeout_s: float) -> News | None:
        """Go on over a new connection, to the same store or to one that knows nothing yet.

        Raises:
            StoreLostError: as `attach`.
        """
        old = self._present()
        self._store = store
        present = self.attach(timeout_s)
        if present.epoch == old.epoch:
            self.entry = old
            return None
        if present.seq > 0 or (old.phase is Phase.OPEN and old.round == 0):
            self.entry = dataclasses.replace(present, seq=-1)
            return self.take(present)
        self._resumes = old
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

        Who is in a round is what the host found in its inbox when it closed it; this node learns
        that from its place. The counter only wakes the host at the right time.
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
        present = self._present()
        if entry.seq <= present.seq:
            return None
        self.entry = entry
        resumes, self._resumes = self._resumes, None
        if resumes is not None and entry.phase is Phase.CLOSED and entry.round == resumes.round:
            if self._succeeded_in == entry.round:
                self.succeeded()
            return None
        if entry.phase is Phase.OVER:
            return Over(entry)
        if entry.phase is Phase.OPEN:
            self.acknowledge()
            return Opened(entry)
        if entry.is_leaving:
            works = self._place is not None and self._place.round == entry.round
            return Leaves(entry) if works else None
        if self._arrived_in != entry.round:
            return Spare(entry)
        text = self._store.peek(keys.place(self.node))
        place = decode(Place, text) if text is not None else Place(entry.round)
        if place.round != entry.round or place.group_rank is None:
            return Spare(entry)
        self._place = place
        return Placed(entry, place)

    def open_next(self, round_: int, cause: Cause) -> None:
        """Open the round after `round_`, unless that has happened or the job is over."""
        entry = self._present()
        if entry.phase is Phase.CLOSED and entry.round == round_:
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

    def succeeded(self) -> None:
        """Say that all workers of this node ended well; the last one wakes the host."""
        entry = self._present()
        self._succeeded_in = entry.round
        self._send(Note(Kind.STATE, self.node, state=WorkerState.SUCCEEDED), entry.round)
        if self._store.count(keys.successes(entry.round), 1) >= entry.active:
            self.ring()

    def ring(self) -> None:
        """Wake the host."""
        self._store.put(keys.BELL, "1")

    def _present(self) -> Entry:
        if self.entry is None:
            raise RuntimeError("attach first")
        return self.entry

    def _send(self, note: Note, round_: int) -> None:
        self._store.append_line(keys.inbox(round_), encode(note))

    def _decide(self, make: Callable[[Entry], Entry], *, until: Callable[[Entry], bool]) -> None:
        """Add to the log what `make` says, or follow it until `until` holds."""
        for _ in range(CREATE_TRIES):
            present = self._present()
            if until(present):
                break
            wanted = dataclasses.replace(make(present), seq=present.seq + 1, by=self.node)
            try:
                stands = self._store.create(keys.log(wanted.seq), encode(wanted))
            except ForeignValueError as error:
                self._store.report_foreign(error)
                self._store.delete(keys.log(wanted.seq))
                continue
            self.entry = decode(Entry, stands)
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
    )


_Command = Callable[[NodeSession], None]


@dataclass(frozen=True, slots=True)
class _Decided:
    entry: Entry


@dataclass(frozen=True, slots=True)
class _WatchEnded:
    number: int
    why: str


def _store_gone(error: StoreLostError) -> str:
    return f"the store host of the job is gone, or cannot be reached any more ({error})"


class NodeThreads:
    """Runs a session beside a loop. Commands return at once; news come through `post`.

    Both threads are daemons: one may wait in the store, where only the end of the job or of the
    connection reaches it.

    Args:
        connect: Makes the connection; called in the thread, may take long, may raise NvrxError. It
            gets what to call whenever it is certain that nobody serves a store.
        node: This node's identity.
        host: Its name.
        post: Takes news, from any thread.
        clock: Where the time is read.
        lease_s: Seconds between signs of life.
        connect_timeout_s: How long the job may take to appear in the store.
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

    def _work(self) -> None:
        try:
            session = self._begin()
            while True:
                try:
                    self._serve(session)
                except StoreLostError as error:
                    self._wait_for_another(session, error)
                else:
                    return
        except StoreLostError as error:
            self._post(Lost(_store_gone(error)))
        except NvrxError as error:
            self._post(Lost(str(error)))

    def _begin(self) -> NodeSession:
        store = self._connect(lambda: None)
        session = NodeSession(store, self._node, self._host)
        self._renew(session)
        different = self._differences(store)
        entry = session.attach(self._connect_timeout_s)
        if different:
            session.tell(Kind.MISMATCH, text=different)
            if entry.round > 0:
                raise NvrxError(different)
        self._start_watch(store, entry.seq)
        if entry.phase is Phase.OVER:
            self._post(Over(entry))
        return session

    def _start_watch(self, store: JobStore, seq: int) -> None:
        self._watch_number += 1
        threading.Thread(
            target=self._watch,
            args=(store.another(), seq, self._watch_number),
            name="nvrx-rendezvous-watch",
            daemon=True,
        ).start()

    def _serve(self, session: NodeSession) -> None:
        """Do what is asked for, one thing after the other, and keep the lease alive.

        What the store did not survive is done again when there is another one.

        Raises:
            StoreLostError: the store is gone.
        """
        next_lease = self._clock.monotonic()
        while True:
            if self._held and not session.is_resuming:
                self._held[0](session)
                self._held.popleft()
                continue
            try:
                wait_s = next_lease - self._clock.monotonic()
                command = self._commands.get(timeout=max(0.0, wait_s))
            except queue.Empty:
                self._renew(session)
                next_lease = self._clock.monotonic() + self._lease_period()
                continue
            if command is None:
                return
            if isinstance(command, _Decided):
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
        logger.warning("%s; going on, and waiting for it to come back", _store_gone(error))
        self._ended.wait(DYING_S)
        store = self._connect(self._store_is_absent)
        self._renew_over(store)
        store.create(keys.SETTINGS, write_settings(self._host, self._settings))
        news = session.resume(store, self._connect_timeout_s)
        self._confirmed_at = self._clock.monotonic()
        assert session.entry is not None
        self._start_watch(store, session.entry.seq)
        logger.info("the store is back")
        if news is not None:
            self._post(news)

    def _renew_over(self, store: JobStore) -> None:
        store.count(keys.lease(self._node), 1)

    def _store_is_absent(self) -> None:
        """Take note that nobody serves a store: then nobody can have replaced this node either."""
        self._confirmed_at = self._clock.monotonic()

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
        others = [store.create(keys.SETTINGS, own), store.peek(keys.CONTROL_SETTINGS)]
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
        while not self._ended.is_set():
            key = keys.log(seq + 1)
            try:
                text = store.wait_for(key, WATCH_WAIT_S)
                if text is None:
                    continue
                entry = decode_entry(text, seq + 1)
            except ForeignValueError as error:
                store.report_foreign(error)
                self._commands.put(NodeSession.ring)
                self._ended.wait(FOREIGN_PAUSE_S)
                continue
            except StoreLostError as error:
                self._commands.put(_WatchEnded(number, str(error)))
                return
            seq = entry.seq
            self._commands.put(_Decided(entry))
            if entry.phase is Phase.OVER:
                return

    def _take(self, session: NodeSession, entry: Entry) -> None:
        news = session.take(entry)
        if news is not None:
            self._post(news)
