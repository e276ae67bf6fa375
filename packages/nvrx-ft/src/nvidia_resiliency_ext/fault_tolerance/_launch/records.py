# SPDX-License-Identifier: Apache-2.0
"""Where the launcher writes down what happened: one line per cycle end, and the error file.

The directory is `NVRX_EVENT_DIR`, else `--log-dir`, else the run directory, which is temporary.
A record that cannot be written never stops the job: it is said once in the log.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from nvidia_resiliency_ext.fault_tolerance._process.error_file import MAX_ERROR_FILE_BYTES
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file

from .cause import Cause

logger = logging.getLogger("nvrx")

FAILURES_FILE = "failures.jsonl"


@dataclass(slots=True)
class RestartTimes:
    """Monotonic seconds of the steps of one restart; None where a step did not happen."""

    fault: float | None = None
    stopped: float | None = None
    joined: float | None = None
    started: float | None = None

    def durations(self) -> dict[str, float | None]:
        """Return seconds between the steps."""

        def between(begin: float | None, end: float | None) -> float | None:
            return None if begin is None or end is None else round(end - begin, 6)

        return {
            "stop_s": between(self.fault, self.stopped),
            "rendezvous_s": between(self.stopped, self.joined),
            "start_s": between(self.joined, self.started),
        }


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """How one cycle ended."""

    time: float
    host: str
    cycle: int
    outcome: str
    cause: Cause
    last_iteration: int | None
    others: tuple[str, ...] = ()
    times: RestartTimes = field(default_factory=RestartTimes)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        detail: Mapping[str, object] = self.cause.detail
        return {
            "time": self.time,
            "host": self.host,
            "cycle": self.cycle,
            "outcome": self.outcome,
            "rank": self.cause.rank,
            "local_rank": self.cause.local_rank,
            "cause": self.cause.kind,
            "what": self.cause.what,
            "exit_code": self.cause.exit_code,
            "signal": self.cause.signal,
            "detected_by": self.cause.detected_by,
            "detail": dict(detail),
            "also_failed": list(self.others),
            "last_iteration": self.last_iteration,
            **self.times.durations(),
        }


class FailureLog:
    """Appends to `failures.jsonl`; whole lines, so that several launchers may share it."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, FAILURES_FILE)
        self._complained = False

    def write(self, record: FailureRecord) -> None:
        """Append one line; a failure to do so is logged once."""
        line = json.dumps(record.to_dict(), default=str).encode() + b"\n"
        # Not blocking: in a shared directory the name may be taken by a pipe that nobody reads.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        try:
            fd = os.open(self._path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                if os.write(fd, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(fd)
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning("the failure record %s cannot be written: %s", self._path, error)


def hand_up_error_file(source: str | None, environ: Mapping[str, str]) -> None:
    """Copy the root cause's error file to the launcher's own `TORCHELASTIC_ERROR_FILE`.

    A launcher that was itself started under `@record` semantics reports upwards this way.
    """
    target = environ.get("TORCHELASTIC_ERROR_FILE")
    if not target or source is None:
        return
    try:
        content = read_regular_file(source, MAX_ERROR_FILE_BYTES)
        os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
        atomic_write(target, content)
    except OSError as error:
        logger.warning("the error file %s cannot be written: %s", target, error)
