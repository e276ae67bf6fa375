# SPDX-License-Identifier: Apache-2.0
"""What unblocks a main thread after an interruption; how is in `_abort/`."""

from __future__ import annotations

from ._abort.base import Abort
from ._abort.others import AbortPersistentCheckpointProcesses, AbortTransformerEngine
from ._abort.torch_distributed import AbortTorchDistributed

__all__ = [
    "Abort",
    "AbortPersistentCheckpointProcesses",
    "AbortTorchDistributed",
    "AbortTransformerEngine",
]
