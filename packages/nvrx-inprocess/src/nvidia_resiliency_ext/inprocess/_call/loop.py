# SPDX-License-Identifier: Apache-2.0
"""The loop of one wrapped call: run the function, and after an interruption run it again.

`MonitorLink` sends and receives for it, `MainThreadInterrupter` stops it.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nvidia_resiliency_ext.inprocess._call.interrupt import RankShouldRestart
from nvidia_resiliency_ext.inprocess._monitor.client import MonitorLink
from nvidia_resiliency_ext.inprocess._monitor.messages import (
    Completed,
    Decided,
    Interrupted,
    StoreLost,
)
from nvidia_resiliency_ext.inprocess._monitor.page import Phase as ProgressPhase
from nvidia_resiliency_ext.inprocess._monitor.page import ProgressPage
from nvidia_resiliency_ext.inprocess._protocol.decision import Decision, is_searched
from nvidia_resiliency_ext.inprocess._unblock.gloo import release_gloo_connections
from nvidia_resiliency_ext.inprocess._unblock.groups import forget_unfinished, patient_destruction
from nvidia_resiliency_ext.inprocess._unblock.waits import patient_rendezvous
from nvidia_resiliency_ext.inprocess.attribution import Interruption, format_interruption_records
from nvidia_resiliency_ext.inprocess.exception import HealthCheckError, InternalError
from nvidia_resiliency_ext.inprocess.rank_assignment import RankAssignmentCtx, RankDiscarded
from nvidia_resiliency_ext.inprocess.rank_filter import RankFilter as OlderRankFilter
from nvidia_resiliency_ext.inprocess.state import FrozenState, Mode, State
from nvidia_resiliency_ext.inprocess.store import BarrierTimeout
from nvidia_resiliency_ext.inprocess.utils import log_exc
from nvidia_resiliency_ext.shared_utils.events import EventLog

from .interrupt import AtomicLock, MainThreadInterrupter, terminate
from .rendezvous import Rendezvous
from .report import (
    KEPT_REPORTS,
    Phase,
    RestartReport,
    Stopwatch,
    describe_interruption,
    detection_s,
    record_restart,
)
from .settings import Settings
from .watchdog import (
    WAITS,
    EventQueue,
    MainThreadActivity,
    Watchdog,
    of_main_thread,
    of_raised,
    old_objects_frozen,
)

logger = logging.getLogger("nvrx")

_LONGEST_TRACE = 1 << 16
_STALE_KEYS = (
    "\nif the function's rendezvous is env:// or tcp://: its store still has keys of earlier calls;"
    " give init_process_group store=PrefixStore(str(call.iteration), call.store)"
)

# What torch imports when the first model is wrapped by DistributedDataParallel (some 820 modules)
# and at the first backward pass: a reserve that takes over would import them while all wait.
_IMPORTED_LATE = ("torch._dynamo", "torch.profiler._cupti_monitor")
# Seconds that a reserve has waited before it imports them: an import cannot be left half-way, and
# in an iteration's first moments faults are most likely.
_CALM_S = 2.0

_STOPPER_LIMIT_S = 5.0

_Event = TypeVar("_Event")


@dataclass(eq=False, kw_only=True)
class CallLoop:
    """One wrapped call in its rank; its parts are the caller's to close.

    Methods run in the main thread unless they say otherwise.
    """

    settings: Settings
    state: State
    restart_health_check: Callable[[FrozenState], Any] | None
    rendezvous: Rendezvous
    link: MonitorLink
    page: ProgressPage
    event_log: EventLog
    inject: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], tuple[Any, Any]]

    def __post_init__(self) -> None:
        interval_s = self.settings.progress_watchdog_interval.total_seconds()
        self.lock = AtomicLock()
        self.watchdog = Watchdog(self.page.stamp_auto, interval_s)
        self.interrupter = MainThreadInterrupter()
        self.events = EventQueue(interval_s, self.page.stamp_auto)
        self._pid = os.getpid()
        self._watch = Stopwatch()
        self._reported_at: float | None = None
        self._stopping = threading.Lock()  # guards the two below
        self._entered = self._stopping_in = -1
        self._stopped_in = -1
        self._stopper: threading.Thread | None = None
        # Where the others wait for this rank to arrive, and who they are.
        self._owed_in = 0
        self._participants = frozenset(range(self.state.world_size))
        self._is_run = False
        self._pending: RestartReport | None = None
        self._what_happened = ""
        self._activity = MainThreadActivity()
        self.reports: deque[RestartReport] = deque(maxlen=KEPT_REPORTS)

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call `fn` until all ranks have completed it; return its value, None where inactive."""
        self._is_run = True
        with old_objects_frozen(), patient_rendezvous(), patient_destruction():
            try:
                self._assign(set())
                while True:
                    self._begin()
                    done = self._attempt(fn, args, kwargs)
                    if done is not None:
                        break
                    self._restart()
                    gc.collect()  # what the interrupted function left in cycles
            except BaseException as error:
                if not self._is_child:
                    self._leave(error)
                raise
        if self._is_child:
            return done[0]
        logger.debug("all ranks have completed iteration %d", self.state.iteration)
        self.page.phase = ProgressPhase.IDLE
        self.link.leave(is_lost=False)
        self._call_last(self.settings.completion, "completion")
        return done[0]

    def close(self) -> None:
        """Report this rank as lost if the call was never run."""
        if not self._is_run:
            self._is_run = True
            self.link.leave(is_lost=True)

    def _log(self, error: Exception, where: str) -> None:
        # As text: a handler that keeps its records must not keep the function's frames.
        trace = "".join(traceback.format_exception(error)).rstrip()
        if len(trace) > _LONGEST_TRACE:
            # The message may be a whole tensor; where it was raised stands at the start.
            half = _LONGEST_TRACE // 2
            trace = f"{trace[:half]} ... {trace[-half:]}"
        is_late = self.state.iteration > 0 and "in init_process_group" in trace
        hint = _STALE_KEYS if is_late else ""
        logger.error("%s\n%s%s", log_exc(self.state, error, where), trace, hint)

    @property
    def _is_child(self) -> bool:
        """Return whether this process was forked in the function, and is no rank."""
        return os.getpid() != self._pid

    def _assign(self, terminated: set[int]) -> None:
        rank_filter = self.settings.rank_filter
        ctx = RankAssignmentCtx(self.state, self.rendezvous.store, terminated)
        ctx = self.settings.rank_assignment(ctx)
        if isinstance(rank_filter, OlderRankFilter):
            ctx.state = rank_filter(ctx.state)
        elif rank_filter is not None:
            ctx = rank_filter(ctx)
        self.state.copy_from(ctx.state)
        if self.state.mode is Mode.INITIALIZED:
            # Only renumbered: then all ranks work.
            self.state.mode = Mode.ACTIVE
            self.state.active_rank = self.state.rank
            self.state.active_world_size = self.state.world_size

    def _begin(self) -> None:
        state = self.state
        state.set_distributed_vars()
        self.page.rearm()
        self._reported_at, self._activity = None, MainThreadActivity()
        assert state.rank is not None
        place = (state.iteration, state.rank, state.world_size)
        logger.debug("iteration %d begins: rank %d of %d, %s", *place, state.mode.name)
        self.link.begin(*place, self._participants)

    def _attempt(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """Run the iteration; return the function's value in a tuple, None after an interruption."""
        state, settings = self.state, self.settings
        try:
            with self.interrupter:
                self.page.phase = ProgressPhase.GUARDED
                with self._stopping:
                    self._entered = state.iteration
                    self._stop_if_interrupted()
                frozen = state.freeze()
                with self._watch.measure(Phase.INITIALIZE):
                    if settings.initialize is not None:
                        settings.initialize(frozen)
                self._log_restart()
                self._check(settings.health_check, frozen)
                value = None
                if state.mode is Mode.ACTIVE:
                    given, named = self.inject(fn, args, kwargs)
                    value = fn(*given, **named)
                    del given, named
                    if self._is_child:
                        return (value,)
                self.page.rearm()
                self._activity = WAITS
                self.link.completed()
                self._await_completion()
                return (value,)
        except RankShouldRestart as request:
            if self._is_child or self.interrupter.is_of_another(request):
                raise  # of a call around this one
            if self._find(Interrupted) is None and self._fatal() is None:
                # The function itself asked for it.
                self._report()
        except Exception as error:
            if self._is_child:
                raise
            state.fn_exception = error
            if not self._activity.call:
                self._activity = of_raised(error)
            self._report()
            self._log(error, f"iteration {state.iteration}")
        finally:
            # A handler of the program's may have raised where the exit began, and prevented it.
            self.interrupter.leave()
        return None

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        self.link.report(Interruption.EXCEPTION)

    def _check(self, check: Callable[[FrozenState], Any] | None, frozen: FrozenState) -> None:
        if check is None:
            return
        try:
            check(frozen)
        except HealthCheckError:
            raise
        except Exception as error:
            raise HealthCheckError(f"a health check failed: {error}") from error

    def _await_completion(self) -> None:
        """Wait until all have completed; a reserve waits without limit, and imports meanwhile."""
        limit_s = None
        if self.state.mode is Mode.ACTIVE:
            limit_s = self.settings.completion_timeout.total_seconds()
        elif self._await(Completed, _CALM_S) is None:
            with self.lock:  # half-imported modules could not be imported again
                _import_for_take_over()
        if self._await(Completed, limit_s) is None:
            raise BarrierTimeout(
                f"not all ranks have completed iteration {self.state.iteration} within"
                f" {limit_s:g} s (completion_timeout)"
            )

    def receive(self, event: Any) -> None:
        """Queue an event of the monitor; called in the link's thread."""
        self.events.add(event)
        with self._stopping:
            self._stop_if_interrupted()

    def _stop_if_interrupted(self) -> None:
        """Stop the function, in a thread of its own: the link must go on listening meanwhile.

        An interruption of an iteration that this rank has not entered yet waits until it has.
        """
        iteration = self.state.iteration
        event = self._find(Interrupted) or self._fatal()
        if event is None or self._entered != iteration or self._stopping_in == iteration:
            return
        # By its number: an old event that comes again stops nothing.
        self._stopping_in = iteration
        self._stopper = threading.Thread(
            target=self._stop_function,
            args=(iteration, event),
            name="nvrx-inprocess-restart",
            daemon=True,
        )
        self._stopper.start()

    def _stop_function(self, iteration: int, event: Interrupted | StoreLost) -> None:
        events = self.events  # a late abort may end after the call
        try:
            if isinstance(event, Interrupted):
                self._count_detection(event)
                is_inside = self._reported_at is None and self._activity is not WAITS
                if is_inside and is_searched(event.records):
                    self._activity = of_main_thread()
                cause = format_interruption_records(event.records)
            else:
                cause = event.text
            abort_s, unwind_s = terminate(
                self.settings.abort,
                self.state.freeze(),
                self.interrupter,
                self.lock,
                self.watchdog.pause,
                cause,
                quiet_s=self.settings.soft_timeout.total_seconds(),
            )
            self._watch.add(Phase.ABORT, abort_s)
            self._watch.add(Phase.UNWIND, unwind_s)
        except Exception as error:  # noqa: BLE001 - the main thread waits for this one's end
            self._log(error, "stopping the function")
        self._stopped_in = iteration
        events.wake()

    def _count_detection(self, event: Interrupted) -> None:
        self._watch.add(Phase.DETECT, detection_s(event.records, self.settings))
        # Who has not reported knows only what its monitor says.
        reported_at = self._reported_at
        waited_s = event.waited_s if reported_at is None else time.monotonic() - reported_at
        self._watch.add(Phase.LAST_CALL, waited_s)

    def _find(self, kind: type[_Event]) -> _Event | None:
        """Return the event of this class about the present iteration, or None."""
        return self.events.find(kind, self.state.iteration)

    def _await(self, kind: type[_Event], limit_s: float | None) -> _Event | None:
        """Wait for an event, an interruption only once all of this rank was stopped for it."""

        def look() -> _Event | None:
            found = self._find(kind)
            lost = self.events.find(StoreLost)
            if lost is not None and (found is None or kind is not Completed):
                what = "its monitor" if self.link.is_abandoned else "the store of the job"
                raise InternalError(f"this rank has lost {what}: {lost.text}")
            is_early = kind is Interrupted and self._stopped_in != self.state.iteration
            return None if is_early else found

        return self.events.wait(look, limit_s)

    def _fatal(self) -> StoreLost | None:
        """Return the loss of the store, unless all have completed before."""
        return None if self._find(Completed) else self.events.find(StoreLost)

    def _restart(self) -> None:
        """Go from the interrupted iteration to the next; any error ends this rank."""
        state, settings = self.state, self.settings
        limit_s = settings.barrier_timeout.total_seconds()
        if self._await(Interrupted, limit_s) is None:
            raise InternalError(
                f"iteration {state.iteration} was not interrupted within {limit_s:g} s"
                " (barrier_timeout) of this rank's report"
            )
        self.page.rearm()
        self.watchdog.resume()
        if settings.abort is not None:
            with self._watch.measure(Phase.UNWIND):
                forget_unfinished()
        frozen = state.freeze()
        with self._watch.measure(Phase.FINALIZE):
            if settings.finalize is not None:
                settings.finalize(frozen)
        with self._watch.measure(Phase.HEALTH_CHECK):
            self._check(self.restart_health_check, frozen)
        del frozen
        with self._watch.measure(Phase.BARRIER):
            decision = self._arrive(limit_s)
        # No rank is in a collective any more.
        release_gloo_connections()
        if state.initial_rank not in decision.numbers:
            raise RankDiscarded(
                f"rank {state.initial_rank} was given up in iteration {state.iteration}:"
                f" {format_interruption_records(decision.records)}"
            )
        self._owed_in = state.iteration + 1
        self._participants = decision.going_on
        self._remember(decision)
        with self._watch.measure(Phase.RANK_ASSIGNMENT):
            self._assign(set(decision.terminated))
        state.advance()
        self.events.forget(state.iteration - 1)

    def _arrive(self, limit_s: float) -> Decision:
        self.page.phase = ProgressPhase.AT_BARRIER
        self.link.arrive(self._activity.call, self._activity.place)
        decided = self._await(Decided, limit_s)
        if decided is None:
            raise BarrierTimeout(
                f"not all ranks have come to the end of iteration {self.state.iteration} within"
                f" {limit_s:g} s (barrier_timeout)"
            )
        return decided.decision

    def _remember(self, decision: Decision) -> None:
        """Keep what is to be logged of a restart, until it is known whether this rank goes on."""
        state = self.state
        self._what_happened = describe_interruption(decision, self.settings)
        self._pending = RestartReport(
            iteration=state.iteration,
            cause=format_interruption_records(decision.records),
            ranks=tuple(sorted({record.rank for record in decision.records})),
            terminated=decision.lost,
            kept=tuple(sorted(decision.numbers)),
            hang="" if decision.hang is None else decision.hang.text,
            culprits=() if decision.hang is None else decision.hang.culprits,
        )

    def _log_restart(self, error: BaseException | None = None) -> None:
        """Log and record a restart; with `error` only log that this rank leaves instead."""
        pending, self._pending = self._pending, None
        seconds = self._watch.take()
        if pending is None:
            return
        total_s = sum(seconds.values())
        if error is not None:  # The launcher records who was lost, and no restart has happened.
            logger.warning("%s; this rank leaves after %.2f s", self._what_happened, total_s)
            return
        kept = len(pending.kept)
        follows = "1 rank goes on" if kept == 1 else f"{kept} ranks go on"
        logger.warning("%s; %s after %.2f s", self._what_happened, follows, total_s)
        report = dataclasses.replace(pending, seconds=seconds, world_size=self.state.world_size)
        self.reports.append(report)
        logger.info("%s", report.line())
        if self.state.rank == 0:
            assert self.state.initial_rank is not None
            record_restart(self.event_log, self.rendezvous.call, report, self.state.initial_rank)

    def _leave(self, error: BaseException) -> None:
        """Report that this rank ends, and run the user's `terminate`."""
        # Where the exception was raised during another one that only served the restart, the
        # user sees its own causes alone.
        error.__suppress_context__ = True
        state = self.state
        self.page.phase = ProgressPhase.IDLE
        self._log_restart(error)
        # The caller of the function sees where it was raised.
        logger.warning("%s", log_exc(state, error, "leaving"))
        if self.link.is_abandoned:
            assert state.initial_rank is not None
            departure = (state.initial_rank, self._owed_in, self._participants)
            self.rendezvous.send_departure_notice(*departure)
        else:
            self.link.leave(is_lost=True, is_discarded=isinstance(error, RankDiscarded))
        if self._stopper is not None:
            # Its abort must not end what the caller begins next.
            self._stopper.join(_STOPPER_LIMIT_S)
        release_gloo_connections()
        self._call_last(self.settings.terminate, "terminate")

    def _call_last(self, callback: Callable[[FrozenState], Any] | None, name: str) -> None:
        try:
            if callback is not None:
                callback(self.state.freeze())
        except Exception as error:  # noqa: BLE001 - the function's value, or exception, counts
            self._log(error, name)


def _import_for_take_over() -> None:
    """Import modules that torch imports late, during a training function; a reserve has time."""
    for name in _IMPORTED_LATE:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - the function's own import reports it, if any
            logger.debug("reserve: cannot import %s ahead: %s", name, error)
