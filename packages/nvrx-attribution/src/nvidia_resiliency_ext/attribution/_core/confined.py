# SPDX-License-Identifier: Apache-2.0
"""Open files that others name, below one directory; no link can lead out of it."""

from __future__ import annotations

import errno
import os
import stat

from nvidia_resiliency_ext.shared_utils.errors import PathOutsideRootsError
from nvidia_resiliency_ext.shared_utils.os_utils import resolve_under_allowed_roots

__all__ = ["open_confined"]


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
