# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that stop training only briefly: asynchronous, and local with replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.lazy_names import lazy_names

if TYPE_CHECKING:
    from ._errors import AsyncSaveError, CheckpointWriteError, DamagedCheckpointError
    from ._latest import publish_latest, read_latest, remove_old
    from ._verify import VerifyReport, verify_checkpoint

__all__ = [
    "AsyncSaveError",
    "CheckpointWriteError",
    "DamagedCheckpointError",
    "VerifyReport",
    "publish_latest",
    "read_latest",
    "remove_old",
    "verify_checkpoint",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "_errors": ("AsyncSaveError", "CheckpointWriteError", "DamagedCheckpointError"),
        "_latest": ("publish_latest", "read_latest", "remove_old"),
        "_verify": ("VerifyReport", "verify_checkpoint"),
    },
)
