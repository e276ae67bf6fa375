# SPDX-License-Identifier: Apache-2.0
"""Capture what code logs or prints, in this thread only, and put everything back."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["capture_logs", "capture_stdout"]


@contextlib.contextmanager
def capture_logs(logger_name: str | None = None) -> Iterator[io.StringIO]:
    """Collect this thread's records of a logger; its own handlers get none of them meanwhile.

    Args:
        logger_name: The logger; None: the root.

    Yields:
        The text so far, one formatted record per line.

    Example:
        >>> with capture_logs("demo") as text:
        ...     logging.getLogger("demo").warning("careful")
        >>> "careful" in text.getvalue()
        True
    """
    logger = logging.getLogger(logger_name)
    owner = threading.get_ident()
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.addFilter(lambda record: record.thread == owner)

    def is_others(record: logging.LogRecord) -> bool:
        return record.thread != owner

    hushed = [*logger.handlers]
    for other in hushed:
        other.addFilter(is_others)
    logger.addHandler(handler)
    try:
        yield text
    finally:
        logger.removeHandler(handler)
        for other in hushed:
            other.removeFilter(is_others)


class _ThreadStream(io.TextIOBase):
    """Send what one thread writes to a text, and all else where it went before."""

    def __init__(self, owner: int, text: io.StringIO, before: TextIO) -> None:
        super().__init__()
        self._owner = owner
        self._text = text
        self._before = before

    def write(self, text: str) -> int:
        """Write to the stream of the calling thread."""
        mine = threading.get_ident() == self._owner
        return (self._text if mine else self._before).write(text)

    def flush(self) -> None:
        """Flush the stream from before."""
        self._before.flush()


@contextlib.contextmanager
def capture_stdout(logger_name: str | None = None) -> Iterator[io.StringIO]:
    """Collect what this thread prints.

    Args:
        logger_name: Not used; callers of old pass one.

    Yields:
        The text so far.
    """
    del logger_name
    text = io.StringIO()
    before = sys.stdout
    sys.stdout = _ThreadStream(threading.get_ident(), text, before)
    try:
        yield text
    finally:
        sys.stdout = before
