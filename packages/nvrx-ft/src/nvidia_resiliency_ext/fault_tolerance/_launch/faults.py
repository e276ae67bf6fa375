# SPDX-License-Identifier: Apache-2.0
"""What a failure was, in words and fields: from exit status, monitor's report and error file.

Pure. Who failed first is decided here as torchrun does it: by the
time in the error file, else the time at which the exit was seen.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._monitor.report import (
    cause_kind,
    describe_evidence,
    found_in_words,
)
from nvidia_resiliency_ext.fault_tolerance._process.error_file import ErrorFile
from nvidia_resiliency_ext.shared_utils.children import ExitStatus

from .cause import Cause


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
        """When it failed, as exactly as is known (unix s)."""
        if self.error is not None and self.error.timestamp is not None:
            return self.error.timestamp
        return self.seen_at


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that came first; of a hang, that of the rank which others waited for."""
    hung = [failure for failure in failures if failure.hang]
    return min(hung or failures, key=lambda failure: (failure.time, failure.rank))


def cause_of(failure: Failure) -> Cause:
    """Say in one line, and in fields, what happened to a worker."""
    where = f"rank {failure.rank} on host {failure.host}"
    kind, what, detected_by = "exited", "", "launcher"
    detail: dict[str, object] = {"pid": failure.pid}
    if failure.hang:
        return hang_cause(failure.hang)
    if failure.status.signal is not None:
        kind, what = "killed", f"{where} died by {_signal_name(failure.status.signal)}"
    elif failure.error is not None and failure.error.message:
        first_line = failure.error.message.splitlines()[0]
        kind = "exception"
        what = f"{where} exited with code {failure.status.code}: {first_line}"
    else:
        what = f"{where} ended: {failure.status.describe()}"
    if failure.error is not None:
        detail["error_file"] = failure.error.path
    return Cause(
        kind=kind,
        what=what,
        rank=failure.rank,
        local_rank=failure.local_rank,
        host=failure.host,
        exit_code=failure.status.code,
        signal=failure.status.signal,
        detected_by=detected_by,
        detail=detail,
    )


def hang_cause(hang: Mapping[str, Any]) -> Cause:
    """Say in one line, and in fields, what a report of the monitor means for the cycle.

    Where nobody can be blamed the cause names no rank and no host: none is held against it.
    """
    kind, is_blamed = cause_kind(hang), bool(hang["culprits"])
    if kind == "unhealthy":
        is_blamed = True
    return Cause(
        kind=kind,
        what=found_in_words(hang),
        rank=hang["rank"] if is_blamed else None,
        local_rank=hang["local_rank"] if is_blamed else None,
        host=hang["host"] if is_blamed else "",
        signal=hang["signal"],
        detected_by="monitor",
        detail=hang,
    )


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def failure_table(name: str, failures: Sequence[Failure]) -> str:
    """Return the report of a job that failed for good: the root cause first, then the rest."""
    import time

    first = root_cause(failures)
    others = sorted((f for f in failures if f is not first), key=lambda f: (f.time, f.rank))
    rule = "=" * 72

    def block(failure: Failure) -> list[str]:
        stamp = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(failure.time))
        lines = [
            f"  time      : {stamp}",
            f"  host      : {failure.host}",
            f"  rank      : {failure.rank} (local_rank: {failure.local_rank})",
            f"  exitcode  : {failure.status.returncode} (pid: {failure.pid})",
        ]
        if failure.error is not None:
            if os.path.exists(failure.error.path):  # It may have gone with the run directory.
                lines.append(f"  error_file: {failure.error.path}")
            trace = failure.error.traceback or failure.error.message
            lines.append("  traceback : " + trace.rstrip().replace("\n", "\n    "))
        elif failure.hang:
            lines.append(f"  hang      : {found_in_words(failure.hang)}")
            lines += [f"    {line}" for line in describe_evidence(failure.hang).splitlines()]
        elif failure.status.signal is not None:
            lines.append(f"  traceback : none, it died by {_signal_name(failure.status.signal)}")
        else:
            lines.append("  traceback : none; decorate the entry function with @record to see it")
        return lines

    lines = [rule, f"{name} FAILED", "-" * 72, "Root cause (first observed failure):"]
    lines += block(first)
    if others:
        lines += ["-" * 72, "Other failures:"]
        for number, failure in enumerate(others):
            lines += [f"[{number}]:", *block(failure)]
    lines.append(rule)
    return "\n".join(lines)
