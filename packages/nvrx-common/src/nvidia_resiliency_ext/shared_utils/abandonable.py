# SPDX-License-Identifier: Apache-2.0
"""Owns calls that may never return: each runs in a thread that can be left behind.

Nobody waits for such a thread, not even the interpreter at its exit.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeadlineCaller", "StuckError"]


class StuckError(DeadlineExceededError):
    """A call has not returned in time.

    Args:
        what: The call that hangs.
        seconds: For how long.
    """

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, seconds)
        self.what = what
        self.seconds = seconds

    def __str__(self) -> str:
        return f"{self.what} has not returned for {self.seconds:.1f} s"


class DeadlineCaller:
    """Runs one call at a time; while one hangs, all later ones fail at once.

    So a hung driver costs one thread, however often it is asked.
    """

    def __init__(self) -> None:
        self._stuck: _Call | None = None
        self._turn = threading.Lock()

    def run(self, what: str, call: Callable[[], Any], timeout_s: float) -> Any:
        """Return what the call returns, or raise what it raises.

        Raises:
            StuckError: It, or one before it, does not return in time.
        """
        if not self._turn.acquire(timeout=timeout_s):
            raise StuckError(what, timeout_s)
        try:
            return self._run(what, call, timeout_s)
        finally:
            self._turn.release()

    def _run(self, what: str, call: Callable[[], Any], timeout_s: float) -> Any:
        stuck = self._stuck
        # A forked child does not have the threads of its parent.
        if stuck is not None and stuck.pid == os.getpid() and not stuck.ended.is_set():
            raise StuckError(stuck.what, stuck.age_s())
        self._stuck = None
        running = _Call(what, call)
        if not running.ended.wait(timeout_s):
            self._stuck = running
            raise StuckError(what, running.age_s())
        if running.error is not None:
            raise running.error
        return running.value


class _Call:
    def __init__(self, what: str, call: Callable[[], Any]) -> None:
        self.what = what
        self.pid = os.getpid()
        self.ended = threading.Event()
        self.value: Any = None
        self.error: Exception | None = None
        self._call = call
        self._start = time.monotonic()
        threading.Thread(target=self._run, name=f"nvrx-{what}"[:60], daemon=True).start()

    def age_s(self) -> float:
        return time.monotonic() - self._start

    def _run(self) -> None:
        try:
            self.value = self._call()
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits
            self.error = error
        finally:
            self.ended.set()
