# SPDX-License-Identifier: Apache-2.0
"""One log that is read while it grows, until it is complete or silent."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.attribution import engine
from nvidia_resiliency_ext.attribution._live.history import LogEnd
from nvidia_resiliency_ext.attribution._logs.following import GrowingLog
from nvidia_resiliency_ext.attribution.orchestration.utils import open_log

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from nvidia_resiliency_ext.attribution._live.history import JobHistory
    from nvidia_resiliency_ext.attribution.trace_analyzer.fr_support import (
        FRAnalysisResult,
        TraceAnalyzer,
    )

__all__ = ["FileState", "LogSession", "SessionTimes", "state_of"]

logger = logging.getLogger("nvrx")

FileState = tuple[int, int, int, int]

_CHUNKS_AT_ONCE = 8
_DIGEST_BYTES = 4096


@dataclass(frozen=True)
class SessionTimes:
    """How a log is waited for; all in seconds.

    Attributes:
        quiet_s: An ended log is complete when it has not grown for so long.
        max_wait_s: ... or when it still grows after so long.
        poll_s: Between two looks at an ended log.
        growing_poll_s: Between two looks at a log of a job that runs.
        idle_s: A log of a running job that has not grown for so long is let go.
    """

    quiet_s: float = 5.0
    max_wait_s: float = 40.0
    poll_s: float = 0.25
    growing_poll_s: float = 180.0
    idle_s: float = 900.0


def state_of(path: str) -> FileState | None:
    """Return the state of a file, which differs when it is written or replaced; None: no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class LogSession:
    """Read one log into a scanner.

    `run` belongs to one event loop; reading happens in `pool`.

    Args:
        path: The log, resolved; it may come later.
        allowed_root: The log must lie below it when it is opened.
        job: Key of the job's attempts.
        cycle_id: Which run of the job's workers.
        attempt_index: How often the job was requeued before; what earlier attempts left in the log
            is not read.
        history: Attempts of all jobs.
        times: How to wait.
        pool: Where to read.
        traces: Finds and analyses the dumps when the verdict is made.
        trace_turn: Held while they are analysed.
        trace_limit_s: Seconds after which the verdict is made without them.
        policy: Retries that a site allows; None: the defaults.

    Attributes:
        dump_path: Where the dumps are, once it is known.
        fr_result: What they say; None without dumps.
        evidence: Lines that follow the log's last when the verdict is made.
        rested: The verdict about a log that was idle for too long, and the state of the file.
    """

    def __init__(  # noqa: PLR0913 - the parts of a service meet here
        self,
        path: str,
        allowed_root: str,
        *,
        job: str,
        cycle_id: int | None,
        attempt_index: int,
        history: JobHistory,
        times: SessionTimes,
        pool: Executor,
        traces: TraceAnalyzer,
        trace_turn: asyncio.Semaphore,
        trace_limit_s: float,
        policy: engine.RetryPolicy | None = None,
    ) -> None:
        self.path = path
        self.job = job
        self.dump_path: str | None = None
        self.fr_result: FRAnalysisResult | None = None
        self.evidence: tuple[str, ...] = ()
        self.rested: tuple[FileState | None, engine.Verdict] | None = None
        self._history = history
        self._times = times
        self._pool = pool
        self._traces = traces
        self._trace_turn = trace_turn
        self._trace_limit_s = trace_limit_s
        self._cycle_id = cycle_id
        self._attempt_index = attempt_index
        self._earlier_end = LogEnd()
        self._scanner = engine.LogScanner(
            job_id=job, cycle_id=cycle_id, attempt_index=attempt_index, policy=policy
        )
        self._lock = threading.Lock()  # the scanner has none
        self._log = GrowingLog(lambda: open_log(path, allowed_root), lambda: os.stat(path))
        self._last_growth_s = time.monotonic()
        self._terminal_s: float | None = None
        self._is_complete = False
        self._changed = asyncio.Event()
        self.has_ended = asyncio.Event()
        self._is_closed = False

    def end(self, *, is_complete: bool) -> None:
        """End the wait for the job: the rest of its log is read.

        Args:
            is_complete: Nothing more will be written.
        """
        if self._terminal_s is None:
            self._terminal_s = time.monotonic()
        self._is_complete = self._is_complete or is_complete
        self.has_ended.set()
        self._changed.set()

    async def run(self) -> engine.Verdict | None:
        """Read until the log is complete, and return the verdict.

        Returns:
            None when the job has not ended and the log was idle for too long.

        Raises:
            LogAnalyzerError: The log is no regular file, or leads outside of the root.
            OSError: It cannot be read.
        """
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                is_complete = self._is_complete
                grew = await loop.run_in_executor(self._pool, self._read)
                if grew:
                    continue
                now = time.monotonic()
                if self._terminal_s is not None and (is_complete or self._is_silent(now)):
                    find = self._traces.discover_fr_dump_path
                    self.dump_path = await loop.run_in_executor(self._pool, find, self.path)
                    if self.dump_path is not None:
                        await self._analyze_dumps(self.dump_path)
                    return await loop.run_in_executor(self._pool, self._finish)
                if self._terminal_s is None and now - self._last_growth_s > self._times.idle_s:
                    state = state_of(self.path)
                    self.rested = state, await loop.run_in_executor(self._pool, self._look)
                    return None
                await self._wait()
        finally:
            self.has_ended.set()
            self._close()

    async def candidate(self) -> engine.Verdict:
        """Return the verdict about the log so far."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._look)

    async def _analyze_dumps(self, path: str) -> None:
        """Analyze the dumps and add their findings, unless that takes too long."""
        deadline_s = time.monotonic() + self._trace_limit_s
        try:
            await asyncio.wait_for(self._trace_turn.acquire(), self._trace_limit_s)
        except (asyncio.TimeoutError, TimeoutError):
            logger.warning("%s: no verdict on the dumps %s: others take long", self.path, path)
            return
        work = asyncio.ensure_future(self._traces.analyze_fr_dump(path))
        # A thread that goes on keeps the turn: it still has its memory.
        work.add_done_callback(lambda _: self._trace_turn.release())
        await asyncio.wait({work}, timeout=deadline_s - time.monotonic())
        if work.done():
            self.fr_result = work.result()
        else:
            logger.warning("%s: no verdict on the dumps %s: it takes long", self.path, path)

    def _look(self) -> engine.Verdict:
        while self._read():
            pass
        with self._lock:
            self._scanner.set_history(self._earlier())
            return self._scanner.snapshot()

    def _earlier(self) -> list[dict[str, Any]]:
        return self._history.before(self.path, self.job, self._attempt_index, self._cycle_id)

    async def _wait(self) -> None:
        ended = self._terminal_s is not None
        seconds = self._times.poll_s if ended else self._times.growing_poll_s
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except (asyncio.TimeoutError, TimeoutError):
            return

    def _is_silent(self, now: float) -> bool:
        assert self._terminal_s is not None
        waited = now - self._terminal_s
        if self._log.descriptor < 0 and waited < self._times.quiet_s:
            return False
        return now - self._last_growth_s >= self._times.quiet_s or waited >= self._times.max_wait_s

    def _read(self) -> bool:
        """Feed new bytes of the log, up to 8 MiB, and return whether there were any."""
        with self._lock:
            if self._is_closed or not self._open():
                return False
            grew = False
            for _ in range(_CHUNKS_AT_ONCE):
                starts, offset = self._log.starts, self._log.offset
                if self._repeats_earlier():
                    self._log.start_over()
                data = self._log.read()
                if self._log.starts != starts:
                    # What stands there now is new.
                    if offset == self._earlier_end.size > 0:
                        self._scanner.skip(0, 0)
                    self._earlier_end = LogEnd()
                if not data:
                    break
                self._scanner.feed(data)
                grew = True
            if grew:
                # A log that was written long ago need not be watched for silence.
                age_s = max(0.0, time.time() - os.fstat(self._log.descriptor).st_mtime)
                self._last_growth_s = time.monotonic() - age_s
            return grew

    def _open(self) -> bool:
        if self._log.descriptor >= 0:
            return True
        if not self._log.open():
            return False
        end = self._history.end_before(self.path, self._attempt_index)
        if end.size and end.digest == self._digest(end.size):
            self._earlier_end = end
            self._scanner.skip(end.size, end.lines)
            self._log.move(end.size)
        return True

    def _repeats_earlier(self) -> bool:
        """Return whether the log was begun anew and repeats the text of the earlier attempt."""
        end, status = self._earlier_end, os.fstat(self._log.descriptor)
        is_all = status.st_size == self._log.offset == end.size > 0
        return is_all and status.st_mtime_ns != end.written_ns

    def _end_of_log(self) -> LogEnd:
        if self._log.descriptor < 0:
            return LogEnd()
        size, written_ns = self._log.offset, os.fstat(self._log.descriptor).st_mtime_ns
        return LogEnd(size, self._scanner.lines, self._digest(size), written_ns)

    def _digest(self, size: int) -> str:
        """Return a mark of the last bytes before a place in the log."""
        start = max(0, size - _DIGEST_BYTES)
        data = os.pread(self._log.descriptor, size - start, start)
        return hashlib.sha256(data).hexdigest()

    def _finish(self) -> engine.Verdict:
        with self._lock:
            if self.fr_result is not None:
                self._scanner.fr_report = self.fr_result.report
            self._scanner.set_history(self._earlier())
            end = self._end_of_log()
            # A newline first: the log's last line need not have one.
            said = [" ".join(line.split()) for line in self.evidence]
            self._scanner.feed("".join(f"\n{line}" for line in said).encode())
            verdict = self._scanner.finish()
        self._history.add(self.path, self.job, verdict, self._attempt_index, end)
        return verdict

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._log.close()
