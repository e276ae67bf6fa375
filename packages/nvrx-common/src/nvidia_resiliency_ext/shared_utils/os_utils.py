# SPDX-License-Identifier: Apache-2.0
"""Paths that can be trusted and files that are written whole.

The `validate_*` functions judge a path at one moment, for a clear message early on; what must not
be raced uses `open_append_beneath`, `atomic_write` and `private_dir`.
"""

from __future__ import annotations

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
    "open_append_beneath",
    "private_dir",
    "read_regular_file",
    "remove_tree_at",
    "resolve_under_allowed_roots",
    "sync_directory",
    "validate_directory",
    "validate_filepath",
]
