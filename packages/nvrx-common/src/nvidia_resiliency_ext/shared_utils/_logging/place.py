# SPDX-License-Identifier: Apache-2.0
"""Owns the directory of a node's log files: making it, judging it, opening it; reads no file."""

from __future__ import annotations

import errno
import os

__all__ = ["open_log_directory"]


def open_log_directory(path: str) -> int:
    """Open the directory, which is made with mode 0700 when it is missing.

    Returns:
        A descriptor that the caller owns.

    Raises:
        UnsafePathError: ``validate_directory`` refuses it, or it belongs to another user, who could
            read the logs and put files of his own among them.
        OSError: It cannot be made or opened.
    """
    from nvidia_resiliency_ext.shared_utils.errors import UnsafePathError
    from nvidia_resiliency_ext.shared_utils.os_utils import validate_directory

    os.makedirs(path, mode=0o700, exist_ok=True)
    validate_directory(path)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    owner = os.fstat(descriptor).st_uid
    if owner != os.geteuid():
        os.close(descriptor)
        raise UnsafePathError(errno.EPERM, f"the directory belongs to uid {owner}", path)
    return descriptor
