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


class ResultsQueue(queue.Queue[Any]):
    """A queue inside this process with the methods of a queue between processes."""

    def __init__(self) -> None:
        super().__init__()
        self._manager = _Manager()

    def __reduce__(self) -> tuple[Any, ...]:
        """Arrive empty in another process: results travel otherwise."""
        return ResultsQueue, ()
