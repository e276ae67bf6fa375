# SPDX-License-Identifier: Apache-2.0
"""A failing rank's exception: torch's error file, and the end of the process at once."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import sys
from dataclasses import dataclass
from types import TracebackType

from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

MAX_ERROR_FILE_BYTES = 1 << 20
LATEST_TIMESTAMP = float(1 << 32)
MAX_OUTPUT_BYTES = 1 << 16
# torch puts the rank before each line of a traceback of its own.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):\n"
_SYNTAX_ERROR = re.compile(r"^(?:SyntaxError|IndentationError|TabError): .*$", re.MULTILINE)
# A traceback that ends nothing: of an object that is deleted, often at the exit.
_IGNORED = re.compile(
    r"^Exception ignored .*\nTraceback \(most recent call last\):\n(?:[ \t].*\n)*.*\n?",
    re.MULTILINE,
)
# What Python, torch, NCCL and wandb still write after an uncaught exception.
_AFTERWARDS = re.compile(
    r"\s|$|(?:\[rank\d+\]:)?\[[IWE]|[IWE]\d{4} |.*\bNCCL (?:INFO|WARN)\b|.*Warning: |wandb: "
)
_OUTERMOST_FRAMES = ("in <module>", "in _run_module_as_main")


@dataclass(frozen=True, slots=True)
class ErrorFile:
    """Hold a worker's exception, as its error file or its stderr gave it."""

    path: str  # What `@record` wrote; empty when it was read from stderr.
    message: str  # Type and text of the exception.
    traceback: str
    timestamp: float | None  # Unix s, where it is known.
    # Whether the program wrote nothing of its own after it; else it may have gone on.
    is_last: bool = True


def read_error_file(path: str) -> ErrorFile | None:
    """Parse a worker's error file; None if there is none. Any content is tolerated."""
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


def read_error_output(path: str, since: int) -> ErrorFile | None:
    """Return the exception that `last_exception` finds in a stderr file after `since` bytes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        begin = max(since, status.st_size - MAX_OUTPUT_BYTES)
        raw = os.pread(fd, MAX_OUTPUT_BYTES, begin)
    except OSError:
        return None
    finally:
        os.close(fd)
    return last_exception(raw.decode("utf-8", "replace"))


def last_exception(text: str) -> ErrorFile | None:
    """Return the exception that has ended a program, by its output: the last traceback, or None.

    With other lines behind it, it may have been caught: it is not `is_last`, and counts only if no
    function can have caught it.
    """
    text = _IGNORED.sub("", _RANK_PREFIX.sub("", text))
    at = text.rfind(_TRACEBACK)
    if at < 0 or (at > 0 and text[at - 1] != "\n"):
        found = _SYNTAX_ERROR.search(text)  # A script that cannot be compiled has no header.
        if found is None or not _is_end(text[found.end() :].splitlines()):
            return None
        return ErrorFile("", found.group()[:2000], "", None)
    lines = text[at:].splitlines()
    for number, line in enumerate(lines[1:], start=1):
        if line and not line[0].isspace():
            is_last = _is_end(lines[number + 1 :])
            if not is_last and not lines[1].endswith(_OUTERMOST_FRAMES):
                return None
            traceback = "\n".join(lines[: number + 1])
            return ErrorFile("", line[:2000], traceback, None, is_last=is_last)
    return None


def _is_end(lines: list[str]) -> bool:
    """Return whether a program that wrote only these lines after an exception was at its end."""
    return all(_AFTERWARDS.match(line) for line in lines)


def _timestamp(stamp: object) -> float | None:
    """Return a worker's own time of failure (unix s), or None for an impossible value."""
    if isinstance(stamp, bool) or not isinstance(stamp, (str, int, float)):
        return None
    try:
        seconds = float(stamp)
    except (ValueError, OverflowError):
        return None
    return seconds if 0.0 < seconds < LATEST_TIMESTAMP else None


logger = logging.getLogger("nvrx")


def install_exception_handler() -> None:
    """Make an uncaught exception log itself, print its traceback and end the process with code 1.

    Ctrl-C keeps its present meaning. Installing twice changes nothing.
    """
    if not isinstance(sys.excepthook, _ExitingHook):
        sys.excepthook = _ExitingHook(sys.excepthook)


class _ExitingHook:
    def __init__(self, previous: object) -> None:
        self._previous = previous

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
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

    from nvidia_resiliency_ext.fault_tolerance.data import get_rank

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
