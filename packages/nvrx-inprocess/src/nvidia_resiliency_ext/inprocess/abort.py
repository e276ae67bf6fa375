# SPDX-License-Identifier: Apache-2.0
"""What unblocks a main thread after an interruption; how is in `_unblock/`."""

from __future__ import annotations

from ._unblock.aborts import (
    Abort,
    AbortPersistentCheckpointProcesses,
    AbortTorchDistributed,
    AbortTransformerEngine,
)

__all__ = [
    "Abort",
    "AbortPersistentCheckpointProcesses",
    "AbortTorchDistributed",
    "AbortTransformerEngine",
]
