# SPDX-License-Identifier: Apache-2.0
"""The monitor's thread that waits at the store for what becomes of iterations."""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.inprocess._monitor.store_side import open_board

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvidia_resiliency_ext.inprocess._monitor.settings import MonitorSettings
    from nvidia_resiliency_ext.inprocess._protocol.board import Board
    from nvidia_resiliency_ext.inprocess._protocol.decision import Decision
    from nvidia_resiliency_ext.inprocess.attribution import InterruptionRecord

__all__ = ["Hearer", "NewsReader", "read_fate"]

logger = logging.getLogger("nvrx")

_LONGEST_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Hearer:
    """Who is told, always in the loop's thread."""

    outcome: Callable[[int, bool], None]
    last_call_over: Callable[[int, tuple[InterruptionRecord, ...], float], None]
    decided: Callable[[int, Decision], None]
    lost: Callable[[str], None]


class NewsReader:
    """Owns one thread with one store connection that follows iterations in turn.

    Args:
        settings: Which store, and how long to wait for the last call.
        post: Has something called in the loop's thread.
        hearer: What is called there.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        post: Callable[[Callable[[], None]], None],
        hearer: Hearer,
    ) -> None:
        self._settings = settings
        self._post = post
        self._hearer = hearer
        self._closed = threading.Event()
        self._broken_s: float | None = None
        self._spared = -1
        self._to_follow: queue.SimpleQueue[tuple[int, frozenset[int]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nvrx-news", daemon=True)
        self._thread.start()

    def broken_s(self, now: float) -> float:
        """Return for how long there has been no connection, after one broke."""
        broken_s = self._broken_s
        return 0.0 if broken_s is None else now - broken_s

    def follow(self, iteration: int, participants: frozenset[int]) -> None:
        """Follow an iteration after those before it."""
        self._to_follow.put((iteration, participants))

    def spare_records(self, iteration: int) -> None:
        """Do without the records of an iteration: nobody here would be told them."""
        self._spared = iteration

    def close(self) -> None:
        """Let the thread end, after the wait that it sits in at the latest."""
        self._closed.set()
        self._to_follow.put(None)

    def _run(self) -> None:
        try:
            board = open_board(self._settings)
            while (order := self._to_follow.get()) is not None and not self._closed.is_set():
                try:
                    self._follow(board, *order)
                except Exception as error:  # noqa: BLE001 - stores raise all sorts
                    if self._closed.is_set():
                        break
                    # A connection may break without the store being lost.
                    logger.info("monitor_process: the store is connected to again: %s", error)
                    self._broken_s = time.monotonic()
                    board = open_board(self._settings)
                    self._broken_s = None
                    self._follow(board, *order)
        except Exception as error:
            if not self._closed.is_set():
                logger.debug("monitor_process: the store is lost", exc_info=True)
                text = f"{type(error).__name__}: {error}"
                self._post(lambda: self._hearer.lost(text))

    def _follow(self, board: Board, iteration: int, participants: frozenset[int]) -> None:
        outcome = None
        while outcome is None:
            if self._closed.is_set():
                return
            outcome = board.outcome(iteration, _LONGEST_WAIT_S)
        since_s = time.monotonic()
        is_completed = outcome.name == "COMPLETED"
        self._post(lambda: self._hearer.outcome(iteration, is_completed))
        if is_completed:
            return
        left_s = self._settings.last_call_wait_s - (time.monotonic() - since_s)
        has_all = left_s > 0 and board.wait_all_reported(iteration, left_s)
        # What has all was read with them; else they would have to be read, and the decision will
        # bring them, too.
        is_spared = self._spared == iteration and not has_all
        read = board.first_records if is_spared else board.records
        records = tuple(read(iteration))
        waited_s = time.monotonic() - since_s
        self._post(lambda: self._hearer.last_call_over(iteration, records, waited_s))
        decision = None
        while decision is None:
            if self._closed.is_set():
                return
            decision = board.decision(iteration, self._settings.heartbeat_interval_s)
            if decision is None:
                # Whoever counted last may have died before it decided.
                board.look(iteration, participants)
        found = decision
        self._post(lambda: self._hearer.decided(iteration, found))


def read_fate(board: Board, iteration: int, hearer: Hearer) -> Callable[[], None]:
    """Read what became of an iteration, without waiting, and return the calls that tell it."""
    outcome = board.outcome(iteration, 0.0)
    if outcome is None:
        return lambda: None
    if outcome.name == "COMPLETED":
        return lambda: hearer.outcome(iteration, True)
    records = tuple(board.records(iteration))
    decision = board.decision(iteration, 0.0)

    def tell() -> None:
        hearer.outcome(iteration, False)
        hearer.last_call_over(iteration, records, 0.0)
        if decision is not None:
            hearer.decided(iteration, decision)

    return tell
