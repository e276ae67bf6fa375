# SPDX-License-Identifier: Apache-2.0
"""Attempts of all jobs that a service has seen, in memory and in a file; it judges none."""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.attribution._policy.history import attempt_of
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._core.verdict import Verdict

__all__ = ["JobHistory"]

logger = logging.getLogger("nvrx")

_PER_JOB = 10
_TOTAL = 3000
_LIMIT_BYTES = 32 << 20


class JobHistory:
    """Keep one attempt per log, the newest 10 of a job and 3000 in all; for all threads.

    Args:
        path: JSON-lines file that outlives the service; None: memory only.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._attempts: dict[str, dict[str, Any]] = {}
        if path is not None and os.path.exists(path):
            self._load(path)

    def before(self, log_path: str, job: str) -> list[dict[str, Any]]:
        """Return the attempts of a job that were kept before this log's, oldest first."""
        with self._lock:
            found = []
            for path, attempt in self._attempts.items():
                if path == log_path:
                    break
                if attempt["job_id"] == job:
                    found.append(attempt)
            return found

    def add(self, log_path: str, job: str, verdict: Verdict) -> None:
        """Keep a log's attempt; an earlier record of the same log keeps its place."""
        attempt = {**asdict(attempt_of(verdict)), "job_id": job}
        with self._lock:
            self._attempts[log_path] = attempt
            of_job = [path for path, other in self._attempts.items() if other["job_id"] == job]
            surplus = of_job[:-_PER_JOB] or list(self._attempts)[:-_TOTAL]
            for path in surplus:
                del self._attempts[path]
            if self._path is not None:
                self._save(self._path)

    def _save(self, path: str) -> None:
        lines = [
            json.dumps({"log_path": log_path, **attempt})
            for log_path, attempt in self._attempts.items()
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
                self._attempts[str(log_path)] = asdict(attempt_of(value))
            except (ValueError, TypeError, AttributeError, KeyError):
                logger.warning("a line of the history %s is damaged and left out", path)
