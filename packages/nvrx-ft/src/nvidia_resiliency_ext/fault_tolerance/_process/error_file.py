# SPDX-License-Identifier: Apache-2.0
"""Owns the reading of what torch's `@record` leaves behind of a rank that failed."""

from __future__ import annotations

import json
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

__all__ = ["MAX_ERROR_FILE_BYTES", "ErrorFile", "read_error_file"]

MAX_ERROR_FILE_BYTES = 1 << 20
LATEST_TIMESTAMP = float(1 << 32)


@dataclass(frozen=True, slots=True)
class ErrorFile:
    """What `@record` left behind: the message, the traceback and the time (unix s)."""

    path: str
    message: str
    traceback: str
    timestamp: float | None


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
