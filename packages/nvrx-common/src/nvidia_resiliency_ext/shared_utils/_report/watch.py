# SPDX-License-Identifier: Apache-2.0
"""Owns the waiting for a record to grow, and the loop of the live view."""

from __future__ import annotations

import os
import select
import sys
import time
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils._events.read import EventFileError
from nvidia_resiliency_ext.shared_utils.console import write_out
from nvidia_resiliency_ext.shared_utils.directory_notices import DirectoryNotices

from .follow import draw, news, waiting
from .text import render_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .timeline import Timeline

__all__ = ["Watch", "follow"]

_TICK_S = 1.0
_GAP_S = 0.2
# Reading a large record again and again must not take more than this part of a core.
_SHARE = 0.2


class Watch:
    """Waits until something changes in the directories of these paths, or a second is over."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._directories: list[int] = []
        self._notices: list[DirectoryNotices] = []
        for path in {
            path if os.path.isdir(path) else os.path.dirname(path) or "." for path in paths
        }:
            try:
                directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                continue  # not there yet: the ticks look again
            self._directories.append(directory)
            self._notices.append(DirectoryNotices(directory))

    def wait(self, seconds: float) -> None:
        """Wait for a change, or until the time is over."""
        readable = [notices for notices in self._notices if notices.are_there]
        poll = select.poll()
        for notices in readable:
            poll.register(notices.fileno(), select.POLLIN)
        poll.poll(seconds * 1000)
        for notices in readable:
            notices.names()

    def close(self) -> None:
        """Stop watching."""
        for notices in self._notices:
            notices.close()
        for directory in self._directories:
            os.close(directory)


def follow(
    paths: Sequence[str],
    read: Callable[[], Timeline],
    seen: Callable[[Timeline], None] | None,
    width: int,
) -> int:
    """Show a job until it ends, Ctrl-C, or nobody is there to see it; return the exit code.

    Args:
        paths: Where the record is, or will be.
        read: Reads it.
        seen: Is called with each new state; it is a reason to go on without a reader.
        width: Columns, 0 for those of the terminal.
    """
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    watch = Watch(paths)
    timeline: Timeline | None = None
    known: object = None
    try:
        if is_terminal:
            write_out("\x1b[2J")
        while timeline is None or not timeline.is_ended:
            began = time.monotonic()
            before, state = timeline, _state(paths)
            if state != known:
                known, timeline = state, _next(read, timeline, is_terminal=is_terminal)
            if timeline is not None:
                if timeline is not before and seen is not None:
                    seen(timeline)
                is_read = _show(before, timeline, width, is_terminal=is_terminal)
                if not is_read and seen is None:
                    return 0
            spent_s = time.monotonic() - began
            if timeline is None or not timeline.is_ended:
                watch.wait(_TICK_S)
                select.poll().poll(min(60.0, max(_GAP_S, spent_s / _SHARE)) * 1000)
    except KeyboardInterrupt:
        write_out("\n")
        return 0
    finally:
        watch.close()
    if not is_terminal:
        write_out(render_text(timeline, width=width or 100))
    return 0


def _state(paths: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    """Return what tells that a record has grown, also where no notices come (network disks)."""
    found = []
    for path in paths:
        names = [path]
        try:
            if os.path.isdir(path):
                names = [os.path.join(path, name) for name in sorted(os.listdir(path))]
            for name in names:
                status = os.stat(name)
                found.append((name, status.st_size, status.st_mtime_ns))
        except OSError:
            continue  # it may be gone or not there yet
    return tuple(found)


def _next(
    read: Callable[[], Timeline], before: Timeline | None, *, is_terminal: bool
) -> Timeline | None:
    try:
        return read()
    except EventFileError as error:
        # The first file appears with its first line, or the job was cleaned up while we looked.
        if before is None and is_terminal:
            write_out(waiting(str(error)))
        return before


def _show(before: Timeline | None, timeline: Timeline, width: int, *, is_terminal: bool) -> bool:
    """Show what is new, and tell whether somebody reads it."""
    if is_terminal:
        size = os.get_terminal_size(sys.stdout.fileno())
        columns = width or min(size.columns or 100, 120)
        return write_out(draw(timeline, columns, size.lines or 40, time.time()))
    lines = news(before, timeline) if timeline is not before else ()
    return write_out("".join(f"{line}\n" for line in lines))
