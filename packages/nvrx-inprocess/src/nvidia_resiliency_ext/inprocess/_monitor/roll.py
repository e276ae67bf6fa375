# SPDX-License-Identifier: Apache-2.0
"""A small file in the node's directory: which process is which rank, for a monitor that follows.

The store has the same list for other nodes. This one also says when each process was started, so
that nobody signals a process that took over a number.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RollFile"]

logger = logging.getLogger("nvrx")

_MAX_BYTES = 1 << 20


class RollFile:
    """The file of one call.

    Args:
        directory: The node's private directory.
        prefix: The call.
    """

    def __init__(self, directory: str, prefix: str) -> None:
        name = hashlib.sha256(prefix.encode()).hexdigest()[:16]
        self._path = os.path.join(directory, f"roll-{name}.json")

    def read(self) -> dict[int, tuple[int, int]]:
        """Return process number and start of each initial rank; empty if there is no such file."""
        try:
            fields = json.loads(read_regular_file(self._path, _MAX_BYTES))
            return {int(rank): (int(pid), int(ticks)) for rank, (pid, ticks) in fields.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("monitor_process: %s cannot be used: %s", self._path, error)
            return {}

    def write(self, ranks: Mapping[int, tuple[int, int]]) -> None:
        """Replace the file; a disk that is full costs a follower some knowledge, no more."""
        try:
            atomic_write(self._path, json.dumps(dict(ranks)).encode(), fsync=False)
        except OSError as error:
            logger.warning("monitor_process: %s cannot be written: %s", self._path, error)

    def remove(self) -> None:
        """Remove it, if it is there."""
        try:
            os.unlink(self._path)
        except OSError as error:
            logger.debug("monitor_process: %s stays: %s", self._path, error)
