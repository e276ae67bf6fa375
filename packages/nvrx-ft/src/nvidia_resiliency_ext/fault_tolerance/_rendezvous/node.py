# SPDX-License-Identifier: Apache-2.0
"""One node's side of the rendezvous: follows the log of decisions, and adds to it.

`NodeSession` knows the steps and blocks; it has no thread and may be driven by a test or a
simulation. `NodeThreads` runs it beside a launcher's loop: one thread waits in the store for the
next decision, the other does everything else and keeps the lease alive.
"""

from __future__ import annotations

import dataclasses
import functools
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


News = Placed | Spare | Opened | Over | Lost


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

    def renew_lease(self) -> None:
        """Say that this node lives; when it returns, the store knows."""
        self._store.count(keys.lease(self.node), 1)

    def arrive(self, arrival: Arrival) -> bool:
        """Offer this node in the present round; False when it came too late for a place."""
        entry = self._present()
        self._send(Note(Kind.ARRIVED, self.node, arrival=arrival), entry.round)
        if entry.phase is not Phase.OPEN:
            return False
        counted = self._store.count(keys.arrivals(entry.round), 1)
        if counted > keys.SEAL:
            return False
        self._arrived_in = entry.round
        if counted >= entry.bell_from:
            self.ring()
        return True

    def take(self, entry: Entry) -> News | None:
        """Take note of a decision; return what it means for this node."""
        present = self._present()
        if entry.seq <= present.seq:
            return None
        self.entry = entry
        if entry.phase is Phase.OVER:
            return Over(entry)
        if entry.phase is Phase.OPEN:
            return Opened(entry)
        if self._arrived_in != entry.round:
            return Spare(entry)
        text = self._store.peek(keys.place(self.node))
        place = decode(Place, text) if text is not None else Place(entry.round)
        if place.round != entry.round or place.group_rank is None:
            return Spare(entry)
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
    ) -> None:
        """Leave a note for the host."""
        note = Note(kind, self.node, state=state, cause=cause, text=text, arrival=arrival)
        self._send(note, self._present().round)
        self.ring()

    def succeeded(self) -> None:
        """Say that all workers of this node ended well; the last one wakes the host."""
        entry = self._present()
        self._send(
            Note(Kind.STATE, self.node, state=WorkerState.SUCCEEDED),
            entry.round,
        )
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
        entry, cause=None, reason="", active=0, world_size=0, master_addr="", master_port=0
    )


def _store_gone(error: StoreLostError) -> str:
    return f"the store host of the job is gone, or cannot be reached any more ({error})"


class NodeThreads:
    """Runs a session beside a loop. Commands return at once; news come through `post`.

    Both threads are daemons: one may wait in the store, where only the end of the job or of the
    connection reaches it.

    Args:
        connect: Makes the connection; called in the thread, may take long, may raise NvrxError.
        node: This node's identity.
        host: Its name.
        post: Takes news, from any thread.
        clock: Where the time is read.
        lease_s: Seconds between signs of life.
        connect_timeout_s: How long the job may take to appear in the store.
    """

    def __init__(  # noqa: PLR0913 - named, and each of them a fact of its own
        self,
        connect: Callable[[], JobStore],
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
        self._commands: queue.SimpleQueue[Callable[[NodeSession], None] | None]
        self._commands = queue.SimpleQueue()
        self._session: NodeSession | None = None
        self._confirmed_at: float | None = None
        self._ended = threading.Event()
        self._worker = threading.Thread(target=self._work, name="nvrx-rendezvous", daemon=True)
        self._worker.start()

    @property
    def confirmed_at(self) -> float | None:
        """When the last lease that the store confirmed was sent (monotonic s); None before."""
        return self._confirmed_at

    def submit(self, command: Callable[[NodeSession], None]) -> None:
        """Do `command` in the session's thread, after those before it."""
        self._commands.put(command)

    def close(self, timeout_s: float) -> None:
        """End the session; what was submitted before is still done, `timeout_s` long."""
        self._commands.put(None)
        self._worker.join(timeout_s)
        self._ended.set()

    def _work(self) -> None:
        try:
            store = self._connect()
            session = self._session = NodeSession(store, self._node, self._host)
            self._renew(session)
            entry = session.attach(self._connect_timeout_s)
            self._compare_settings(session, store)
            self._confirmed_at = self._clock.monotonic()
            watcher = threading.Thread(
                target=self._watch,
                args=(store.another(), entry.seq),
                name="nvrx-rendezvous-watch",
                daemon=True,
            )
            watcher.start()
            if entry.phase is Phase.OVER:
                self._post(Over(entry))
            self._serve(session)
        except StoreLostError as error:
            self._post(Lost(_store_gone(error)))
        except NvrxError as error:
            self._post(Lost(str(error)))

    def _serve(self, session: NodeSession) -> None:
        next_lease = self._clock.monotonic() + self._lease_period()
        while True:
            wait_s = next_lease - self._clock.monotonic()
            try:
                command = self._commands.get(timeout=max(0.0, wait_s))
            except queue.Empty:
                self._renew(session)
                next_lease = self._clock.monotonic() + self._lease_period()
                continue
            if command is None:
                return
            command(session)

    def _lease_period(self) -> float:
        # Spread, so that thousands of nodes do not speak in the same instant.
        return self._lease_s * random.uniform(0.95, 1.1)  # noqa: S311

    def _renew(self, session: NodeSession) -> None:
        sent_at = self._clock.monotonic()
        session.renew_lease()
        self._confirmed_at = sent_at

    def _compare_settings(self, session: NodeSession, store: JobStore) -> None:
        import json

        text = store.wait_for(keys.SETTINGS, self._connect_timeout_s)
        theirs = json.loads(text) if text else {}
        different = [
            f"{name} is {mine} on {self._host} and {theirs[name]} on the store host"
            for name, mine in sorted(self._settings.items())
            if name in theirs and theirs[name] != mine
        ]
        if different:
            what = f"launchers were started differently: {'; '.join(different)}"
            session.tell(Kind.MISMATCH, text=what)
            if session.entry is not None and session.entry.round > 0:
                raise NvrxError(what)

    def _watch(self, store: JobStore, seq: int) -> None:
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
                self._post(Lost(_store_gone(error)))
                return
            seq = entry.seq
            self._commands.put(functools.partial(self._take, entry))
            if entry.phase is Phase.OVER:
                return

    def _take(self, entry: Entry, session: NodeSession) -> None:
        news = session.take(entry)
        if news is not None:
            self._post(news)
