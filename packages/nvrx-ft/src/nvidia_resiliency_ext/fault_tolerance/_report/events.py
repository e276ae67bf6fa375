# SPDX-License-Identifier: Apache-2.0
"""What the launcher says about a job: log lines, events and failure records, in one place.

It measures the durations between the agent's calls and decides nothing; a record that cannot be
written never stops the job.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from nvidia_resiliency_ext.fault_tolerance._core.machine import (
    ATTRIBUTION,
    Assignment,
    Cause,
    Outcome,
)
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import Steps
from nvidia_resiliency_ext.fault_tolerance._workers.workers import STILL_IMPORTING, Started
from nvidia_resiliency_ext.shared_utils import events, health_check
from nvidia_resiliency_ext.shared_utils.children import ExitStatus
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks

from .failures import HOW_TO_SEE_IT, Failure, FailureLog

logger = logging.getLogger("nvrx")

MAX_SHOWN_STACKS = 16_384
_HEALTH_WORDS = {"healthy": "pass", "unhealthy": "fail", "skipped": "skipped"}


@dataclass(eq=False)
class EventReporter:
    """The launcher's record of one job on one node. One thread only."""

    log: events.EventLog
    failures: FailureLog
    clock: Clock
    _: KW_ONLY
    host: str
    shows_stacks: bool
    on_cycle_ended: Callable[[Cause | None], None] = lambda _: None
    # Called at each cycle's start, with the process ids by local rank.
    on_started: Callable[[Assignment, Mapping[int, int]], None] = lambda *_: None

    def __post_init__(self) -> None:
        self._assignment: Assignment | None = None
        self._cycle = 0
        self._rank_offset = 0
        self._started_at: float | None = None
        self._first_steps: set[int] = set()
        # What ends the cycle, and what its failure record says of that.
        self._fault: tuple[Cause, Outcome] | None = None
        self._failure: dict[str, object] = {}
        self._done: list[int] = []
        self._health: dict[str, str] = {}
        # When the present restart's fault, stopped, joined and started happened (monotonic s).
        self._times: dict[str, float] = {}
        self._has_hinted = False
        self.restarts = 0
        self.faults = 0

    def job_started(self, *, argv: Sequence[str], nnodes: str, nproc: int, policy: str) -> None:
        """Record the job's start; of the command line only a digest, it may hold secrets."""
        digest = f"{zlib.crc32(chr(0).join(argv).encode(errors='backslashreplace')):08x}"
        self._record(events.JobStart(argv_hash=digest, nnodes=nnodes, nproc=nproc, policy=policy))

    def round_joined(self, assignment: Assignment) -> None:
        """Record that the rendezvous of a cycle is complete."""
        self._times["joined"] = self.clock.monotonic()
        self._assignment = assignment
        self._cycle = assignment.cycle
        self._rank_offset = assignment.rank_offset
        reason = self._fault[0].what if self._fault else "start"
        self._record(
            events.CycleStart(
                world_size=assignment.world_size,
                nodes=assignment.group_world_size,
                reason=reason,
                clock_off_s=assignment.clock_off_s or None,
            )
        )

    def workers_started(self, workers: Mapping[int, Started]) -> None:
        """Record how each worker was started; the time runs from here to the first step."""
        self._started_at = self._times["started"] = self.clock.monotonic()
        self._done = []
        self._first_steps.clear()
        reasons = set()
        for local_rank, started in workers.items():
            self.worker_started(local_rank, started)
            if started.cold_reason and started.cold_reason != STILL_IMPORTING:
                reasons.add(started.cold_reason)
        logger.info(
            "cycle %d: %s started (%s), pids %s",
            self._cycle,
            _counted(len(workers), "worker"),
            _origins(workers.values()),
            ",".join(str(started.child.pid) for started in workers.values()),
        )
        if self._assignment is not None:
            pids = {local_rank: started.child.pid for local_rank, started in workers.items()}
            self.on_started(self._assignment, pids)
        for reason in sorted(reasons):
            logger.info("cycle %d: cold start: %s", self._cycle, reason)
        if self._fault is not None:
            self.restarts += 1
            durations = self._durations()
            self.record_phase("rendezvous", durations["rendezvous_s"])
            self.record_phase("start", durations["start_s"])
            self._write_failure(self._cycle - 1)

    def worker_started(self, local_rank: int, started: Started) -> None:
        event = events.WorkerStart(
            warm=started.warm, cold_reason=started.cold_reason, saved_s=started.saved_s or None
        )
        self._record(event, local_rank=local_rank)

    def first_step(self, local_rank: int, at: float) -> None:
        """Record a rank's first heartbeat or finished step at `at` (monotonic s)."""
        if self._started_at is None or local_rank in self._first_steps:
            return
        self._first_steps.add(local_rank)
        duration = max(0.0, at - self._started_at)
        self._record_at(at, events.FirstStep(dur_s=round(duration, 6)), local_rank)

    def progress(self, before: Steps, now: Steps) -> None:
        """Record how far local rank 0 has come since `before`."""
        event = events.Progress(
            iteration=now.iteration,
            steps=now.count - before.count,
            window_s=round(now.last_at - before.last_at, 3),
        )
        self._record_at(now.last_at, event, 0)

    def worker_exited(self, local_rank: int, status: ExitStatus) -> None:
        if status.code == 0:
            self._done.append(self._rank_offset + local_rank)
        self._record(
            events.WorkerExit(exit_code=status.code, signal=status.signal), local_rank=local_rank
        )

    def prewarm_changed(
        self, slot: int, state: str, seconds: float | None, private_bytes: int | None
    ) -> None:
        private_mb = None if private_bytes is None else round(private_bytes / 1e6, 1)
        self._record(events.Standby(slot=slot, state=state, seconds=seconds, private_mb=private_mb))

    def fault(
        self,
        cause: Cause,
        outcome: Outcome,
        restarts_left: int,
        *,
        failures: Iterable[Failure],
        last_iteration: int | None,
    ) -> None:
        """Record the cause of a cycle's end, and the outcome."""
        if self._fault is not None and self._fault[1] is Outcome.RESTART:
            # The restart it promised does not come: this is what comes instead.
            self._write_failure(self._cycle)
        self.faults += 1
        self._fault = cause, outcome
        self._failure = {
            "outcome": outcome.value,
            "rank": cause.rank,
            "local_rank": cause.local_rank,
            "cause": cause.kind,
            "what": cause.what,
            "exit_code": cause.exit_code,
            "signal": cause.signal,
            "detected_by": cause.detected_by,
            "detail": dict(cause.detail),
            "also_failed": [
                f"rank {failure.rank}: {failure.status.describe()}"
                for failure in failures
                if failure.rank != cause.rank
            ],
            "last_iteration": last_iteration,
        }
        self._times = {"fault": self.clock.monotonic()}
        if cause.detected_by != "monitor" or self._speaks_of(cause):
            self.log.record(
                events.Fault(cause=cause.kind, what=cause.what, detected_by=cause.detected_by),
                cycle=self._cycle,
                rank=cause.rank,
            )
        self._say_what_follows(cause, outcome, restarts_left)
        if cause.kind == "exited" and cause.exit_code == 1 and not self._has_hinted:
            self._has_hinted = True
            logger.info("the exception, if there was one, is not known here; %s", HOW_TO_SEE_IT)
        if self._done and cause.kind in ("exited", "exception"):
            logger.warning(
                "rank %s ended with exit code 0 before that: others may have failed for want of it",
                format_ranks(self._done),
            )
        if self.shows_stacks:
            self._show_stacks(cause)

    def _say_what_follows(self, cause: Cause, outcome: Outcome, restarts_left: int) -> None:
        if outcome is Outcome.RESTART:
            left = _counted(max(0, restarts_left - 1), "restart")
            logger.warning("restarting because %s (%s left after this one)", cause.what, left)
        elif outcome is Outcome.LEAVE:
            logger.error("this node leaves the job: %s", cause.what)
        elif outcome is Outcome.OVER:
            logger.error("stopping, the job is over: %s", cause.what)
        elif outcome is Outcome.TOLERATED:
            logger.warning("going on as long as enough nodes are healthy: %s", cause.what)
        elif outcome is Outcome.NO_RESTART:
            why = "" if cause.kind == ATTRIBUTION else "no progress: "
            logger.error("stopping for good, %s%s", why, cause.what)
        elif cause.kind == "start":
            logger.error("stopping for good, the workers cannot be started: %s", cause.what)
        elif restarts_left > 0:
            logger.error(
                "stopping for good: all ranks failed before any step with the same error of the "
                "program as in the cycle before, which no restart mends (%s not used; "
                "--ft-start-failure-limit=0 would use them): %s",
                _counted(restarts_left, "restart"),
                cause.what,
            )
        else:
            # The cycle's number counts the restarts.
            hint = "" if self._cycle else " (--max-restarts N would allow N)"
            logger.error("stopping for good, no restart left%s: %s", hint, cause.what)

    def _speaks_of(self, cause: Cause) -> bool:
        """Return whether this node is the one that records a hang that all nodes evaluated."""
        if "limit_words" not in cause.detail:
            return False  # one monitor evaluated it, and has recorded it
        return cause.local_rank is not None or (cause.rank is None and self._rank_offset == 0)

    def _show_stacks(self, cause: Cause) -> None:
        """Put the stacks of a hang into the log, when their files will not be kept."""
        ranks = cause.detail.get("ranks")
        left = MAX_SHOWN_STACKS
        for rank in ranks if isinstance(ranks, list) else ():
            text = _text_of(rank["stacks"], left) if rank["stacks"] else ""
            if text:
                left -= len(text)
                logger.error("stacks of rank %s:\n%s", rank["rank"], text)

    def workers_stopped(self) -> None:
        self._times["stopped"] = self.clock.monotonic()
        self.record_phase("stop", self._durations()["stop_s"])

    def node_checked(self, results: Iterable[health_check.HealthResult]) -> None:
        """Record failed health checks, and checks whose result changed since the last time."""
        for result in results:
            word = _HEALTH_WORDS[result.status]
            if result and self._health.get(result.name) == word:
                continue
            self._health[result.name] = word
            said = result.reason or None
            self._record(events.Health(check=result.name, result=word, evidence=said))

    def cycle_ended(self, result: str) -> None:
        self._record(events.CycleEnd(result=result))
        self.on_cycle_ended(self._fault[0] if self._fault else None)

    def _durations(self) -> dict[str, float | None]:
        """Return seconds between the steps of a restart; None where one did not happen."""

        def between(begin: str, end: str) -> float | None:
            times = self._times
            return round(times[end] - times[begin], 6) if {begin, end} <= times.keys() else None

        return {
            "stop_s": between("fault", "stopped"),
            "rendezvous_s": between("stopped", "joined"),
            "start_s": between("joined", "started"),
        }

    def _write_failure(self, cycle: int) -> None:
        if self._fault is None:
            return
        self._fault = None
        about = {"time": self.clock.wall(), "host": self.host, "cycle": cycle}
        self.failures.write({**about, **self._failure, **self._durations()})

    def job_ended(self, result: str, code: int, *, over: bool | None = None) -> None:
        """Record the end of the job and close nothing: the event log belongs to the caller."""
        self._write_failure(self._cycle)
        end = events.JobEnd(result=result, exit_code=code, restarts=self.restarts, is_over=over)
        self._record(end)
        log = logger.info if code == 0 else logger.error
        restarts = _counted(self.restarts, "restart")
        log("job ended with exit code %d: %s (%s)", code, result, restarts)

    def record_phase(self, name: str, seconds: float | None) -> None:
        """Record the duration of a phase of a restart; None records nothing."""
        if seconds is not None:
            self._record(events.Phase(name=name, dur_s=seconds))

    def _record_at(self, at: float, event: events.Event, local_rank: int) -> None:
        """Record an event that happened at `at` (monotonic s) and was noticed later."""
        self.log.record(
            event,
            cycle=self._cycle,
            rank=self._rank_offset + local_rank,
            t=self.clock.wall() - (self.clock.monotonic() - at),
            m=at,
        )

    def _record(self, event: events.Event, *, local_rank: int | None = None) -> None:
        rank = None if local_rank is None else self._rank_offset + local_rank
        self.log.record(event, cycle=self._cycle, rank=rank)


def _origins(workers: Iterable[Started]) -> str:
    """Return how many workers were prewarmed, by how far they were, and how many started cold."""
    counts = {"from ready standbys": 0, "from standbys still importing": 0, "cold": 0}
    for started in workers:
        if started.warm:
            counts["from ready standbys"] += 1
        elif started.cold_reason == STILL_IMPORTING:
            counts["from standbys still importing"] += 1
        else:
            counts["cold"] += 1
    return ", ".join(f"{count} {how}" for how, count in counts.items() if count)


def _text_of(path: str, limit: int) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(limit)
    except OSError:
        return ""


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
