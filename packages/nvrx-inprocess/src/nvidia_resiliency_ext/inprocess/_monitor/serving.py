# SPDX-License-Identifier: Apache-2.0
"""Serve one call of a node's ranks: pass events to `Membership` and carry out its effects.

All of it runs in the loop's thread; only the threads of `store_threads` use the store.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.inprocess._protocol.decision import Decision, ObservedActivity
from nvidia_resiliency_ext.inprocess._protocol.iteration_store import IterationStore
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop
from nvidia_resiliency_ext.shared_utils.rank_activity import (
    Activity,
    Call,
    Kernel,
    Stack,
    classify,
    in_words,
    inspect_kernel,
)
from nvidia_resiliency_ext.shared_utils.rank_sets import parse_ranks

from . import membership, messages, timeouts
from .connections import Connection, Processes
from .messages import MonitorSettings
from .page import PageError, PageView, Phase, Stamps, observed_before_end
from .store_threads import OutcomeReader, Registration, StoreWorker, store_name

if TYPE_CHECKING:
    from .program import Journal

logger = logging.getLogger("nvrx")
_LAST_OPERATIONS_S = 5.0


@dataclass(slots=True)
class _RankSession:
    """Process, page, connection and timeouts of a rank."""

    pid: int
    start_ticks: int
    since_s: float
    page: PageView | None = None
    connection: Connection | None = None
    watch: timeouts.Watch = field(default_factory=timeouts.Watch)
    dump_signal: int = 0
    kernel: Kernel | None = None

    @property
    def has_come(self) -> bool:
        """Return whether the rank has connected to this monitor, and not only to an earlier one."""
        return self.page is not None or self.connection is not None

    def look(self) -> Stamps | None:
        """Return the stamps of the rank's page, `None` when it cannot be read."""
        if self.page is None:
            # It has not come back since another monitor died: stuck, perhaps.
            return Stamps(self.since_s, None, is_protected=True, phase=Phase.GUARDED, epoch=0)
        try:
            return self.page.read()
        except PageError as error:
            logger.warning("monitor_process: process %d: %s", self.pid, error)
            self.close_page()
            return None

    def close_page(self) -> None:
        if self.page is not None:
            self.page.close()
            self.page = None


class Serving:
    def __init__(
        self,
        loop: EventLoop,
        processes: Processes,
        journal: Journal,
        settings: MonitorSettings,
        world_size: int,
    ) -> None:
        self._processes = processes
        self._journal = journal
        self._settings = settings
        self._world_size = world_size
        self._membership = membership.Membership(world_size)
        self._sessions: dict[int, _RankSession] = {}
        self._lost_text: str | None = None
        self._store_name = store_name(settings)
        self._nobody_since_s: float | None = None
        self._look_s = -math.inf
        self._store_worker = StoreWorker(settings, loop.post, self.store_lost)
        self._outcome_reader = OutcomeReader(settings, loop.post, self)
        self._registration = Registration(settings, self._store_worker, self._lose, self._adopt)

    def hello(self, connection: Connection, hello: messages.Hello, page: PageView) -> str | None:
        """Add a rank; return why it is refused. The page is ours from now on."""
        rank = hello.initial_rank
        problem = self._refusal(connection.pid, hello)
        if problem is not None:
            page.close()
            return problem
        now = time.monotonic()
        start_ticks = self._processes.hold(connection.pid)
        session = self._sessions.setdefault(rank, _RankSession(connection.pid, start_ticks, now))
        if session.connection is not None:
            session.connection.close()
        session.close_page()
        session.start_ticks, session.page, session.connection = start_ticks, page, connection
        session.dump_signal = hello.dump_signal
        connection.on_message = lambda message: self._on_message(rank, message)
        connection.on_over = lambda: self._hung_up(session, connection)
        self._journal.open_log(hello.settings.log_file.replace("{rank}", str(rank)))
        self._journal.write_pid(hello.settings.pid_file.replace("{rank}", str(rank)))
        own, pid = os.getpid(), connection.pid
        logger.info("monitor_process pid=%d serves initial rank %d, target_pid=%d", own, rank, pid)
        connection.send(messages.Welcome(own))
        self._membership.attach(rank)
        if hello.begun is not None:
            self._on_message(rank, hello.begun)
        self._registration.came(rank, pid, start_ticks)
        if self._lost_text is not None:
            connection.send(messages.StoreLost(self._lost_text))
        self._look_s = now  # a fresh rank is looked at at once
        return None

    def process_ended(self, pid: int) -> None:
        for rank, session in self._sessions.items():
            if session.pid == pid:
                logger.info("monitor_process: initial rank %d, target_pid=%d, ended", rank, pid)
                self._do(self._membership.ended(rank, self._observed_before_end(rank, session)))
                session.close_page()

    def tick(self, now: float) -> float:
        """Check ranks, store and lease when due; return the latest time of the next call."""
        if now >= self._look_s:
            self._look_s = self._look_at_all(now)
        self._check_store(now)
        return min(self._look_s, self._registration.tick(now, self._membership.participants))

    def is_over(self, now: float) -> bool:
        """Return whether no rank needs this call any more."""
        if self._has_present:
            self._nobody_since_s = None
            return False
        if any(session.connection is not None for session in self._sessions.values()):
            return False
        if self._nobody_since_s is None:
            self._nobody_since_s = now
        waited_s = now - self._nobody_since_s
        # When all have completed, an operation may still have to tell the others so.
        is_late = self._membership.is_over and waited_s >= _LAST_OPERATIONS_S
        is_settled = self._membership.is_settled and (self._store_worker.pending == 0 or is_late)
        limit_s = self._settings.barrier_timeout_s + self._settings.heartbeat_timeout_s
        return is_settled or self._lost_text is not None or waited_s >= limit_s

    def close(self) -> None:
        self._store_worker.close()
        self._outcome_reader.close()
        for session in self._sessions.values():
            session.close_page()
            if session.connection is not None:
                session.connection.close()

    def _refusal(self, pid: int, hello: messages.Hello) -> str | None:
        rank = hello.initial_rank
        if not 0 <= rank < hello.world_size or hello.world_size != self._world_size:
            return f"rank {rank} of {hello.world_size} is none of this call's {self._world_size}"
        session = self._sessions.get(rank)
        if session is not None and session.pid != pid:
            return f"RANK={rank} belongs to process {session.pid} already, {pid} has it, too"
        member = self._membership.members.get(rank)
        if member is not None and not member.is_present:
            return f"initial rank {rank} has left this call"
        try:
            self._processes.hold(pid)
        except OSError as error:
            return f"process {pid} cannot be watched: {error}"
        return None

    def _on_message(self, rank: int, message: object) -> None:
        members = self._membership
        try:
            match message:
                case messages.Probe():
                    self._send(rank, message)
                case messages.Left(is_lost, is_discarded):
                    logger.info("monitor_process: initial rank %d leaves", rank)
                    self._do(members.left(rank, is_lost=is_lost, is_discarded=is_discarded))
                    self._send(rank, message)
                    if is_lost:
                        self._registration.left(rank)
                case messages.Begun(iteration, number, world_size, participants):
                    who = frozenset(parse_ranks(participants))
                    # Its time counts from the first look at the iteration.
                    self._look_s = time.monotonic()
                    self._do(members.begun(rank, iteration, number, world_size, who))
                case messages.Reported(iteration, kind):
                    logger.info("monitor_process: initial rank %d reports %s", rank, kind.name)
                    self._do(members.reported(rank, iteration, kind))
                case messages.Completed(iteration):
                    self._do(members.completed(rank, iteration))
                case messages.Arrived(iteration):
                    self._do(members.arrived(rank, iteration, self._activity_of(rank, message)))
                case _:
                    name = type(message).__name__
                    logger.warning("monitor_process: initial rank %d: a second %s", rank, name)
        except ValueError as error:
            logger.warning(
                "monitor_process: initial rank %d sends what is no valid message: %s", rank, error
            )

    def _hung_up(self, session: _RankSession, connection: Connection) -> None:
        if session.connection is connection:
            session.connection = None

    def _look_at_all(self, now: float) -> float:
        due_s = now + self._settings.interval_s
        for rank, session in list(self._sessions.items()):
            member = self._membership.members[rank]
            # Who has not come back may have left the call, unless it is still counted on.
            is_expected = session.page is not None or (
                not self._membership.is_over and rank in self._membership.participants
            )
            if member.is_present and is_expected and session.pid in self._processes:
                due_s = min(due_s, self._evaluate(rank, session, now))
        return due_s

    def _evaluate(self, rank: int, session: _RankSession, now: float) -> float:
        stamps = session.look()
        if stamps is None:
            return math.inf
        is_interrupted = self._membership.is_interrupted(self._membership.members[rank].iteration)
        since_s = session.watch.interrupted_s
        before = replace(session.watch, interrupted_s=(since_s or now) if is_interrupted else None)
        found = timeouts.evaluate(before, stamps, self._settings, now)
        if timeouts.Effect.HARD_TIMEOUT in found.effects:
            # Nobody is killed on one look.
            again = session.look()
            found = timeouts.evaluate(before, again or stamps, self._settings, time.monotonic())
        session.watch = found.watch
        for effect in found.effects:
            self._apply(rank, session, effect)
        return found.due_s

    def _apply(self, rank: int, session: _RankSession, effect: timeouts.Effect) -> None:
        pid, members = session.pid, self._membership
        signals = timeouts.SIGNALS.get(effect)
        if signals is not None:
            names = ", ".join(number.name for number in signals)
            logger.warning("monitor_process: %s to target_pid=%d", names, pid)
            self._processes.signal(pid, signals)
            return
        if effect is timeouts.Effect.ASK_FOR_STACKS:
            self._ask_for_stacks(session)
            return
        text = "monitor_process: initial rank %d, target_pid=%d: %s"
        logger.warning(text, rank, pid, effect.value)
        if effect is timeouts.Effect.GIVE_UP:
            self._do(members.ended(rank, self._observed_before_end(rank, session)))
        else:
            self._do(members.timed_out(rank, Interruption[effect.name]))

    def _ask_for_stacks(self, session: _RankSession) -> None:
        """Look at a rank that is to be ended, and have it write its stacks if it can."""
        session.kernel = inspect_kernel(session.pid)
        number = session.dump_signal
        if number > 0 and procfs.catches_signal(session.pid, number):
            self._processes.signal(session.pid, (number,))

    def _observed_before_end(self, rank: int, session: _RankSession) -> ObservedActivity | None:
        """Return the last activity of a rank that a hard timeout ended; log its stacks."""
        if session.kernel is None or not session.watch.is_being_killed:
            return None
        dump = "" if session.page is None else session.page.read_dump()
        observed = observed_before_end(session.kernel, dump)
        logger.warning("monitor_process: initial rank %d %s\n%s", rank, observed.words, dump)
        return observed

    def _activity_of(self, rank: int, message: messages.Arrived) -> ObservedActivity | None:
        """Return a rank's activity at its interruption, from its message and from the kernel."""
        session = self._sessions[rank]
        kernel, session.kernel = session.kernel, None
        if message.call == messages.WAITED:
            return ObservedActivity(Activity.WAITING, message.place)
        if not message.call or kernel is None:
            return None
        stack = Stack(Call(message.call), message.place)
        activity = classify(kernel, stack)
        is_waiting = activity is Activity.WAITING
        return ObservedActivity(
            activity, message.place, "" if is_waiting else in_words(activity, kernel, stack)
        )

    def outcome(self, iteration: int, *, is_completed: bool) -> None:
        if not is_completed and iteration == self._membership.position:
            # Before the ranks are told: an interrupted rank does something else.
            for rank, session in self._sessions.items():
                if self._membership.members[rank].is_present and not session.watch.is_being_killed:
                    session.kernel = inspect_kernel(session.pid)
        how = "completed" if is_completed else "interrupted"
        logger.info("monitor_process: iteration %d is %s", iteration, how)
        self._do(self._membership.outcome(iteration, is_completed=is_completed))

    def last_call_over(
        self, iteration: int, records: tuple[InterruptionRecord, ...], waited_s: float
    ) -> None:
        self._do(self._membership.last_call_over(iteration, records, waited_s))

    def decided(self, iteration: int, decision: Decision) -> None:
        kept = len(decision.going_on)
        logger.info("monitor_process: iteration %d is decided, %d ranks go on", iteration, kept)
        self._do(self._membership.decided(iteration, decision))

    def store_lost(self, text: str) -> None:
        """Send all ranks that no iteration can be decided any more."""
        if self._lost_text is not None or self._membership.is_over:
            return
        text = f"{self._store_name}: {text}"
        logger.error("monitor_process: the store is lost: %s", text)
        self._lost_text = text
        for rank in self._sessions:
            self._send(rank, messages.StoreLost(text))

    def _check_store(self, now: float) -> None:
        name = "heartbeat_timeout" if self._store_worker.is_open else "barrier_timeout"
        limit_s: float = getattr(self._settings, f"{name}_s")
        # A waiting thread notices a broken connection at once, the writer at its next operation.
        since_s = (self._store_worker.started_s, self._outcome_reader.broken_s)
        if any(each is not None and now - each > limit_s for each in since_s):
            self.store_lost(f"it has not answered for {limit_s:g} s ({name})")

    def _do(self, effects: Iterable[membership.Effect]) -> None:
        for effect in effects:
            match effect:
                case membership.Notify(initial_rank, event):
                    self._send(initial_rank, event)
                case membership.Follow(iteration, participants):
                    self._outcome_reader.follow(iteration, participants)
                case membership.CatchUp(iteration):
                    catch_up = self._outcome_reader.catch_up
                    self._store_worker.submit(functools.partial(catch_up, iteration=iteration))
                case membership.Complete():
                    self._write(IterationStore.complete, effect)
                case membership.Interrupt():
                    if not self._membership.is_anybody_inside:
                        self._outcome_reader.skipped = effect.iteration
                    self._write(IterationStore.interrupt, effect)
                case membership.Arrive():
                    self._write(IterationStore.arrive, effect)

    def _write(self, operation: Callable[..., object], effect: Any) -> None:
        """Have the store's writer call an operation whose parameters are the effect's fields."""
        arguments = {each.name: getattr(effect, each.name) for each in fields(effect)}
        self._store_worker.submit(functools.partial(operation, **arguments))

    def _send(self, rank: int, message: object) -> None:
        connection = self._sessions[rank].connection
        if connection is not None:
            connection.send(message)

    def _lose(self, ranks: Iterable[int]) -> None:
        self._do(self._membership.lost(ranks))

    def _adopt(self, rank: int, pid: int, start_ticks: int, *, has_left: bool) -> None:
        """Add a rank that another monitor of this node served, and that has not connected yet."""
        if rank in self._sessions:
            return
        self._membership.attach(rank)
        self._sessions[rank] = _RankSession(pid, start_ticks, time.monotonic())
        logger.info("monitor_process: takes over initial rank %d, target_pid=%d", rank, pid)
        if has_left:
            self._do(self._membership.left(rank, is_lost=True))
            return
        try:
            self._processes.hold(pid, start_ticks)
        except OSError:
            self.process_ended(pid)

    @property
    def _has_present(self) -> bool:
        return any(
            member.is_present and self._sessions[rank].pid in self._processes
            for rank, member in self._membership.members.items()
            if not self._membership.is_over or self._sessions[rank].has_come
        )
