# SPDX-License-Identifier: Apache-2.0
"""A failing rank's exception: torch's error file, and the end of the process at once."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass
from types import TracebackType

from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

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


logger = logging.getLogger("nvrx")


def get_rank() -> int:
    """Return this process's global rank: the process group's, else `RANK`'s.

    Raises:
        RuntimeError: neither knows a rank.
    """
    from nvidia_resiliency_ext.fault_tolerance.data import current_global_rank

    return current_global_rank()


def install_exception_handler() -> None:
    """Make an uncaught exception log itself, print its traceback and end the process with code 1.

    Ctrl-C keeps its present meaning. Installing twice changes nothing.
    """
    if isinstance(sys.excepthook, _ExitingHook):
        return
    sys.excepthook = _ExitingHook(sys.excepthook)


class _ExitingHook:
    def __init__(self, previous: object) -> None:
        self._previous = previous

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            assert callable(self._previous)
            self._previous(kind, error, traceback)
            return
        try:
            _report(kind, error, traceback)
        finally:
            # Exit handlers of a broken rank may wait for peers that will never answer.
            os._exit(1)


def _report(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    import traceback as formatting

    try:
        rank = str(get_rank())
    except RuntimeError:
        rank = "unknown"
    lines = "".join(formatting.format_exception(kind, error, traceback))
    logger.error("uncaught exception on rank %s: %s", rank, error)
    prefix = f"[rank {rank}] "
    text = "".join(prefix + line for line in lines.splitlines(keepends=True))
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
