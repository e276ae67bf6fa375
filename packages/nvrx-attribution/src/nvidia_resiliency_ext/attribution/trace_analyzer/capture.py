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
    """Stand in for a stream: text of threads that capture goes to them, all else on to the stream.

    Args:
        before: The stream.
    """

    def __init__(self, before: TextIO) -> None:
        super().__init__()
        self.before = before
        self.texts: dict[int, list[io.StringIO]] = {}

    def write(self, text: str) -> int:
        """Write to the innermost capture of the calling thread."""
        mine = self.texts.get(threading.get_ident())
        return (mine[-1] if mine else self.before).write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self.before.flush()


_stdout_lock = threading.Lock()


@contextlib.contextmanager
def capture_stdout(logger_name: str | None = None) -> Iterator[io.StringIO]:
    """Collect the prints of this thread; captures of several threads may overlap.

    Args:
        logger_name: Not used; callers of old pass one.

    Yields:
        The text so far.
    """
    del logger_name
    owner = threading.get_ident()
    text = io.StringIO()
    with _stdout_lock:
        now: object = sys.stdout
        stream = now if isinstance(now, _ThreadStream) else _ThreadStream(sys.stdout)
        sys.stdout = stream
        stream.texts.setdefault(owner, []).append(text)
    try:
        yield text
    finally:
        with _stdout_lock:
            stream.texts[owner].remove(text)
            if not stream.texts[owner]:
                del stream.texts[owner]
            # The last one puts the stream back, unless somebody has put another in its place.
            if not stream.texts and sys.stdout is stream:
                sys.stdout = stream.before
