# SPDX-License-Identifier: Apache-2.0
"""Owns what a program sees of one open target: writing lines, waiting for them, counters."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, final

from nvidia_resiliency_ext.shared_utils.clock import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from .feed import Feed
    from .room import Room

__all__ = ["FunnelStats", "LogTarget"]


@dataclass(frozen=True, slots=True)
class FunnelStats:
    """Counters of a target, or of all targets of a client.

    Attributes:
        lines_taken: Lines cut into chunks so far; the newest 64 KiB may not be counted yet.
        bytes_taken: Their bytes.
        lines_confirmed: Lines that the server has in the file, with those of earlier processes
            and notices of dropped ones.
        bytes_confirmed: Their bytes.
        lines_dropped: Lines given up.
        bytes_dropped: Their bytes.
        lines_broken: Lines of more than 1 MiB, which go on in a new line.
        chunks_resent: Chunks sent again after a broken connection.
        reconnects: Calls to the server that failed or ended early.
        nonsense_answers: Confirmations of lines that were never sent.
        bytes_in_memory: Held in memory now.
        bytes_in_spill: Held in files now, of all targets of the client.
    """

    lines_taken: int = 0
    bytes_taken: int = 0
    lines_confirmed: int = 0
    bytes_confirmed: int = 0
    lines_dropped: int = 0
    bytes_dropped: int = 0
    lines_broken: int = 0
    chunks_resent: int = 0
    reconnects: int = 0
    nonsense_answers: int = 0
    bytes_in_memory: int = 0
    bytes_in_spill: int = 0

    def __add__(self, other: FunnelStats) -> FunnelStats:
        """Return the sum of both."""
        names = [field.name for field in fields(self)]
        return FunnelStats(**{name: getattr(self, name) + getattr(other, name) for name in names})


@final
class LogTarget:
    """One file on the log server, to append lines to; made by `LogFunnelClient.open`.

    All methods may be called from any thread, but not from a signal handler.

    `feed`, `room` and `close` are set by `LogFunnelClient.open`, which makes targets.

    Attributes:
        path: The file, as the server names it.
    """

    def __init__(self, feed: Feed, room: Room, close: Callable[[Feed, Deadline], bool]) -> None:
        """Use `LogFunnelClient.open`."""
        self.path = feed.path
        self._feed = feed
        self._room = room
        self._close = close
        self._take = feed.write

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take whole lines or parts of lines; they leave together as whole lines.

        A part without a newline waits for the rest of its line. Data of one call stays together; of
        two threads each should write whole lines. When there is no room, it waits or drops, as the
        client's `when_full` says.

        Args:
            data: The bytes.

        Raises:
            DeadlineExceededError: No room within the client's `write_timeout_s`. Of data up to
                64 KiB nothing was taken.
            LogTargetRefusedError: The server refuses this file; with `when_full="drop-oldest"` the
                lines are dropped and counted instead.
            LogFunnelClosedError: It is closed, or was opened before a fork.
        """
        self._take(data)

    def flush(self, deadline_s: float | None = 30.0) -> None:
        """Wait until the server has written or dropped every whole line that was written here.

        Args:
            deadline_s: Seconds to wait; None: no limit. Default 30.

        Raises:
            DeadlineExceededError: The time is over; the lines are kept.
            LogTargetRefusedError: The server refuses this target.
            LogFunnelClosedError: The target is closed, or was opened before a fork.
        """
        self._feed.flush(Deadline.after(deadline_s))

    def close(self, deadline_s: float | None = 30.0) -> bool:
        """End the last line, wait for all confirmations and end the stream; harmless if repeated.

        Lines that are not confirmed at the deadline are left in files for a later client of the
        same name that opens the same path; one warning names the place.

        Args:
            deadline_s: Seconds to wait for confirmations; None: no limit. Default 30.

        Returns:
            Whether everything was confirmed.
        """
        return self._close(self._feed, Deadline.after(deadline_s))

    @property
    def stats(self) -> FunnelStats:
        """Counters as they are now."""
        return FunnelStats(**self._feed.snapshot(), bytes_in_spill=self._room.spill_bytes)

    def __enter__(self) -> LogTarget:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()
