# SPDX-License-Identifier: Apache-2.0
"""Paths that can be trusted and files that are written whole.

The `validate_*` functions judge a path at one moment, for a clear message early on; what must not
be raced uses `open_append_beneath`, `atomic_write` and `private_dir`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading

from nvidia_resiliency_ext.shared_utils._path_checks import (
    resolve_under_allowed_roots,
    validate_directory,
    validate_filepath,
)
from nvidia_resiliency_ext.shared_utils._safe_files import (
    atomic_write,
    open_append_beneath,
    private_dir,
    read_regular_file,
    remove_tree_at,
    sync_directory,
)

__all__ = [
    "atomic_write",
    "lock_file",
    "open_append_beneath",
    "private_dir",
    "read_regular_file",
    "remove_tree_at",
    "resolve_under_allowed_roots",
    "sync_directory",
    "validate_directory",
    "validate_filepath",
]


def lock_file(descriptor: int, timeout_s: float = 0.0) -> None:
    """Take the exclusive `flock` of an open file or directory.

    The lock ends when the last copy of the descriptor is closed; where forked children may have
    copies, end it with `fcntl.flock(descriptor, fcntl.LOCK_UN)`.

    Args:
        descriptor: The open file.
        timeout_s: Seconds to wait for whoever has the lock; default: not at all.

    Raises:
        BlockingIOError: Somebody has the lock, for all of that time.
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if timeout_s <= 0:
            raise
    else:
        return
    # The kernel's wait has no deadline: a thread waits, on a copy, which is the same lock.
    guard = threading.Lock()
    is_done = threading.Event()
    is_abandoned = False
    copy = os.dup(descriptor)

    def wait() -> None:
        fcntl.flock(copy, fcntl.LOCK_EX)
        with guard:
            if is_abandoned:
                fcntl.flock(copy, fcntl.LOCK_UN)
            os.close(copy)
            is_done.set()

    threading.Thread(target=wait, name="nvrx-lock", daemon=True).start()
    if is_done.wait(timeout_s):
        return
    with guard:
        if is_done.is_set():
            return
        is_abandoned = True
    raise BlockingIOError(errno.EAGAIN, f"another process has had the lock for {timeout_s:g} s")
