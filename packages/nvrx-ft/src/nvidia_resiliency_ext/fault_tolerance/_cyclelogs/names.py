# SPDX-License-Identifier: Apache-2.0
"""Names of cycle logs and the prefixes of their lines. Pure."""

from __future__ import annotations

import os

__all__ = ["cycle_log_file", "rank_prefix"]


def cycle_log_file(base_log_file: str, cycle: int) -> str:
    """Return the log of one cycle: `/logs/job.log` gives `/logs/job_cycle3.log`."""
    stem, extension = os.path.splitext(base_log_file)
    return f"{stem}_cycle{cycle}{extension or '.log'}"


def rank_prefix(rank: int, world_size: int) -> bytes:
    """Return what stands before each line of a rank, as wide for all ranks."""
    width = len(str(max(world_size - 1, rank)))
    return f"{rank:>{width}}: ".encode()
