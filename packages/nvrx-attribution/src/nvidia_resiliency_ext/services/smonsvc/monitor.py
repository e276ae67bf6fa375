# SPDX-License-Identifier: Apache-2.0
"""The loop: see jobs come and go, and have the logs of those that went analysed."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence

from nvidia_resiliency_ext.attribution._core.files import lock_for_life
from nvidia_resiliency_ext.services.smonsvc.job_handlers import (
    ServiceClient,
    fetch_results,
    log_attribution_result,
    submit_log,
)
from nvidia_resiliency_ext.services.smonsvc.models import (
    JobState,
    MonitoredJob,
    MonitorState,
    SlurmJob,
)
from nvidia_resiliency_ext.services.smonsvc.slurm import (
    JobRecord,
    SlurmClient,
    SlurmError,
    expand_path,
)
from nvidia_resiliency_ext.services.smonsvc.status_server import DEFAULT_STATUS_HOST, StatusServer
from nvidia_resiliency_ext.shared_utils.attribution_wire import INTENT_PROGRESSIVE, INTENT_TERMINAL
from nvidia_resiliency_ext.shared_utils.credentials import TokenFile
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.json_http import JsonConnection, parse_endpoint

__all__ = ["SlurmJobMonitor"]

logger = logging.getLogger("nvrx")

_MOST_TRIES = 10
_MOST_MISSES = 3
_MOST_LOOKS = 480  # a day at the default interval
_RESULT_PAUSE_S = 2.0
_PAUSE_GROWTH = 1.5  # all together 2.5 minutes: logs may grow for 40 s after a job's end


class SlurmJobMonitor:
    """Watches the jobs of a cluster.

    Args:
        attrsvc_url: The attribution service: `http://h:p`, `https://h:p` or `unix:///path`.
        poll_interval: Seconds between two looks at the queue. Default 180.
        user: Only this user's jobs; None: as `all_users` says.
        all_users: Whether the jobs of all users count where `user` is None; else only one's own.
            Default True.
        partitions: Only jobs in these; empty: in all. Default `batch` and `batch_long`.
        job_pattern: Only jobs in whose name this regular expression is found. Default: all.
        timeout: Seconds that one call of Slurm or one request may take. Default 60.
        port: Where counts and jobs are shown; None: nowhere.
        host: At which address. Default 127.0.0.1.
        token_file: File with the token of the service; None: it asks for none.
        status_token_file: File with the token that is asked for where counts are shown; None: all
            may look.
        state_file: Where jobs are kept over restarts; None: nowhere.

    Attributes:
        state: What is known.

    Raises:
        ConfigError: An argument is unusable, or Slurm's programs are missing.

    Example:
        >>> monitor = SlurmJobMonitor("http://attrsvc:8000", partitions=())  # doctest: +SKIP
        >>> monitor.run()  # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the public signature
        self,
        attrsvc_url: str,
        poll_interval: float = 180,
        user: str | None = None,
        all_users: bool = True,
        partitions: Sequence[str] = ("batch", "batch_long"),
        job_pattern: str | None = None,
        timeout: float = 60,
        port: int | None = None,
        host: str = DEFAULT_STATUS_HOST,
        *,
        token_file: str | None = None,
        status_token_file: str | None = None,
        state_file: str | None = None,
    ) -> None:
        endpoint = parse_endpoint(attrsvc_url)
        if endpoint is None:
            raise ConfigError(
                f"{attrsvc_url!r:.200} is no service: write http://HOST:PORT, https://HOST:PORT or"
                " unix:///PATH"
            )
        try:
            self._pattern = re.compile(job_pattern or "")
        except re.error as error:
            message = f"job pattern {job_pattern!r:.200} is no regular expression: {error}"
            raise ConfigError(message) from None
        if user is None and not all_users:
            user = str(os.geteuid())
        self._slurm = SlurmClient(timeout, user, partitions)
        token = None if token_file is None else TokenFile(token_file)
        self.state = MonitorState()
        self._state_file = state_file
        self._poll_interval_s = poll_interval
        self._lock = -1
        self._ended = threading.Event()
        self._client = ServiceClient(JsonConnection(endpoint, timeout, token), self._ended)
        self._server: StatusServer | None = None
        try:
            if state_file is not None:
                self._load(state_file)
            if port is not None:
                self._server = StatusServer(self.state, port, host, status_token_file)
                logger.info("counts and jobs are shown at http://%s:%d", host, self._server.port)
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Look again and again until `stop` is called."""
        try:
            while not self._ended.is_set():
                self.poll_once()
                self._ended.wait(self._poll_interval_s)
        finally:
            self.close()

    def close(self) -> None:
        """Close connection, status server and state file; harmless when repeated."""
        self._client.close()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def stop(self) -> None:
        """End `run` after the request that is under way; from any thread or signal handler."""
        self._ended.set()

    def poll_once(self) -> None:
        """Look at the queue once, and do what follows from it."""
        is_reachable = self._client.is_alive()
        self._count("squeue")
        try:
            self._see(self._slurm.queue(), submits=is_reachable)
        except SlurmError as error:
            self._count("squeue_failed")
            logger.warning("%s; the next look is in %g s", error, self._poll_interval_s)
        if is_reachable:
            self._submit_ended()
            self._fetch()
            self._give_up_old()
        elif self.state.is_reachable:
            logger.warning("the attribution service does not answer; logs are submitted later")
        with self.state.lock:
            self.state.is_reachable = self._client.is_reachable
            self.state.forget_old()
        if self._state_file is not None:
            self._save(self._state_file)

    # What Slurm says ---------------------------------------------------------------------------

    def _see(self, queue: Sequence[SlurmJob], *, submits: bool) -> None:
        """Take over new jobs, and find out how those ended that are gone.

        Raises:
            SlurmError: Slurm does not say.
        """
        here = {job.job_id: job for job in queue if self._pattern.search(job.name)}
        known = self.state.jobs
        # A job that was requeued is in the queue again after its end, which may have been missed.
        over = {job_id for job_id, job in known.items() if job.is_done and job.has_ended}
        missed = [
            job
            for job_id, job in known.items()
            if job_id in here and not job.has_ended and _is_another_run(job, here[job_id])
        ]
        new = [job for job in here.values() if job.job_id not in known or job.job_id in over]
        open_jobs = [job for job in self.state.open_jobs() if job.job_id not in over]
        pathless = [job for job in open_jobs if job.job_id in here and not job.log_path]
        gone = [job for job in open_jobs if job.job_id not in here and not job.has_ended]
        waiting = [
            job
            for job in known.values()
            if job.awaits_run and job.is_done and job.job_id not in here
        ]
        asked = [job.job_id for job in new]
        asked += [job.job_id for job in (*pathless, *gone, *waiting)]
        records = self._slurm.records(asked)
        requeued = [job for job in gone if _was_requeued(job, records.get(job.job_id))]
        runs = self._slurm.earlier_runs([job.job_id for job in (*missed, *requeued)])
        self._see_runs_between(waiting, records)
        for seen in new:
            job = MonitoredJob(
                *(seen.job_id, seen.user, seen.name),
                state=seen.state.value,
                started=seen.started,
                attempt_index=records[seen.job_id].restarts if seen.job_id in records else -1,
            )
            with self.state.lock:
                known.pop(seen.job_id, None)
                known[seen.job_id] = job
            pathless.append(job)
        for job in pathless:
            record = records.get(job.job_id)
            if record is not None:
                job.log_path = expand_path(record.log_path, here[job.job_id])
        for job in requeued:
            job.log_path = job.log_path or records[job.job_id].log_path
        # The next run of a job takes its place when this one's verdict is there.
        for job in (*missed, *requeued):
            self._end_run(job, runs.get((job.job_id, job.started)))
        running = [job for job in self.state.open_jobs() if not job.has_ended]
        for job in running:
            if submits and job.job_id in here and job.log_path and not job.is_submitted:
                job.is_done = self._submit(job, INTENT_PROGRESSIVE) is False
        for job in gone:
            if not job.has_ended:
                self._end(job, records.get(job.job_id))

    def _end_run(self, job: MonitoredJob, record: JobRecord | None) -> None:
        """Store the end of a job's run after which it was requeued, as accounting gives it."""
        job.state = JobState.REQUEUED.value if record is None else record.state.value
        job.evidence = [] if record is None else list(record.evidence())
        job.has_ended = job.awaits_run = True
        if not job.log_path:
            self._give_up(job, "Slurm does not say where its output is")

    def _see_runs_between(
        self, waiting: Sequence[MonitoredJob], records: Mapping[str, JobRecord]
    ) -> None:
        """Take over the next runs of requeued jobs that began and ended between two looks."""
        for job in waiting:
            record = records.get(job.job_id)
            if record is not None and not record.state.is_terminal:
                continue
            job.awaits_run = False
            if record is None or record.state is JobState.CANCELLED:
                continue  # it did not run again
            run = MonitoredJob(*(job.job_id, job.user, job.name, job.log_path))
            run.attempt_index = max(record.restarts, job.attempt_index + 1)
            with self.state.lock:
                self.state.jobs.pop(job.job_id)
                self.state.jobs[job.job_id] = run
            self._end(run, record)

    def _end(self, job: MonitoredJob, record: JobRecord | None) -> None:
        """Store the end of a job that is not in the queue any more."""
        if record is None or record.state is JobState.UNKNOWN:
            job.misses += 1
            if job.misses < _MOST_MISSES:
                return
            job.state = JobState.UNKNOWN.value
        elif not record.state.is_terminal:
            return  # suspended: it comes back
        else:
            job.state = record.state.value
            job.evidence = list(record.evidence())
            job.log_path = job.log_path or record.log_path
        job.has_ended = True
        if not job.log_path:
            self._give_up(job, "Slurm does not say where its output is")

    # What the service says ---------------------------------------------------------------------

    def _submit(self, job: MonitoredJob, intent: str) -> bool | None:
        found = submit_log(self._client, job, intent, tuple(job.evidence))
        job.is_submitted = job.is_submitted or found is True
        self._count({True: "submitted", False: "refused", None: "not_submitted"}[found])
        return found

    def _submit_ended(self) -> None:
        """Tell the service of each end; what it does not take now is left for the next look."""
        for job in self.state.open_jobs():
            if not job.has_ended or job.is_terminal_submitted or self._ended.is_set():
                continue
            found = self._submit(job, INTENT_TERMINAL)
            if found is None and not self._client.is_reachable:
                return
            job.is_terminal_submitted = found is True
            if found is False:
                job.is_done = True

    def _fetch(self) -> None:
        """Ask for the results of all jobs that have ended, 10 times each at most in 2.5 minutes.

        A reply that may change, such as 401 or 503, ends this until the next look.
        """
        for tried in range(_MOST_TRIES):
            waiting = [job for job in self.state.open_jobs() if job.is_terminal_submitted]
            for job in waiting:
                if self._ended.is_set():
                    return
                result = fetch_results(self._client, job)
                if self._client.is_refused:
                    with self.state.lock:  # another job is asked about first next time
                        self.state.jobs[job.job_id] = self.state.jobs.pop(job.job_id)
                    return
                if result is not None:
                    log_attribution_result(job, result)
                    job.is_done = True
                    self._count("results")
                elif job.tries >= _MOST_TRIES:
                    self._give_up(job, "the service has no result")
            pause_s = _RESULT_PAUSE_S * _PAUSE_GROWTH**tried
            if all(job.is_done for job in waiting) or self._ended.wait(pause_s):
                return

    def _give_up_old(self) -> None:
        """Give up jobs whose end brought no result in a day of looks with a reply."""
        for job in self.state.open_jobs():
            if job.has_ended:
                job.looks += 1
                if job.looks >= _MOST_LOOKS:
                    self._give_up(job, f"no result after {job.looks} looks; see the service's log")

    def _give_up(self, job: MonitoredJob, why: str) -> None:
        job.problem, job.is_done = why, True
        self._count("given_up")
        logger.warning("job %s: %s", job.job_id, why)

    # What is kept ------------------------------------------------------------------------------

    def _count(self, name: str) -> None:
        with self.state.lock:
            self.state.counts[name] += 1

    def _load(self, path: str) -> None:
        self._lock = lock_for_life(f"{path}.lock", f"the state {path}")
        damaged = self.state.load(path)
        if damaged:
            logger.warning("%d lines of the state %s are damaged and left out", damaged, path)
        try:
            self.state.save(path)  # what cannot be written is to be known at once
        except OSError as error:
            raise ConfigError(f"the state {path} cannot be written: {error.strerror}") from None

    def _save(self, path: str) -> None:
        try:
            self.state.save(path)
        except OSError as error:
            logger.warning("the state %s cannot be written: %s", path, error.strerror)


def _is_another_run(job: MonitoredJob, seen: SlurmJob) -> bool:
    return bool(job.started and seen.started) and job.started != seen.started


def _was_requeued(job: MonitoredJob, record: JobRecord | None) -> bool:
    """Return whether a job that left the queue waits for another run."""
    if record is None or record.state.is_terminal:
        return False
    return 0 <= job.attempt_index < record.restarts
