# SPDX-License-Identifier: Apache-2.0
"""Runs collectives of reports in a thread, so that a missing peer costs a report and not the job.

Every rank runs the same collectives in the same order. A collective that is not done in time
stays in the queue, and so do later ones: when the missing rank arrives, the order still fits.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nvidia_resiliency_ext.attribution.straggler import dist_utils
from nvidia_resiliency_ext.attribution.straggler._errors import StragglerError
from nvidia_resiliency_ext.shared_utils.abandonable import ParkedAtExit, park

if TYPE_CHECKING:
    from .peers import Peers

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 2.0
_ANNOUNCE_AFTER_S = 1.0
_NAMES_GRACE_S = _ANNOUNCE_AFTER_S + 2.0
"""How long a caller still waits, after its time is over, for the names of the missing ranks."""
_LONGEST_PAUSE_S = 0.02
_SHORTEST_PAUSE_S = 5e-5


class ExchangeSkippedError(StragglerError):
    """A collective goes on without its caller: other ranks have not joined it in time."""


class ReportsEndedError(StragglerError):
    """A collective was not run: an earlier one has failed, or the detector or process ends."""


class Exchange(Generic[T]):
    """A collective of reports: its result once all ranks have joined.

    Args:
        run: The collective; it gets this exchange.
        timeout_s: How long its caller waits.
        is_behind: It comes after one that still waits for other ranks; its caller does not wait.

    Attributes:
        error: What it has raised.
    """

    def __init__(
        self, run: Callable[[Exchange[T]], T], timeout_s: float, *, is_behind: bool = False
    ) -> None:
        self.deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._is_behind = is_behind
        self._run = run
        self._done = threading.Event()
        self._woken = threading.Event()
        self._absent = "other ranks have"
        self._result: T | None = None
        self.error: BaseException | None = None
        self._vote = threading.Lock()
        self._has_voted = self._is_withdrawn = False

    @property
    def is_done(self) -> bool:
        """Whether the exchange has a result or has failed."""
        return self._done.is_set()

    def run(self) -> None:
        """Run the exchange in this thread and keep its result or error."""
        try:
            self._result = self._run(self)
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self.error = error
        self._done.set()
        self._woken.set()

    def refuse(self, reason: str) -> None:
        """End the exchange without running it."""
        self.error = ReportsEndedError(reason)
        self._done.set()
        self._woken.set()

    def miss(self, find: Callable[[], str]) -> None:
        """Tell the caller, whose time is over, which ranks have not joined; once."""
        if not self._woken.is_set():
            self._absent = find()
            self._woken.set()

    def vote(self) -> bool:
        """Tell the other ranks whether this one still waits; from then on it cannot withdraw."""
        with self._vote:
            self._has_voted = True
            return not self._is_withdrawn

    def withdraw(self) -> bool:
        """Do without the result; False when other ranks may rely on it already."""
        with self._vote:
            self._is_withdrawn |= not self._has_voted
            return self._is_withdrawn

    def result(self, *, has_voted: bool = False) -> T:
        """Return the result when it is there, or raise after the time that its caller has.

        Args:
            has_voted: It cannot be withdrawn any more; wait again, as all ranks have joined it.

        Raises:
            ExchangeSkippedError: Other ranks have not joined by then; it goes on without this
                caller.
            ReportsEndedError: It was not run.
            Exception: What the collective raised.
        """
        event, end = self._woken, self.deadline + _NAMES_GRACE_S
        if has_voted:
            event, end = self._done, time.monotonic() + self._timeout_s
        elif self._is_behind:
            raise ExchangeSkippedError("an earlier one still waits for other ranks")
        while not event.is_set() and (left := end - time.monotonic()) > 0:
            # In short waits: an exception for this thread is raised between them.
            event.wait(min(left, 1.0))
        if not self._done.is_set():
            raise ExchangeSkippedError(
                f"{self._absent} not joined the report within {self._timeout_s:g} s"
            )
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]


_of_parents: list[Peers] = []
"""What a forked child must not destroy."""


class ExchangeWorker:
    """One daemon thread with a queue of collectives among the same ranks.

    Args:
        peers: The ranks.
        timeout_s: How long a caller waits for a collective.
    """

    def __init__(self, peers: Peers, timeout_s: float) -> None:
        self._peers = peers
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[Exchange[Any] | None] = queue.SimpleQueue()
        self._thread: ParkedAtExit | None = None
        self._last: Exchange[Any] | None = None
        self._end = ""
        self._number = 0
        self._pid = os.getpid()

    def submit(self, run: Callable[[Exchange[T]], T]) -> Exchange[T]:
        """Queue a collective behind those that were submitted before."""
        is_behind = self._last is not None and not self._last.is_done
        exchange = Exchange(run, self._timeout_s, is_behind=is_behind)
        if not self._end and self._thread is None:
            self._start()
        if self._end:
            exchange.refuse(self._end)
            return exchange
        self._last = exchange
        self._queue.put(exchange)
        return exchange

    def end(self, reason: str) -> None:
        """Run no more collectives."""
        self._end = self._end or reason

    def park(self) -> None:
        """Run no more collectives, and stop the thread for good: the interpreter ends."""
        self.end("the process ends")
        thread, self._thread = self._thread, None
        if thread is not None:
            park(thread)

    def close(self) -> bool:
        """End the thread and the connections to other ranks.

        A thread that waits for a rank that never comes is abandoned, with its connections: to
        close them would wait for the collective. False then, and in a forked child, whose parent
        has the thread and the connections.
        """
        thread, self._thread = self._thread, None
        self.end("the detector is shut down")
        if os.getpid() != self._pid:
            _of_parents.append(self._peers)
            return False
        if thread is not None:
            self._queue.put(None)
            if self._last is None or self._last.is_done:
                thread.join(_CLOSE_TIMEOUT_S)
            if thread.is_alive():
                return False
        self._peers.leave()
        return True

    def _start(self) -> None:
        thread = ParkedAtExit("nvrx-straggler-exchange", self._work)
        try:
            thread.start()
        except RuntimeError as error:  # such as at the interpreter's end
            self.end(f"there is no thread for reports: {error}")
            return
        self._thread = thread

    def _work(self) -> None:
        dist_utils.waiting.set(lambda work: self._wait(work.is_completed))
        while (exchange := self._queue.get()) is not None:
            if self._end:
                exchange.refuse(self._end)
                continue
            self._number += 1
            self._announced = False
            self._started = time.monotonic()
            self._current = exchange
            exchange.run()
            self._peers.withdraw()
            if exchange.error is not None:
                self.end("an earlier collective has failed")

    def join_peers(self) -> Any:
        """Return the process group of the ranks; in the thread of this worker."""
        if self._peers.group is None:
            self._peers.join(lambda is_over: self._wait(is_over, can_end=True))
        return self._peers.group

    def _wait(self, is_over: Callable[[], bool], *, can_end: bool = False) -> None:
        """Wait for other ranks; tell them after a while, and the caller when its time is over."""
        began = time.monotonic()
        announce_after = min(_ANNOUNCE_AFTER_S, self._timeout_s / 2)
        # A rank that has come at the last moment announces itself until then.
        named_at = max(self._current.deadline, began) + announce_after
        while not is_over():
            now = time.monotonic()
            if can_end and self._end:
                raise ReportsEndedError(self._end)
            if not self._announced and now - self._started > announce_after:
                self._announced = True
                self._peers.announce(str(self._number))
            if now > named_at:
                self._current.miss(self._peers.absent)
            time.sleep(min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, (now - began) / 8)))
