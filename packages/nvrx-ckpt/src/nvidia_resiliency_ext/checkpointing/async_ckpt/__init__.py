# SPDX-License-Identifier: Apache-2.0
"""Asynchronous checkpoints; names are loaded when first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core import AsyncCallsQueue, AsyncRequest, AsyncSaveError, abort_nvrx_checkpoint
    from .torch_ckpt import TorchAsyncCheckpoint

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "AsyncSaveError",
    "TorchAsyncCheckpoint",
    "abort_nvrx_checkpoint",
]


def __getattr__(name: str) -> object:
    """Import what defines a name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "torch_ckpt" if name == "TorchAsyncCheckpoint" else "core"
    value: object = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
