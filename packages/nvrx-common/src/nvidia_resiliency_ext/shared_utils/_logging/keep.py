# SPDX-License-Identifier: Apache-2.0
"""Owns what a writer deletes of its older files, and the count of records that nobody has read.

Without an aggregator the newest files stay. While one works in the directory, a file that it has
not read to the end stays too, within a bound: an aggregator whose disk is full must not fill the
node's memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .position import Position

__all__ = ["count_records", "remove_old"]

_UNREAD_FACTOR = 16
_CHUNK_BYTES = 1 << 20
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_COMPLAINT_END = b" log records dropped\n"


def remove_old(names: Sequence[str], max_backup_files: int, directory: int) -> int:
    """Delete all but the newest files of one writer; what is not read yet may stay as well.

    Args:
        names: The writer's files, oldest first.
        max_backup_files: How many stay in any case.
        directory: Descriptor of their directory.

    Returns:
        How many records were deleted that no aggregator had read.
    """
    position = _position_of(directory)
    is_aggregated = position is not None and position.is_fresh(time.monotonic())
    most = _UNREAD_FACTOR * max(1, max_backup_files) if is_aggregated else max_backup_files
    dropped = 0
    left = len(names)
    for name in names[: len(names) - max_backup_files]:
        try:
            descriptor = os.open(name, _FLAGS, dir_fd=directory)
        except OSError:
            continue  # gone, or a link or a device: whatever it is, it is no log of ours
        try:
            offset = 0 if position is None else position.done_of(descriptor)
            is_unread = offset < os.fstat(descriptor).st_size
            if is_unread and left <= most:
                continue
            dropped += count_records(descriptor, offset) if is_unread else 0
        finally:
            os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        left -= 1
    return dropped


def count_records(descriptor: int, offset: int = 0) -> int:
    """Return how many records a file has from ``offset`` on, complaints of the writer aside."""
    count = 0
    before = b"\n"
    with open(descriptor, "rb", closefd=False) as file:
        if not offset:
            file.seek(0)
            count -= file.readline(_CHUNK_BYTES).endswith(_COMPLAINT_END)
        file.seek(offset)
        while chunk := file.read(_CHUNK_BYTES):
            joined = before + chunk
            # A line begins after each line break, and goes on with a record if a tab is first.
            count += joined.count(b"\n", 0, -1) - joined.count(b"\n\t")
            before = joined[-1:]
    return count


def _position_of(directory: int) -> Position | None:
    """Return how far an aggregator of this boot has read the files."""
    from .position import STATE_NAME

    try:
        os.stat(STATE_NAME, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    from nvidia_resiliency_ext.shared_utils.procfs import boot_id

    from .position_file import read_position

    position = read_position(directory)
    return position if position is not None and position.boot_id == boot_id() else None
