# SPDX-License-Identifier: Apache-2.0
"""torch's flight recorder at an abort: taken before it, saved after it. It aborts nothing."""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.inprocess import _env
from nvidia_resiliency_ext.inprocess._bounded import call_bounded
from nvidia_resiliency_ext.shared_utils.trace_collector import TorchFRTraceCollector

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Recording", "is_recording"]

logger = logging.getLogger("nvrx")


def is_recording() -> bool:
    """Say whether torch keeps a flight record in this process.

    Raises:
        ValueError: The size of its buffer is not a number.
    """
    return _env.flight_recorder_size() > 0


class Recording:
    """The record of one iteration.

    Args:
        path: Folder of all records.
        iteration: Each has a folder of its own.
        collector: Makes what takes and saves; torch's recorder by default.
    """

    def __init__(
        self,
        path: str,
        iteration: int,
        collector: Callable[[str], Any] = TorchFRTraceCollector,
    ) -> None:
        self._path = os.path.join(path, f"iter_{iteration}")
        self._make = collector
        self._collector: Any = None
        self._dump: Any = None

    def take(self, timeout_s: float) -> None:
        """Keep what the recorder knows now, in memory.

        Raises:
            exception.TimeoutError: It does not answer.
            Exception: It cannot be read.
        """
        call_bounded("nvrx-flight-record", self._take, timedelta(seconds=timeout_s))

    def save(self) -> threading.Thread | None:
        """Write it, in a thread of its own; what fails there is logged.

        Returns:
            The thread; `None` if nothing was taken.
        """
        if self._dump is None:
            return None
        thread = threading.Thread(target=self._save, name="nvrx-flight-record", daemon=True)
        thread.start()
        return thread

    def _take(self) -> None:
        # The collector is made here, too: it looks at devices, which may be what hangs.
        self._collector = self._make(self._path)
        self._dump = self._collector.take()

    def _save(self) -> None:
        try:
            logger.info("flight record saved as %s", self._collector.save(self._dump))
        except Exception:
            logger.exception("the flight record could not be saved")
