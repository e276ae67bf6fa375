# SPDX-License-Identifier: Apache-2.0
"""Open files that others name, below one directory, and keep a file for one process."""

from __future__ import annotations

import errno
import logging
import os
import stat

from nvidia_resiliency_ext.shared_utils.errors import ConfigError, PathOutsideRootsError
from nvidia_resiliency_ext.shared_utils.os_utils import lock_file, resolve_under_allowed_roots

__all__ = ["LOCK_FLAGS", "lock_for_life", "open_confined"]

LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def open_confined(path: str, allowed_root: str | None) -> int:
    """Open a regular file for reading, and return a descriptor that the caller owns.

    The path is checked by its real path, and again, after it was opened, by the name that the
    kernel has for the descriptor: a link that is put in place between the two is noticed.

    Args:
        path: The file; links are followed as long as they stay below the root.
        allowed_root: Directory below which the file must lie; None: anywhere.

    Raises:
        PathOutsideRootsError: It leads outside of the root.
        OSError: It cannot be opened, or is no regular file (`errno.EINVAL`).
    """
    # O_NONBLOCK: a pipe planted under this name must not hold us up.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if allowed_root is not None:
        path = resolve_under_allowed_roots(path, [allowed_root])
        flags |= os.O_NOFOLLOW
    descriptor = os.open(path, flags)
    error: OSError | None = None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        error = OSError(errno.EINVAL, "not a regular file", path)
    elif allowed_root is not None:
        root = os.path.realpath(allowed_root)
        opened = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.commonpath([root, opened]) != root:
            error = PathOutsideRootsError(errno.EPERM, f"leads outside of {root}", path)
    if error is not None:
        os.close(descriptor)
        raise error
    return descriptor


def lock_for_life(path: str, what: str) -> int:
    """Lock a file, and return its descriptor: the lock ends when that is closed.

    Where the file system has no locks a warning says so.

    Args:
        path: The file; it is made if needed.
        what: What it keeps others from, for messages, such as `the state /x`.

    Raises:
        ConfigError: Another process has the lock, or the file cannot be made.
    """
    try:
        descriptor = os.open(path, LOCK_FLAGS, 0o600)
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}") from None
    try:
        lock_file(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"another process uses {what}") from None
    except OSError as error:
        logging.getLogger("nvrx").warning("%s cannot be locked: %s", what, error.strerror)
    return descriptor
