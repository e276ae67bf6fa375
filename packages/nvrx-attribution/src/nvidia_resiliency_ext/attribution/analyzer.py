# SPDX-License-Identifier: Apache-2.0
"""Accept logs that clients submit, read them, and return one result for each."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from nvidia_resiliency_ext.attribution import engine
from nvidia_resiliency_ext.attribution._live.history import JobHistory
from nvidia_resiliency_ext.attribution._live.jobs import JobTable, attempt_key, choose_file
from nvidia_resiliency_ext.attribution._live.journal import SubmissionJournal
from nvidia_resiliency_ext.attribution._live.replies import (
    failed_reply,
    recommendation_of,
    reply_of,
)
from nvidia_resiliency_ext.attribution._live.sessions import (
    FileState,
    LogSession,
    SessionTimes,
    state_of,
)
from nvidia_resiliency_ext.attribution.coalescing.coalescer import RequestCoalescer
from nvidia_resiliency_ext.attribution.orchestration.config import (
    DEFAULT_COMPUTE_TIMEOUT_SECONDS,
    ErrorCode,
)
from nvidia_resiliency_ext.attribution.orchestration.job import Job, JobMode
from nvidia_resiliency_ext.attribution.orchestration.progressive import (
    ANALYSIS_INTENT_PROGRESSIVE,
    ANALYSIS_INTENT_TERMINAL,
    normalize_analysis_intent,
)
from nvidia_resiliency_ext.attribution.orchestration.types import (
    LogAnalysisCycleResult,
    LogAnalysisSplitlogResult,
    LogAnalyzerConfig,
    LogAnalyzerError,
    LogAnalyzerFilePreview,
    LogAnalyzerSubmitResult,
)
from nvidia_resiliency_ext.attribution.orchestration.utils import (
    open_log,
    validate_log_path,
)
from nvidia_resiliency_ext.attribution.trace_analyzer.fr_support import (
    FRAnalysisResult,
    TraceAnalyzer,
)

__all__ = ["Analyzer", "CompletedAnalysis"]

logger = logging.getLogger("nvrx")

_PREVIEW_BYTES = 4096
_READERS = 2
_TRACES_AT_ONCE = 2  # each may take gigabytes and several processes
_TRACE_SHARE = 0.5  # of the time for a result: the log's verdict must still be in time
_MOST_GROWING = 64
_GRACE_S = 600.0
_LONGEST_NAME = 256
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

Result = LogAnalysisCycleResult | LogAnalysisSplitlogResult


@dataclass(frozen=True)
class CompletedAnalysis:
    """One finished analysis, for exports.

    Attributes:
        job: Its job.
        verdict: What was found.
        payload: The reply that clients get.
        duration_s: Seconds from the end of the job, or the first request, to the verdict.
        fr_result: What its dumps say; None without dumps.
    """

    job: Job
    verdict: engine.Verdict
    payload: dict[str, Any]
    duration_s: float
    fr_result: FRAnalysisResult | None = None


@dataclass
class _Log:
    """State of one file, beside the reply that the coalescer keeps.

    Attributes:
        session, task: Who reads it, while it is read.
        has_ended: Its job wrote the last line, or counts as ended.
        is_complete: Nothing more will be written; until it has been read.
        evidence: Lines of others about the end of the job; until it has been read.
        failure: Why it could not be read.
        is_overdue: Its analysis took too long.
        rested: State of the file and verdict when it was no longer read for want of new lines.
    """

    session: LogSession | None = None
    task: asyncio.Task[engine.Verdict | None] | None = None
    has_ended: bool = False
    is_complete: bool = False
    evidence: tuple[str, ...] | None = None
    failure: str | None = None
    is_overdue: bool = False
    rested: tuple[FileState | None, engine.Verdict] | None = None

    def begin_anew(self) -> None:
        """Forget how earlier analyses went."""
        self.failure, self.is_overdue, self.rested = None, False, None


class Analyzer:
    """Accept logs, read them while they grow, and answer for them; for one event loop.

    Args:
        allowed_root: Absolute path; nothing outside of it is read.
        use_lib_log_analysis: Results are `restart_agent_response.v1`; else the items of old.
            Default False.
        log_sage: Function (verdict) -> verdict, such as a model's refinement. Clients get the
            verdict of the rules at once, and the refined one in later requests; if it fails, the
            verdict does not change. Default: none.
        compute_timeout: Seconds from the end of a job to its result. Dumps that take more than half
            of them leave the verdict to the log. Default 300.
        grace_period_seconds: Time in which a result is used without checking the file. Default 600.
        coalescer: Shares computations; default: a new one.
        trace_analyzer: Finds and analyses dumps; default: one for the same root.
        times: Wait times for growing logs. Default: `SessionTimes()`.
        history: Attempts of jobs; default: in memory.
        journal: File of submissions, written before the answer; None: no journal.
        max_growing: Logs of running jobs that are read at the same time; 0: each is read when its
            job has ended. Default 64.
        policy: Retries that a site allows; None: the defaults.
        on_complete: Called in the event loop with each finished analysis; must not block. None:
            nothing is called.

    Raises:
        ConfigError: The root is not an absolute path.

    Example:
        >>> async def ask(path: str) -> str:
        ...     analyzer = Analyzer("/logs", use_lib_log_analysis=True)
        ...     await analyzer.submit(path, analysis_intent="terminal", log_complete=True)
        ...     return (await analyzer.analyze(path)).recommendation["action"]
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the public signature
        self,
        allowed_root: str,
        use_lib_log_analysis: bool = False,
        log_sage: Callable[[engine.Verdict], Awaitable[engine.Verdict]] | None = None,
        compute_timeout: float = DEFAULT_COMPUTE_TIMEOUT_SECONDS,
        grace_period_seconds: float = _GRACE_S,
        coalescer: RequestCoalescer | None = None,
        trace_analyzer: TraceAnalyzer | None = None,
        *,
        times: SessionTimes | None = None,
        history: JobHistory | None = None,
        journal: SubmissionJournal | None = None,
        max_growing: int = _MOST_GROWING,
        policy: engine.RetryPolicy | None = None,
        on_complete: Callable[[CompletedAnalysis], None] | None = None,
    ) -> None:
        LogAnalyzerConfig(allowed_root)
        self.allowed_root = os.path.realpath(allowed_root)
        self.coalescer = coalescer or RequestCoalescer(compute_timeout, grace_period_seconds)
        self._compute_timeout_s = compute_timeout
        self._is_lib = use_lib_log_analysis
        self._refine = log_sage
        self._traces = trace_analyzer or TraceAnalyzer(self.allowed_root)
        self._trace_turn = asyncio.Semaphore(_TRACES_AT_ONCE)
        self._times = times or SessionTimes()
        self._history = history or JobHistory()
        self._journal = journal
        self._max_growing = max_growing
        self._policy = policy
        self._on_complete = on_complete
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="nvrx-log-reader")
        self._jobs = JobTable(self.allowed_root)
        self._logs: defaultdict[str, _Log] = defaultdict(_Log)
        self._background: set[asyncio.Task[Any]] = set()

    async def submit(  # noqa: PLR0913 - the fields of a submission
        self,
        path: str,
        user: str = "unknown",
        job_id: str | None = None,
        cycle_id: int | None = None,
        analysis_intent: str | None = None,
        *,
        log_complete: bool = False,
        evidence: Sequence[str] = (),
        attempt_index: int | None = None,
    ) -> LogAnalyzerSubmitResult:
        """Accept a log; repeating a submission has no effect.

        Args:
            path: Absolute path; the file may be created later, its directory must exist.
            user: Owner of the job. Default "unknown".
            job_id: The job; None: not known.
            cycle_id: Number of the cycle, from 0; None: not known.
            analysis_intent: `track_only` (default), `progressive` or `terminal`.
            log_complete: Nothing more will be written to the log. Default False.
            evidence: Lines of others about the end of the job, read after the last line of the
                log; only those of the first terminal submission are used.
            attempt_index: Number of requeues of the job; a requeue begins with new cycles and logs.
                None: a requeue is assumed at a `progressive` submission of a log that has a
                verdict, and at another log for a cycle that has one.

        Raises:
            LogAnalyzerError: The path or the intent is refused, or the path has another job or
                cycle, or the job's cycle another path.
        """
        try:
            intent = normalize_analysis_intent(analysis_intent)
        except ValueError as error:
            raise LogAnalyzerError(ErrorCode.INVALID_PARAMETER, str(error)) from None
        for value in (user, job_id or ""):
            if len(value) > _LONGEST_NAME or not value.isprintable():
                raise LogAnalyzerError(ErrorCode.INVALID_PARAMETER, "user or job_id is no name")
        resolved = validate_log_path(path, self.allowed_root, must_exist=False)
        if self._jobs.get(resolved) is None:
            self._forget_oldest()
        job = self._jobs.register(resolved, user, job_id, cycle_id, attempt_index)
        await self._begin_attempt(job, self._attempt_of(job, intent, attempt_index))
        if self._journal is not None:
            self._journal.add(
                {
                    "log_path": resolved,
                    "user": user,
                    "job_id": job_id,
                    "cycle_id": cycle_id,
                    "analysis_intent": intent,
                    "log_complete": log_complete,
                    "evidence": list(evidence),
                    "attempt_index": job.attempt_index,
                }
            )
        self.coalescer.track_submission(resolved)
        self._jobs.look_for_split_log(job, self._is_analyzed)
        keys = [info.path for info in job.files[-1:]] or [resolved]
        for key in keys:
            if intent == ANALYSIS_INTENT_TERMINAL:
                self._end(key, job, tuple(evidence), is_complete=log_complete)
            elif intent == ANALYSIS_INTENT_PROGRESSIVE:
                self._grow(key, job)
        return LogAnalyzerSubmitResult(
            submitted=True,
            normalized_path=resolved,
            mode=job.mode.value,
            logs_dir=job.logs_dir,
            sched_restarts=job.sched_restarts,
            files_analyzed=sum(info.is_analyzed for info in job.files),
        )

    async def analyze(
        self,
        path: str,
        file: str | None = None,
        wl_restart: int | None = None,
        wait: bool = True,
    ) -> Result:
        """Return the result for a submitted log.

        Args:
            path: The path as it was submitted.
            file: Name of one file of a split log; None: as `wl_restart` says.
            wl_restart: Which of the files, counted from 0; default: the newest.
            wait: Return only when the analysis has ended; for a log that was only submitted, the
                job then counts as ended. Default True.

        Raises:
            LogAnalyzerError: The log was never submitted, or there is no such file.
        """
        resolved = validate_log_path(path, self.allowed_root, must_exist=False)
        job = self._jobs.get(resolved)
        if job is None:
            raise LogAnalyzerError(ErrorCode.NOT_FOUND, f"never submitted: {path}")
        self._jobs.look_for_split_log(job, self._is_analyzed)
        key, number = choose_file(job, file, wl_restart)
        kept = self.coalescer.peek(key)
        if kept is not None:
            return self._result(job, key, number, kept.value)
        log = self._logs[key]
        failed = self._failed(key, is_final=not wait)
        if failed is not None:
            return self._result(job, key, number, failed)
        session = log.session
        value: dict[str, Any] = {"result": None, "status": "in_flight"}
        if not wait:
            if session is not None:
                verdict = await session.candidate()
            elif log.rested is not None and not log.has_ended:
                verdict = log.rested[1]
            else:
                value["status"] = "in_flight" if log.has_ended else "pending"
                return self._result(job, key, number, value)
            value["candidate_recommendation"] = recommendation_of(verdict)
            return self._result(job, key, number, value)
        if session is not None and not log.has_ended and not await self._wait_for_end(session):
            value["candidate_recommendation"] = recommendation_of(await session.candidate())
            return self._result(job, key, number, value)
        log.has_ended = True
        try:
            done = await self.coalescer.get_or_compute(key, lambda: self._converge(key, job))
        except TimeoutError as error:
            return self._result(job, key, number, failed_reply(str(error), "TIMEOUT"))
        except (OSError, LogAnalyzerError) as error:
            return self._result(job, key, number, failed_reply(str(error)))
        return self._result(job, key, number, done.value)

    def read_file_preview(self, path: str) -> LogAnalyzerFilePreview:
        """Return the first 4 KiB of a log as text without control characters.

        Args:
            path: Absolute path of the log, below the allowed root.

        Raises:
            LogAnalyzerError: The path is refused.
        """
        resolved = validate_log_path(path, self.allowed_root)
        try:
            descriptor = open_log(resolved, self.allowed_root)
        except OSError as error:
            raise LogAnalyzerError(ErrorCode.NOT_READABLE, f"{path}: {error.strerror}") from None
        with open(descriptor, "rb") as log:
            text = log.read(_PREVIEW_BYTES).decode("utf-8", "replace")
        return LogAnalyzerFilePreview(_CONTROL.sub("?", text), resolved)

    @property
    def journal_problem(self) -> str:
        """Why submissions would be lost at a restart of the service now; empty: they would not."""
        return self._journal.problem if self._journal is not None else ""

    def get_stats(self) -> dict[str, Any]:
        """Return counts as a JSON object."""
        found = self.coalescer.get_stats()
        return {
            "jobs": len(self._jobs),
            "growing": self._count_growing(),
            "failed": sum(log.failure is not None for log in self._logs.values()),
            "cached": found.cached,
            "inflight": found.inflight,
            "submitted": found.submitted,
            "hits": found.stats.hits,
            "misses": found.stats.misses,
            "coalesced": found.stats.coalesced,
            "failures": found.stats.failures,
            "timeouts": found.stats.timeouts,
        }

    def get_all_jobs(self) -> list[dict[str, Any]]:
        """Return each submitted log with its state, the newest last."""
        found = []
        for job in self._jobs:
            key = job.files[-1].path if job.files else job.path
            kept, log = self.coalescer.peek(key), self._logs.get(key, _Log())
            status = "pending"
            if kept is not None:
                status = kept.value.get("status", "completed")
            elif log.failure is not None or log.is_overdue:
                status = "failed"
            elif log.session is not None:
                status = "in_flight"
            recommendation = kept.value.get("recommendation") if kept is not None else None
            found.append(
                {
                    "log_path": job.path,
                    "user": job.user,
                    "job_id": job.job_id,
                    "cycle_id": job.cycle_id,
                    "mode": job.mode.value,
                    "status": status,
                    "recommendation": recommendation,
                }
            )
        return found

    async def shutdown_async(self) -> None:
        """Stop reading; submissions without a result stay in the journal."""
        tasks = [*self._background, *(log.task for log in self._logs.values() if log.task)]
        for task in tasks:
            task.cancel()
        await self.coalescer.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.shutdown()

    def shutdown(self) -> None:
        """Close the thread pool and the journal, which belong to no event loop."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._journal is not None:
            self._journal.close()

    async def resume(self) -> int:
        """Submit the journal's unfinished submissions again, and return their number."""
        left = list(self._journal.open_submissions) if self._journal is not None else []
        count = 0
        for value in left:
            try:
                await self.submit(
                    value["log_path"],
                    value["user"],
                    value["job_id"],
                    value["cycle_id"],
                    value["analysis_intent"],
                    log_complete=value["log_complete"],
                    evidence=value.get("evidence", ()),
                    attempt_index=value.get("attempt_index"),
                )
                count += 1
            except (LogAnalyzerError, KeyError, TypeError) as error:
                logger.warning("a submission of the journal is left out: %s", error)
        return count

    def _forget_oldest(self) -> None:
        for job in self._jobs.forget_oldest(lambda job: any(map(self._is_read, _keys(job)))):
            for key in _keys(job):
                self._logs.pop(key, None)
            if self._journal is not None:
                self._journal.end(job.path)

    def _is_read(self, key: str) -> bool:
        log = self._logs.get(key)
        return (log is not None and log.task is not None) or self.coalescer.is_running(key)

    def _is_analyzed(self, path: str) -> bool:
        return self.coalescer.peek(path) is not None

    def _attempt_of(self, job: Job, intent: str, given: int | None) -> int:
        """Return which attempt of the scheduler a submission is about."""
        if given is None:
            name, cycle_id = attempt_key(job.path, job)
            given = self._history.newest_attempt(name)
            begins = intent == ANALYSIS_INTENT_PROGRESSIVE and self._history.has(job.path, given)
            given += begins or self._history.is_taken(job.path, name, cycle_id, given)
        return max(given, job.attempt_index)

    async def _begin_attempt(self, job: Job, attempt_index: int) -> None:
        """Forget the result of an earlier attempt with the same log; one that has none ends."""
        if attempt_index <= job.attempt_index:
            return
        log = self._logs[job.path]
        if log.session is not None and log.task is not None:
            log.session.end(is_complete=True)
            await asyncio.wait({log.task}, timeout=self._compute_timeout_s)
        if attempt_index > job.attempt_index:
            job.attempt_index = attempt_index
            self.coalescer.forget(job.path)
            log.has_ended = False
            log.begin_anew()

    def _end(self, key: str, job: Job, evidence: tuple[str, ...], *, is_complete: bool) -> None:
        log = self._logs[key]
        log.has_ended = True
        log.is_complete |= is_complete
        if self._is_outdated(key):
            self.coalescer.forget(key)
        log.begin_anew()
        if self.coalescer.peek(key) is None and log.evidence is None:
            log.evidence = evidence
        if log.session is not None:
            log.session.evidence = evidence if log.evidence is None else log.evidence
            log.session.end(is_complete=is_complete)
        if not self.coalescer.is_running(key) and self.coalescer.peek(key) is None:
            self._in_background(self._compute(key, job))

    def _is_outdated(self, key: str) -> bool:
        kept = self.coalescer.peek(key)
        if kept is None:
            return False
        try:
            return os.stat(key).st_size != kept.size
        except OSError:
            return False

    def _grow(self, key: str, job: Job) -> None:
        log = self._logs[key]
        if log.session is not None or self.coalescer.peek(key) is not None or log.has_ended:
            return
        if log.rested is not None and log.rested[0] == state_of(key):
            return  # what it says is known
        count = self._count_growing()
        if count >= self._max_growing:
            if self._max_growing:
                logger.warning("%d logs are being read; %s waits for its end", count, key)
            return
        self._in_background(self._follow(key, self._read(key, job)[1]))

    def _count_growing(self) -> int:
        return sum(log.session is not None for log in self._logs.values())

    async def _compute(self, key: str, job: Job) -> None:
        try:
            await self.coalescer.get_or_compute(key, lambda: self._converge(key, job))
        except (OSError, TimeoutError, LogAnalyzerError) as error:
            logger.warning("no verdict about %s: %s", key, error)

    async def _follow(self, key: str, task: asyncio.Task[engine.Verdict | None]) -> None:
        try:
            await asyncio.shield(task)
        except (OSError, LogAnalyzerError) as error:
            self._logs[key].failure = str(error)
            logger.warning("%s cannot be read: %s", key, error)

    def _read(self, key: str, job: Job) -> tuple[LogSession, asyncio.Task[engine.Verdict | None]]:
        """Return the session that reads a log, and its task; there is one per log."""
        log = self._logs[key]
        if log.session is not None and log.task is not None:
            return log.session, log.task
        name, cycle_id = attempt_key(key, job)
        session = LogSession(
            key,
            self.allowed_root,
            job=name,
            cycle_id=cycle_id,
            attempt_index=job.attempt_index,
            history=self._history,
            times=self._times,
            pool=self._pool,
            traces=self._traces,
            trace_turn=self._trace_turn,
            trace_limit_s=self._compute_timeout_s * _TRACE_SHARE,
            policy=self._policy,
        )
        if log.has_ended:
            session.end(is_complete=log.is_complete)
        task = asyncio.ensure_future(session.run())
        log.session, log.task = session, task

        def forget(_: object) -> None:
            log.session = log.task = None
            log.rested = None if log.has_ended else session.rested

        task.add_done_callback(forget)
        return session, task

    async def _converge(self, key: str, job: Job) -> dict[str, Any]:
        """Read a log to its end and return the reply; failures are remembered."""
        log = self._logs[key]
        log.is_overdue = False
        started_s = time.monotonic()
        try:
            verdict = None
            while verdict is None:  # a session that was idle gives way to a new one
                session, task = self._read(key, job)
                if log.has_ended:
                    session.end(is_complete=log.is_complete)
                session.evidence = log.evidence or ()
                verdict = await asyncio.shield(task)
        except (OSError, LogAnalyzerError) as error:
            log.failure = str(error)
            raise
        except asyncio.CancelledError:  # by the coalescer: the time is over
            log.is_overdue = True
            raise
        finally:
            log.is_complete, log.evidence = False, None
        payload = reply_of(verdict, session.dump_path, is_lib=self._is_lib)
        if self._journal is not None:
            self._journal.end(job.path)
        seconds = time.monotonic() - started_s
        done = CompletedAnalysis(job, verdict, payload, seconds, session.fr_result)
        if self._refine is not None:
            self._in_background(self._refine_result(key, done, session.dump_path))
        elif self._on_complete is not None:
            self._on_complete(done)
        return payload

    async def _refine_result(
        self, key: str, done: CompletedAnalysis, dump_path: str | None
    ) -> None:
        """Put the refined result in the place of the one that clients have already."""
        assert self._refine is not None
        try:
            refined = await self._refine(done.verdict)
            payload = reply_of(refined, dump_path, is_lib=self._is_lib)
            done = replace(done, verdict=refined, payload=payload)
            self.coalescer.revise(key, payload)
        except Exception:
            # Boundary: the function is the caller's, and the verdict of the rules is out.
            logger.exception("the verdict about %s is not refined", key)
        if self._on_complete is not None:
            self._on_complete(done)

    def _failed(self, key: str, *, is_final: bool) -> dict[str, Any] | None:
        """Return the reply about a failed analysis; one that took too long may be tried again."""
        if self.coalescer.is_running(key):
            return None
        log = self._logs[key]
        if log.failure is not None:
            return failed_reply(log.failure)
        if log.is_overdue and is_final:
            reason = f"{key}: not done within {self._compute_timeout_s:g} s"
            return failed_reply(reason, "TIMEOUT")
        return None

    def _result(self, job: Job, key: str, number: int, value: dict[str, Any]) -> Result:
        if job.mode is JobMode.SPLITLOG and job.files:
            return LogAnalysisSplitlogResult(
                **value, sched_restarts=job.sched_restarts, log_file=key, wl_restart=number
            )
        return LogAnalysisCycleResult(**value, wl_restart=number)

    async def _wait_for_end(self, session: LogSession) -> bool:
        try:
            await asyncio.wait_for(session.has_ended.wait(), self._compute_timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            return False
        return True

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _keys(job: Job) -> list[str]:
    return [job.path, *(info.path for info in job.files)]
