# SPDX-License-Identifier: Apache-2.0
"""What a failure was, in words and fields: from exit status, monitor's report and error file.

Pure but for `read_error_file`. Who failed first is decided here as torchrun does it: by the
time in the error file, else the time at which the exit was seen.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nvidia_resiliency_ext.fault_tolerance._monitor.report import cause_kind
from nvidia_resiliency_ext.shared_utils.children import ExitStatus
from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

from .cause import Cause

MAX_ERROR_FILE_BYTES = 1 << 20
LATEST_TIMESTAMP = float(1 << 32)


@dataclass(frozen=True, slots=True)
class ErrorFile:
    """What `@record` left behind: the message, the traceback and the time (unix s)."""

    path: str
    message: str
    traceback: str
    timestamp: float | None


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
    hang: Mapping[str, object] = field(default_factory=dict)

    @property
    def time(self) -> float:
        """When it failed, as exactly as is known (unix s)."""
        if self.error is not None and self.error.timestamp is not None:
            return self.error.timestamp
        return self.seen_at


def read_error_file(path: str) -> ErrorFile | None:
    """Return what the worker wrote to its error file, or None; any content is tolerated."""
    try:
        raw = read_regular_file(path, MAX_ERROR_FILE_BYTES)
    except OSError:
        return None
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return ErrorFile(path, raw[:2000].decode("utf-8", "replace"), "", None) if raw else None
    message = document.get("message", document) if isinstance(document, dict) else document
    if not isinstance(message, dict):
        return ErrorFile(path, str(message)[:2000], "", None)
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    return ErrorFile(
        path,
        str(message.get("message", ""))[:2000],
        str(extra.get("py_callstack", ""))[:100_000],
        _timestamp(extra.get("timestamp")),
    )


def _timestamp(stamp: object) -> float | None:
    """Return a worker's own time of failure (unix s), or None for what cannot be one."""
    if isinstance(stamp, bool) or not isinstance(stamp, (str, int, float)):
        return None
    try:
        seconds = float(stamp)
    except (ValueError, OverflowError):
        return None
    return seconds if 0.0 < seconds < LATEST_TIMESTAMP else None


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that came first."""
    hung = [failure for failure in failures if failure.hang]
    if hung:
        return min(hung, key=_stuck_first)
    return min(failures, key=lambda failure: (failure.time, failure.rank))


def _stuck_first(failure: Failure) -> tuple[bool, float, int]:
    # When one rank hangs in a collective, its peers reach the same limit within milliseconds. A
    # stopped process is the culprit for certain; else the one that got stuck first.
    since = failure.hang.get("since")
    is_stopped = failure.hang.get("state") in ("T", "t")
    return (
        not is_stopped,
        since if isinstance(since, (int, float)) else float("inf"),
        failure.rank,
    )


def cause_of(failure: Failure) -> Cause:
    """Say in one line, and in fields, what happened to a worker."""
    where = f"rank {failure.rank} on host {failure.host}"
    kind, what, detected_by = "exited", "", "launcher"
    detail: dict[str, object] = {"pid": failure.pid}
    if failure.hang:
        kind = cause_kind(str(failure.hang.get("rule", "")))
        if kind == "unhealthy":
            what = f"{where} was ended: {failure.hang.get('reason')}"
        else:
            what = f"{where} hung: {_hang_words(failure.hang)}"
        detected_by = "monitor"
        detail.update(failure.hang)
    elif failure.status.signal is not None:
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


_HANGS = {
    "initial_heartbeat": "no first heartbeat",
    "heartbeat": "no heartbeat",
    "out_of_section": "outside all sections",
}


def _hang_words(hang: Mapping[str, object]) -> str:
    elapsed, limit = hang.get("elapsed"), hang.get("limit")
    if hang.get("reason"):
        return str(hang["reason"])
    rule = str(hang.get("rule"))
    subject = f"section {hang['section']!r}" if hang.get("section") else _HANGS.get(rule, rule)
    if isinstance(elapsed, (int, float)) and isinstance(limit, (int, float)):
        return f"{subject} for {elapsed:.2f} s, limit {limit:.2f} s"
    return subject


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
            lines.append(f"  hang      : {_hang_words(failure.hang)}")
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
