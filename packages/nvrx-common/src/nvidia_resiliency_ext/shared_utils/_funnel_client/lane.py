# SPDX-License-Identifier: Apache-2.0
"""Owns the thread of one target: it connects, takes confirmations, and comes back afterwards."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING

from .pace import Backoff
from .verdict import Outcome, Verdict, judge

if TYPE_CHECKING:
    from .feed import Feed, Sending
    from .link import Call, Link
    from .notices import Notices

__all__ = ["Lane"]


class Lane:
    """Keeps a call to the server open as long as there is something to send.

    Args:
        feed: The target's lines.
        link: The way to the server.
        notices: Lines for people.
        endpoint: The server's name in them.
        stream_id: Under which the server counts the lines.
    """

    def __init__(
        self, feed: Feed, link: Link, notices: Notices, endpoint: str, stream_id: str
    ) -> None:
        self._feed = feed
        self._link = link
        self._notices = notices
        self._endpoint = endpoint
        self._stream_id = stream_id
        self._draw = random.Random()  # noqa: S311 - spreads load, guards nothing
        self._backoff = Backoff(self._draw)
        self._is_plain = False
        self._away_since: float | None = None
        self._call: Call | None = None
        self._thread = threading.Thread(target=self._run, name="nvrx-log-funnel", daemon=True)

    def start(self) -> None:
        """Connect at once."""
        self._thread.start()

    def cancel(self) -> None:
        """End the present call."""
        call = self._call
        if call is not None:
            call.cancel()

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the thread; say whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                sending = self._feed.begin(is_plain=self._is_plain)
                if sending is None or not self._after(*self._talk(sending)):
                    return
        finally:
            self._feed.lane_ended()
            self._notices.emit()

    def _talk(self, sending: Sending) -> tuple[Outcome, bool]:
        """Make one call; return how it ended and whether it got anything confirmed."""
        has_progressed = False
        try:
            call = self._link.start(
                sending, self._feed.path, self._stream_id, is_plain=sending.is_plain
            )
        except (ConnectionAbortedError, ValueError, RuntimeError) as error:
            # The client closes its channel at this moment, or the interpreter ends.
            self._feed.end(sending)
            return Outcome("CANCELLED", str(error)), False
        self._call = call
        try:
            if sending.is_plain:
                status = call.final_status()
                if status == "OK" and sending.last_seq:
                    has_progressed = bool(self._feed.confirm(sending.last_seq))
                    self._is_back()
            else:
                for stream_id, seq in call.answers():
                    has_progressed = self._take(stream_id, seq) or has_progressed
        finally:
            self._call = None
            self._feed.end(sending)
        outcome = call.outcome()
        if sending.is_plain and outcome.code == "OK" and status != "OK":
            outcome = Outcome("UNAVAILABLE", f"the server could not write: {status}")
        return outcome, has_progressed

    def _take(self, stream_id: str, seq: int) -> bool:
        result = self._feed.confirm(seq) if stream_id == self._stream_id else None
        if result is None:
            line = f"{self._endpoint} confirms lines that were never sent to it; this is ignored"
            self._notices.state("nonsense", logging.ERROR, line)
        else:
            self._backoff.reset()
            self._is_back()
        self._notices.emit()
        return bool(result)

    def _after(self, outcome: Outcome, has_progressed: bool) -> bool:
        """Prepare the next call; False when there is to be none."""
        verdict = judge(outcome, is_plain=self._is_plain)
        if outcome.code == "OK" and has_progressed:
            # A plain stream that was ended to have it confirmed, or the end of a closed target.
            return True
        if verdict is Verdict.FALL_BACK:
            self._is_plain = True
            line = (
                f"{self._endpoint} knows no acknowledged streams: lines are confirmed at the end of"
                " each plain stream, and may come twice after a broken connection"
            )
            self._notices.state("plain", logging.WARNING, line)
            self._notices.emit()
            return True
        self._is_plain = self._is_plain and verdict is Verdict.RETRY_SLOWLY
        self._feed.reconnects += 1
        if verdict is Verdict.REFUSED:
            lost = self._feed.refuse(str(outcome))
            line = (
                f"{self._endpoint} refuses {self._feed.path}: {outcome};"
                f" {lost.lines} lines ({lost.size} bytes) are lost"
            )
            self._notices.add(logging.ERROR, line)
            self._notices.emit()
            return False
        if verdict is Verdict.RETRY_SLOWLY:
            line = f"{self._endpoint} does not let us in ({outcome}); lines wait here meanwhile"
            self._notices.state("refused", logging.ERROR, line)
            delay_s = Backoff.slow_s(self._draw.random())
        else:
            self._is_away(outcome)
            delay_s = self._backoff.next_s()
        self._notices.emit()
        self._feed.pause(delay_s)
        return True

    def _is_away(self, outcome: Outcome) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            return  # a server that restarts is back before anybody needs to know
        line = f"{self._endpoint} is away ({outcome}); lines wait here meanwhile"
        self._notices.state("away", logging.WARNING, line)

    def _is_back(self) -> None:
        if self._away_since is None and not self._notices.is_in_trouble():
            return
        self._away_since = None
        if self._notices.is_in_trouble():
            line = f"{self._endpoint} takes lines again"
            self._notices.state("up", logging.INFO, line)
