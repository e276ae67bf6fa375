# SPDX-License-Identifier: Apache-2.0
"""The process-wide queue of write results, for users who look at it; results do not use it."""

from __future__ import annotations

import queue
from typing import Any


class _Manager:
    """Stands for the server process that such a queue has elsewhere; there is none."""

    def __init__(self) -> None:
        self.is_shut_down = False

    def shutdown(self) -> None:
        """Mark the queue as given up."""
        self.is_shut_down = True


class ResultsQueue:
    """A queue inside this process with the methods of a queue between processes."""

    def __init__(self) -> None:
        self._manager = _Manager()
        self._values: queue.Queue[Any] = queue.Queue()

    def put(self, value: Any) -> None:
        """Append a value."""
        self._values.put(value)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the oldest value; `queue.Empty` when there is none in time."""
        return self._values.get(block, timeout)

    def get_nowait(self) -> Any:
        """Take the oldest value; `queue.Empty` when there is none."""
        return self._values.get_nowait()

    def empty(self) -> bool:
        """Return whether there is no value."""
        return self._values.empty()

    def __reduce__(self) -> tuple[Any, ...]:
        """Arrive empty in another process: results travel otherwise."""
        return ResultsQueue, ()
