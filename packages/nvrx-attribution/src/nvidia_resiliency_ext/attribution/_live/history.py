# SPDX-License-Identifier: Apache-2.0
"""Attempts of all jobs that a service has seen, in memory and in a file; it evaluates none.

An attempt is one run of a job's workers: job, how often the scheduler requeued it, and cycle. A
requeued job begins again with cycle 0 and the same name of its log, which may be continued.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.attribution._policy.history import attempt_of
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._core.verdict import Verdict

__all__ = ["JobHistory", "LogEnd"]

logger = logging.getLogger("nvrx")

_PER_JOB = 10
_TOTAL = 3000
_LIMIT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class LogEnd:
    """Where an attempt's part of its log ended.

    Attributes:
        size: Bytes up to there.
        lines: Lines up to there.
        digest: Of the last bytes before, by which a log that was begun anew is told.
        written_ns: When the log was last written, by which one that says the same again is told.
    """

    size: int = 0
    lines: int = 0
    digest: str = ""
    written_ns: int = 0


class JobHistory:
    """Keep each attempt of a log, the newest 10 of a job and 3000 in all; for all threads.

    Args:
        path: JSON-lines file that outlives the service; None: memory only.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._attempts: dict[tuple[str, int], dict[str, Any]] = {}
        if path is not None and os.path.exists(path):
            self._load(path)

    def before(
        self, log_path: str, job: str, attempt_index: int = 0, cycle_id: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the attempts of a job that were kept before this one, oldest first.

        A log without a cycle, such as a scheduler's, is about all cycles of an allocation: it says
        again what their logs say. The two kinds are not counted together.
        """
        with self._lock:
            found = []
            for key, attempt in self._attempts.items():
                if key == (log_path, attempt_index):
                    break
                is_like = (attempt["cycle_id"] is None) == (cycle_id is None)
                if attempt["job_id"] == job and is_like:
                    found.append(attempt)
            return found

    def newest_attempt(self, job: str) -> int:
        """Return how often a job was requeued, as far as its attempts say."""
        with self._lock:
            attempts = [index for (_, index), a in self._attempts.items() if a["job_id"] == job]
            return max(attempts, default=0)

    def has(self, log_path: str, attempt_index: int) -> bool:
        """Return whether this attempt has ended."""
        with self._lock:
            return (log_path, attempt_index) in self._attempts

    def is_taken(self, log_path: str, job: str, cycle_id: int | None, attempt_index: int) -> bool:
        """Return whether another log has been that of this attempt."""
        if cycle_id is None:
            return False
        with self._lock:
            return any(
                (attempt["job_id"], attempt["cycle_id"], index) == (job, cycle_id, attempt_index)
                for (path, index), attempt in self._attempts.items()
                if path != log_path
            )

    def end_before(self, log_path: str, attempt_index: int) -> LogEnd:
        """Return where the newest earlier attempt with the same log ended."""
        with self._lock:
            ends = [
                (index, attempt.get("log_end"))
                for (path, index), attempt in self._attempts.items()
                if path == log_path and index < attempt_index
            ]
        end = max(ends, key=lambda item: item[0])[1] if ends else None
        return LogEnd() if end is None else LogEnd(**end)

    def add(
        self,
        log_path: str,
        job: str,
        verdict: Verdict,
        attempt_index: int = 0,
        end: LogEnd | None = None,
    ) -> None:
        """Keep an attempt; an earlier record of the same one keeps its place."""
        attempt = {**asdict(attempt_of(verdict)), "job_id": job, "attempt_index": attempt_index}
        attempt["log_end"] = asdict(end or LogEnd())
        with self._lock:
            self._attempts[log_path, attempt_index] = attempt
            of_job = [key for key, other in self._attempts.items() if other["job_id"] == job]
            surplus = of_job[:-_PER_JOB] or list(self._attempts)[:-_TOTAL]
            for key in surplus:
                del self._attempts[key]
            if self._path is not None:
                self._save(self._path)

    def _save(self, path: str) -> None:
        lines = [
            json.dumps({"log_path": log_path, **attempt})
            for (log_path, _), attempt in self._attempts.items()
        ]
        try:
            atomic_write(path, "".join(f"{line}\n" for line in lines).encode(), fsync=False)
        except OSError as error:
            logger.warning("the history %s cannot be written: %s", path, error)

    def _load(self, path: str) -> None:
        try:
            lines = read_regular_file(path, _LIMIT_BYTES).splitlines()
        except OSError as error:
            logger.warning("the history %s cannot be read: %s", path, error)
            return
        for line in lines[-_TOTAL:]:
            try:
                value = json.loads(line)
                log_path = value.pop("log_path")
                end = _end_of(value.pop("log_end", {}))
                attempt = {**asdict(attempt_of(value)), "log_end": end}
                self._attempts[str(log_path), int(attempt["attempt_index"])] = attempt
            except (ValueError, TypeError, AttributeError, KeyError):
                logger.warning("a line of the history %s is damaged and left out", path)


def _end_of(value: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a log's end; those of another type raise `TypeError`."""
    end = asdict(LogEnd(**value))
    for name, usual in asdict(LogEnd()).items():
        if type(end[name]) is not type(usual):
            raise TypeError(f"log_end: {name}")
    return end
