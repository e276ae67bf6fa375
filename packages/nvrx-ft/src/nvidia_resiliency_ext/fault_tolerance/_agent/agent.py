# SPDX-License-Identifier: Apache-2.0
"""The launcher's loop on one node: hands what happens to `decide`, and does what it says."""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance._core import exceptions, machine
from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._monitor import messages
from nvidia_resiliency_ext.fault_tolerance._monitor.hang_report import limit_in_words, states_of
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import NO_STEPS, Steps
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import RefillingBudget
from nvidia_resiliency_ext.fault_tolerance._report import failures as faults
from nvidia_resiliency_ext.fault_tolerance._workers import workers
from nvidia_resiliency_ext.shared_utils.children import ExitStatus
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import Timer

from . import decide

if TYPE_CHECKING:
    from .job import Job

logger = logging.getLogger("nvrx")

PROGRESS_INTERVAL_S = 10.0
BARRIER_S = 300.0
UNCAUGHT_EXCEPTION = 1  # Python's exit code after one.


@dataclass(frozen=True, slots=True)
class Result:
    """How the job ended here: exit code, reason, and the failures of the last cycle."""

    exit_code: int
    reason: str
    failures: Sequence[faults.Failure]
    stop_signal: int | None = None
    is_unfit: bool = field(default=False, kw_only=True)
    no_restart: str = field(default="", kw_only=True)  # Why the job must not be started again.


class NodeAgent:
    """Runs the cycles of one node until `decide` says that it is over. The loop's thread only."""

    def __init__(self, job: Job, policy: machine.Policy) -> None:
        config, rendezvous, controller = job.plan.fault_tol_cfg, job.rendezvous, job.controller
        self.job, self.host = job, job.paths.host
        self.loop, self.clock, self.reporter = job.loop, job.clock, job.reporter
        self.rendezvous, self.admission, self.monitor = rendezvous, job.admission, job.monitor
        self._node = machine.Node(policy)
        self._start_failures = faults.StartFailures(config.start_failure_limit)
        window_s = config.restart_budget_window
        self._budget = None if window_s is None else RefillingBudget(policy.max_restarts, window_s)
        self.workers = workers.WorkerGroup(
            self.loop,
            self.clock,
            job.tee,
            exited=self._worker_exited,
            stopped=lambda given_up: self.post(machine.GroupStopped(given_up)),
            started_again=self._started_again,
            reports_leftovers=config.check_remaining_processes,
        )
        self._events: collections.deque[machine.Event] = collections.deque()
        self._exits: list[tuple[int, ExitStatus, float]] = []
        self._ranks_in_hang: list[dict[str, Any]] = []
        self._failures: list[faults.Failure] = []
        self._assignment: machine.Assignment | None = None
        self._error_files: dict[int, str] = {}
        self._error_outputs: dict[int, tuple[str, int]] = {}
        self._errors: dict[int, exceptions.ErrorFile | None] = {}
        self._others_until: float | None = None
        self._cycle_start_time: float | None = None
        self._started_at: float | None = None
        self._steps_recorded = NO_STEPS
        self._has_closed = False
        self._finish: machine.Finish | None = None
        self._barrier: Timer | None = None
        self._refill: Timer | None = None
        self._is_unfit = False
        self._perform: dict[type, Callable[..., None]] = {
            machine.Join: self._join,
            machine.RoundReady: self._start_workers,
            machine.StopWorkers: self._stop_workers,
            machine.KillWorkers: self._kill_workers,
            machine.ReportFault: self._report_fault,
            machine.OpenNextRound: rendezvous.perform,
            machine.CloseRendezvous: self._close_rendezvous,
            machine.ReportSuccess: self._report_success,
            machine.ReportBroken: rendezvous.perform,
            machine.LeaveRendezvous: self._leave,
            machine.Finish: self._record_finish,
            machine.Preempted: rendezvous.perform,
            machine.RoundLeaves: lambda effect: controller.ask(effect.cause),
            machine.RanksHeld: rendezvous.perform,
            machine.SaveAgreed: lambda effect: controller.release(effect.at),
        }

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the last cycle here, by local rank; none of a spare."""
        if self._assignment is None:
            return ()
        return tuple(self._assignment.rank_offset + local for local in sorted(self.workers.started))

    def post(self, event: machine.Event) -> None:
        """Hand in an event; it is decided in the order of arrival."""
        self._events.append(event)

    def _worker_exited(self, local_rank: int, status: ExitStatus) -> None:
        """Record an exit; those seen in one round of the loop are evaluated together."""
        self._exits.append((local_rank, status, self.clock.wall()))

    def rank_stuck(self, local_rank: int, why: str) -> None:
        rank = (self._assignment.rank_offset if self._assignment else 0) + local_rank
        what = f"rank {rank} on host {self.host} survived SIGKILL: {why}"
        cause = Cause("unhealthy", what, rank, local_rank, self.host, detected_by="monitor")
        self.post(machine.WorkerStuck(cause))

    def ranks_examined(self, ranks: list[dict[str, Any]], report: dict[str, Any]) -> None:
        """Report this node's ranks in a hang to the coordinator, with `report` if it began here."""
        self._ranks_in_hang = ranks
        complaint = None
        if report:
            complaint = dataclasses.replace(
                faults.hang_cause(report), detail={"limit_words": limit_in_words(report)}
            )
        self.rendezvous.hung(states_of(ranks), complaint)

    def run(self) -> Result:
        self.loop.call_at(self.clock.monotonic() + PROGRESS_INTERVAL_S, self._tick_progress)
        self._join(machine.Join(0, None))
        while self._finish is None:
            if not self._settle():
                self.loop.run_once()
        self.reporter.cycle_ended(self._finish.reason)
        self._stay()
        return Result(
            self._finish.exit_code,
            self._finish.reason,
            self._failures,
            self._node.stop_signal,
            is_unfit=self._is_unfit,
            no_restart=self._finish.no_restart,
        )

    def _stay(self) -> None:
        """Serve the others' store after this node's own part is over, until a signal ends it."""
        if self.rendezvous.must_stay:
            logger.warning("this node is done, and stays because the job's store is here")
        self._has_closed = False
        while self.rendezvous.must_stay:
            self.loop.run_once()
            # What comes in the same turn as the end of the job changes nothing any more.
            while not self._has_closed and self._settle():
                pass

    def _settle(self) -> bool:
        """Decide one thing that is waiting; exits first, they are the causes."""
        if self._exits and (self._events or not self._others_may_fail()):
            self._evaluate_exits()
            return True
        if self._events:
            self._handle(self._events.popleft())
            return True
        return False

    def _handle(self, event: machine.Event) -> None:
        before = self._node.phase
        if before is machine.Phase.RUNNING and isinstance(event, machine.RanksAsked):
            self.monitor.send(messages.Examine())
        if before is machine.Phase.RUNNING and isinstance(event, machine.HangEvaluated):
            event = self._obey(event)
        self._node, effects = decide.decide(self._node, event)
        if before is machine.Phase.RUNNING and self._node.phase is not machine.Phase.RUNNING:
            self._record_progress()
            self._record_end()
        if isinstance(event, machine.NodeUnfit) and before is machine.Phase.JOINING:
            # What its workers did before is not why it leaves.
            self._is_unfit, self._failures = True, []
        if before is machine.Phase.STOPPING and isinstance(event, machine.GroupStopped):
            self.reporter.workers_stopped()
        for effect in effects:
            self._perform[type(effect)](effect)

    def _obey(self, evaluated: machine.HangEvaluated) -> machine.HangEvaluated:
        """Have the culprits ended that are here, and add to the verdict what this node knows."""
        assert self._assignment is not None
        offset, cause = self._assignment.rank_offset, evaluated.cause
        ranks = [int(rank) for rank in str(cause.detail.get("culprits") or "").split(",") if rank]
        local_ranks = [rank - offset for rank in ranks if rank - offset in self.workers.started]
        self.monitor.send(messages.EndRanks(local_ranks))
        is_here = cause.rank is not None and cause.rank - offset in local_ranks
        if is_here:
            killed = ExitStatus(None, signal.SIGKILL)
            self._failures = [
                self._failure(rank, killed, self.clock.wall()) for rank in local_ranks
            ]
        cause = dataclasses.replace(
            cause,
            local_rank=cause.rank - offset if is_here and cause.rank is not None else None,
            detail={**cause.detail, "ranks": self._ranks_in_hang},
        )
        return machine.HangEvaluated(cause, self._makes_no_progress())

    def _record_end(self) -> None:
        cause, lived_s, has_stepped = self._node.cause, self._lived_s(), self._has_stepped()
        self._start_failures.cycle_ended(lived_s, stepped=has_stepped)
        if cause is not None and self._started_at is not None:
            self.admission.cycle_failed(cause, lived_s, has_stepped=has_stepped)
        self._started_at = None

    def _others_may_fail(self) -> bool:
        """Return whether to wait for the other ranks, which may fail at their start like these."""
        if self._node.phase is not machine.Phase.RUNNING or self._node.policy.many_nodes:
            return False
        now = self.clock.monotonic()
        if self._others_until is None:
            may_fail = self._start_failures.counts(
                [_message_of(self._error_of(rank, status)) for rank, status, _ in self._exits],
                self._lived_s(),
                stepped=self._has_stepped(),
            )
            self._others_until = now + faults.OTHERS_MAY_TAKE_S if may_fail else now
            if may_fail:
                self.loop.call_at(self._others_until, lambda: None)
        return now < self._others_until and len(self._exits) < len(self._node.running)

    def _has_stepped(self) -> bool:
        # A monitor that takes the place of another one knows nothing for a while.
        return max(self.monitor.steps_of_rank0().count, self._steps_recorded.count) > 0

    def _lived_s(self) -> float:
        return 0.0 if self._started_at is None else self.clock.monotonic() - self._started_at

    def _evaluate_exits(self) -> None:
        self.workers.reap_exited()
        exits, self._exits = self._exits, []
        running = self._node.phase is machine.Phase.RUNNING
        hang = self.monitor.hang_report()
        # A hung rank may leave with code 0 when it is asked to: the monitor's word counts.
        failures = [
            self._failure(rank, status, seen_at)
            for rank, status, seen_at in exits
            if running and (status.code != 0 or rank in hang.get("ended", ()))
        ]
        if failures and hang:
            failures = self._with_culprit(failures, hang)
        self._errors = {}
        failed = {failure.local_rank for failure in failures}
        cause: Cause | None = None
        no_progress = is_hopeless = False
        if failures:
            self._failures = failures
            cause = faults.cause_of(faults.root_cause(failures))
            no_progress = self._makes_no_progress()
            is_hopeless = not self._node.policy.many_nodes and self._start_failures.is_hopeless(
                [_message_of(failure.error) for failure in failures],
                len(self.workers.started),
                self._lived_s(),
                stepped=self._has_stepped(),
            )
        for local_rank, status, _ in exits:
            self.reporter.worker_exited(local_rank, status)
            own = cause if local_rank in failed else None
            self._handle(
                machine.WorkerExited(
                    local_rank, status, own, no_progress, is_hopeless and own is not None
                )
            )
        if self._node.phase is machine.Phase.RUNNING:
            self._update_monitor()

    def _with_culprit(
        self, failures: list[faults.Failure], hang: dict[str, Any]
    ) -> list[faults.Failure]:
        """Return the failures with that of the rank waited for, which may be seen to fail last."""
        local_rank = hang["local_rank"]
        seen = {failure.local_rank: failure for failure in failures}
        status = ExitStatus(None, hang["signal"])
        culprit = seen.get(local_rank) or self._failure(local_rank, status, self.clock.wall())
        seen[local_rank] = dataclasses.replace(culprit, hang=hang)
        return list(seen.values())

    def _failure(self, local_rank: int, status: ExitStatus, seen_at: float) -> faults.Failure:
        assert self._assignment is not None
        started = self.workers.started[local_rank]
        return faults.Failure(
            rank=self._assignment.rank_offset + local_rank,
            local_rank=local_rank,
            pid=started.child.pid,
            host=self.host,
            status=status,
            seen_at=seen_at,
            error=self._error_of(local_rank, status),
        )

    def _error_of(self, local_rank: int, status: ExitStatus) -> exceptions.ErrorFile | None:
        """Return the exception of a rank: from `@record`, else from its stderr; it is read once."""
        if local_rank not in self._errors:
            error = exceptions.read_error_file(self._error_files.get(local_rank, ""))
            is_uncaught = status.code == UNCAUGHT_EXCEPTION
            if error is None and is_uncaught and local_rank in self._error_outputs:
                error = exceptions.read_error_output(*self._error_outputs[local_rank])
            self._errors[local_rank] = error
        return self._errors[local_rank]

    def _makes_no_progress(self) -> bool:
        iteration = self.monitor.last_iteration()
        if iteration is not None:
            self.job.tracker.update_iteration(iteration)
        self.job.tracker.analyze_previous_cycle()
        return self.job.tracker.should_terminate_early()

    def _join(self, effect: machine.Join) -> None:
        if self._barrier is not None:
            self._barrier.cancel()
        if effect.cause is not None:
            if self._assignment is None:  # It worked on nothing, so this is no restart of its own.
                logger.info("a new round is opened: %s", effect.cause.what)
            self.reporter.cycle_ended(effect.cause.what)
            self._cycle_start_time = self.clock.wall()
        self._assignment = None
        if self.workers.started:
            self.admission.workers_gone()
        self.admission.admit(effect.cycle, lambda unfit: self._admitted(effect.cycle, unfit))

    def _admitted(self, cycle: int, unfit: Cause | None) -> None:
        if unfit is not None:
            self.post(machine.NodeUnfit(unfit))
        elif self._node.phase is machine.Phase.JOINING:  # It may have ended meanwhile.
            self.rendezvous.join(cycle)

    def _start_workers(self, effect: machine.RoundReady) -> None:
        assignment = self._assignment = effect.assignment
        if self._budget is not None:
            now = self.clock.monotonic()
            self._budget.round_begins(assignment.cycle, assignment.restart_ages_s, now)
            self._report_budget()
        self.reporter.round_joined(assignment)
        self._failures = []
        self._ranks_in_hang = []
        self._steps_recorded = Steps(None, 0, self.clock.monotonic())
        self.admission.start(lambda: self._start_now(assignment))

    def _start_now(self, assignment: machine.Assignment) -> None:
        try:
            specs = self.job.specs(assignment, self._cycle_start_time)
            self._error_files = {spec.local_rank: spec.output.error_file for spec in specs}
            self._error_outputs = _error_outputs(specs)
            self._errors = {}
            self._others_until = None
            self.job.controller.cycle_begins()
            self.monitor.prepare(assignment.cycle)
            self.workers.start(specs, self.job.prewarm)
        except (NvrxError, OSError) as error:
            self.post(machine.StartFailed(Cause("start", str(error), host=self.host)))
            return
        self._started_at = self.clock.monotonic()
        self._update_monitor()
        self.reporter.workers_started(self.workers.started)

    def _report_budget(self) -> None:
        assert self._budget is not None
        now = self.clock.monotonic()
        self.post(machine.BudgetChanged(self._budget.left(now)))
        at = self._budget.next_change(now)
        if self._refill is not None:
            self._refill.cancel()
        self._refill = None if at is None else self.loop.call_at(at, self._report_budget)

    def _update_monitor(self) -> None:
        started, assignment = self.workers.started, self._assignment
        assert assignment is not None
        local_ranks = sorted(started)
        # Under min-healthy a node evaluates its ranks by itself: the others may go on without them.
        is_standalone = self._node.policy.min_healthy
        self.monitor.workers_changed(
            messages.WorkersChanged(
                self._node.cycle,
                [started[local_rank].child.pid for local_rank in local_ranks],
                [self._error_files.get(local_rank, "") for local_rank in local_ranks],
                [rank for rank in local_ranks if rank not in self._node.running],
                world_size=len(local_ranks) if is_standalone else assignment.world_size,
                rank_offset=assignment.rank_offset,
            )
        )

    def _started_again(self, local_rank: int) -> None:
        self._update_monitor()
        self.reporter.worker_started(local_rank, self.workers.started[local_rank])

    def _stop_workers(self, effect: machine.StopWorkers) -> None:
        self.admission.shut()
        if self._node.outcome is machine.Outcome.RESTART:
            self.admission.prepare()
        if self._node.outcome is machine.Outcome.SIGNALLED and self.workers.started:
            logger.warning(
                "workers get %s, and SIGKILL after %g s; SIGINT (Ctrl-C) now kills them at once",
                *(signal.Signals(effect.signum).name, effect.grace_s),
            )
        self.workers.stop(effect.signum, effect.grace_s)

    def _kill_workers(self, _effect: machine.KillWorkers) -> None:
        logger.warning("SIGINT: all workers are killed now")
        self.workers.kill()

    def _report_fault(self, effect: machine.ReportFault) -> None:
        self.reporter.fault(
            effect.cause,
            effect.outcome,
            effect.restarts_left,
            failures=self._failures,
            last_iteration=self.monitor.last_iteration(),
        )

    def _leave(self, effect: machine.LeaveRendezvous) -> None:
        self.rendezvous.perform(effect)
        if effect.cause.kind != "drained":
            self.job.bad_node.report(effect.cause)

    def _close_rendezvous(self, effect: machine.CloseRendezvous) -> None:
        self.rendezvous.perform(effect)
        self._has_closed = True

    def _report_success(self, effect: machine.ReportSuccess) -> None:
        self.rendezvous.perform(effect)
        at = self.clock.monotonic() + BARRIER_S
        self._barrier = self.loop.call_at(at, lambda: self.post(machine.BarrierTimedOut()))
        logger.info("all workers of this node ended well; waiting for the other nodes")

    def _record_finish(self, effect: machine.Finish) -> None:
        self._finish = effect

    def _tick_progress(self) -> None:
        if self._node.phase is machine.Phase.RUNNING:
            self._record_progress()
        self.loop.call_at(self.clock.monotonic() + PROGRESS_INTERVAL_S, self._tick_progress)

    def _record_progress(self) -> None:
        steps = self.monitor.steps_of_rank0()
        if steps.count > self._steps_recorded.count:
            self.reporter.progress(self._steps_recorded, steps)
            self._steps_recorded = steps


def _message_of(error: exceptions.ErrorFile | None) -> str | None:
    """Return the message of an exception that certainly ended its worker, else None."""
    return error.message if error is not None and error.is_last else None


def _error_outputs(specs: Sequence[workers.WorkerSpec]) -> dict[int, tuple[str, int]]:
    """Return the files that take workers' stderr, with their sizes before the workers start."""
    paths = {spec.local_rank: spec.output.stderr.path for spec in specs}
    return {rank: (path, _size_of(path)) for rank, path in paths.items() if path is not None}


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
