# SPDX-License-Identifier: Apache-2.0
"""Lets the process that hosts a job's store go on where somebody has stopped it.

Who waits for a store that is stopped would wait until it is given up, and the process itself cannot
see that nobody needs it any more: it would stay for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import PidHandle

__all__ = ["PROGRAM", "wake_keepers"]

logger = logging.getLogger("nvrx")

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "keeper_program.py")
"""What the process runs."""
_STOPPED = "T"


def wake_keepers(job: str) -> int:
    """Continue the processes on this host that host stores of a job and are stopped.

    Returns:
        How many there were.
    """
    woken = 0
    for pid in _keepers(job):
        stat = procfs.read_stat(pid)
        if stat is None or stat.state != _STOPPED:
            continue
        # It may end, or be another user's.
        with contextlib.suppress(OSError), PidHandle(pid, stat.start_ticks) as handle:
            handle.signal(signal.SIGCONT)
            logger.warning("the process %d of the job's store was stopped; it goes on", pid)
            woken += 1
    return woken


def _keepers(job: str) -> Iterator[int]:
    name, wanted = os.path.basename(PROGRAM).encode(), f"--job={job}".encode()
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            arguments = procfs.cmdline(pid).split(b"\0")
            if wanted in arguments and any(os.path.basename(each) == name for each in arguments):
                yield pid
