# SPDX-License-Identifier: Apache-2.0
"""Asynchronous checkpoints; names are loaded when first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "core": ("AsyncCallsQueue", "AsyncRequest", "AsyncSaveError", "abort_nvrx_checkpoint"),
        "torch_ckpt": ("TorchAsyncCheckpoint",),
    },
)
