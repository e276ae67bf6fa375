# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that hardly stop training: asynchronous ones, and local ones with replicas."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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

_MODULES = {
    "_errors": ("AsyncSaveError", "CheckpointWriteError", "DamagedCheckpointError"),
    "_latest": ("publish_latest", "read_latest", "remove_old"),
    "_verify": ("VerifyReport", "verify_checkpoint"),
}


def __getattr__(name: str) -> object:
    """Import what defines a name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next(module for module, names in _MODULES.items() if name in names)
    value: object = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
