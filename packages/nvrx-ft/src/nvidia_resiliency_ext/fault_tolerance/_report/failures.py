# SPDX-License-Identifier: Apache-2.0
"""What a failure was, in words and fields, where it is written down, and when no restart mends it.

The first failure is found as torchrun finds it: by the time in the error file, else the time at
which the exit was noticed.

The directory is `NVRX_EVENT_DIR`, else `--log-dir`, else the run directory, which is temporary.

A program that fails at its start is not started again, although restarts are left, if it does so on
all ranks and in every cycle by an error of its own; a file, a host or a GPU that is missing may be
there the next time. A job that has done a step, or has run for two minutes, goes on.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._core.exceptions import MAX_ERROR_FILE_BYTES, ErrorFile
from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._monitor import hang_report
from nvidia_resiliency_ext.shared_utils.children import ExitStatus, signal_name
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file


@dataclass(frozen=True, slots=True)
class Failure:
    """One worker that failed. `seen_at` is unix seconds."""

    rank: int
    local_rank: int
    pid: int
    host: str
    status: ExitStatus
    seen_at: float
    error: ErrorFile | None = None
    hang: Mapping[str, Any] = field(default_factory=dict)

    @property
    def time(self) -> float:
        """Return the time of the failure (unix s): the worker's own, else when it was noticed."""
        if self.error is not None and self.error.timestamp is not None:
            return self.error.timestamp
        return self.seen_at


HOW_TO_SEE_IT = "decorate the entry function with @record, or use --tee=3, to see it here"


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that came first; of a hang, that of the rank which others waited for."""
    hung = [failure for failure in failures if failure.hang]
    return min(hung or failures, key=lambda failure: (failure.time, failure.rank))


def cause_of(failure: Failure) -> Cause:
    """Return the cause of a worker's failure, as one line and as fields."""
    if failure.hang:
        return hang_cause(failure.hang)
    kind, where = "exited", f"rank {failure.rank} on host {failure.host}"
    detail: dict[str, object] = {"pid": failure.pid}
    if failure.error is not None and failure.error.path:
        detail["error_file"] = failure.error.path
    if failure.status.signal is not None:
        kind, what = "killed", f"{where} died by {signal_name(failure.status.signal)}"
    elif failure.error is not None and failure.error.message:
        kind, first_line = "exception", failure.error.message.splitlines()[0]
        what = f"{where} exited with code {failure.status.code}: {first_line}"
    else:
        what = f"{where} ended: {failure.status.describe()}"
    return Cause(
        kind=kind,
        what=what,
        rank=failure.rank,
        local_rank=failure.local_rank,
        host=failure.host,
        exit_code=failure.status.code,
        signal=failure.status.signal,
        detected_by="launcher",
        detail=detail,
    )


def hang_cause(hang: Mapping[str, Any]) -> Cause:
    """Return the cause of a hang from a monitor's report, as one line and as fields.

    Where nobody can be blamed the cause names no rank and no host: none is held against it.
    """
    kind = hang_report.cause_kind(hang)
    is_blamed = kind == "unhealthy" or bool(hang["culprits"])
    return Cause(
        kind=kind,
        what=hang_report.found_in_words(hang),
        rank=hang["rank"] if is_blamed else None,
        local_rank=hang["local_rank"] if is_blamed else None,
        host=hang["host"] if is_blamed else "",
        signal=hang["signal"],
        detected_by="monitor",
        detail=hang,
    )


def failure_table(name: str, failures: Sequence[Failure], run_dir: str | None = None) -> str:
    """Report a job that failed for good; files in `run_dir`, which is removed, are not named."""

    def is_kept(path: str) -> bool:
        return os.path.exists(path) and not (run_dir and path.startswith(run_dir + os.sep))

    first = root_cause(failures)
    others = sorted((f for f in failures if f is not first), key=lambda f: (f.time, f.rank))
    rule = "=" * 72
    shown: dict[str, int] = {}  # Equal tracebacks are printed once.

    def block(failure: Failure) -> list[str]:
        stamp = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(failure.time))
        lines = [
            f"  time      : {stamp}",
            f"  host      : {failure.host}",
            f"  rank      : {failure.rank} (local_rank: {failure.local_rank})",
            f"  exitcode  : {failure.status.returncode} (pid: {failure.pid})",
        ]
        if failure.error is not None:
            if is_kept(failure.error.path):
                lines.append(f"  error_file: {failure.error.path}")
            trace = (failure.error.traceback or failure.error.message).rstrip()
            if trace in shown:
                lines.append(f"  traceback : the same as of rank {shown[trace]}")
            else:
                shown[trace] = failure.rank
                lines.append("  traceback : " + trace.replace("\n", "\n    "))
        elif failure.hang:
            lines.append(f"  hang      : {hang_report.found_in_words(failure.hang)}")
            evidence = hang_report.describe_evidence(failure.hang, is_kept)
            lines += [f"    {line}" for line in evidence.splitlines()]
        elif failure.status.signal is not None:
            lines.append(f"  traceback : none, it died by {signal_name(failure.status.signal)}")
        else:
            lines.append(f"  traceback : none; {HOW_TO_SEE_IT}")
        return lines

    lines = [rule, f"{name} FAILED", "-" * 72, "Root cause (first observed failure):"]
    lines += block(first)
    if others:
        lines += ["-" * 72, "Other failures:"]
        for number, failure in enumerate(others):
            lines += [f"[{number}]:", *block(failure)]
    lines.append(rule)
    return "\n".join(lines)


logger = logging.getLogger("nvrx")

FAILURES_FILE = "failures.jsonl"


class FailureLog:
    """Appends to `failures.jsonl`; whole lines, so that several launchers may share it."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, FAILURES_FILE)
        self._complained = False

    def write(self, record: Mapping[str, object]) -> None:
        """Append one line; a failure to do so is logged once."""
        line = json.dumps(record, default=str).encode() + b"\n"
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
    """Copy the root cause's error file to the launcher's own, if a `@record` started it."""
    target = environ.get("TORCHELASTIC_ERROR_FILE")
    if not target or source is None:
        return
    try:
        content = read_regular_file(source, MAX_ERROR_FILE_BYTES)
        os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
        atomic_write(target, content)
    except OSError as error:
        logger.warning("the error file %s cannot be written: %s", target, error)


PROGRAM_ERRORS = frozenset(
    {
        "AttributeError", "ImportError", "IndentationError", "ModuleNotFoundError", "NameError",
        "SyntaxError", "TabError", "TypeError", "UnboundLocalError",
    }
)  # fmt: skip
# An ImportError with one of these is an error of the machine.
MACHINE_ERRORS = ("cannot open shared object file", "Input/output error", "Stale file handle")
LONGEST_START_S = 120.0
OTHERS_MAY_TAKE_S = 1.0


def is_program_error(message: str | None) -> bool:
    """Return whether an exception, as `Type: text`, is an error of the program itself."""
    return (
        message is not None
        and message.partition(":")[0].strip() in PROGRAM_ERRORS
        and not any(text in message for text in MACHINE_ERRORS)
    )


class StartFailures:
    """Counts cycles in a row in which all ranks failed at their start alike; limit 0: no limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._message = ""
        self._count = 0
        self._has_worked = False
        self._is_evaluated = False

    def counts(self, messages: Collection[str | None], lived_s: float, *, stepped: bool) -> bool:
        """Return whether exits, each `Type: text` or None, may be a start that fails on all."""
        self._record(lived_s, stepped=stepped)
        return (
            self._limit > 0
            and not self._has_worked
            and all(is_program_error(message) for message in messages)
            and len(set(messages)) == 1
        )

    def is_hopeless(
        self, messages: Collection[str | None], workers: int, lived_s: float, *, stepped: bool
    ) -> bool:
        """Count a cycle that has failed, and return whether no further one should follow."""
        self._is_evaluated = True
        if not self.counts(messages, lived_s, stepped=stepped) or len(messages) < workers:
            self._count = 0
            return False
        message = next(iter(messages)) or ""
        self._count = self._count + 1 if message == self._message else 1
        self._message = message
        return self._count >= self._limit

    def cycle_ended(self, lived_s: float, *, stepped: bool) -> None:
        """Record a cycle's end, also of one that `is_hopeless` was not asked about."""
        self._record(lived_s, stepped=stepped)
        if not self._is_evaluated:
            self._count = 0
        self._is_evaluated = False

    def _record(self, lived_s: float, *, stepped: bool) -> None:
        self._has_worked = self._has_worked or stepped or lived_s >= LONGEST_START_S
