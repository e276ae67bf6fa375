# SPDX-License-Identifier: Apache-2.0
"""Which CUDA device is this rank's? Asks torch, and never starts CUDA."""

from __future__ import annotations

import sys

from . import _env

__all__ = ["device_of_rank", "is_in_use"]


def is_in_use() -> bool:
    """Say whether this process has begun to use CUDA."""
    # CUDA can only have been begun by a torch that is imported.
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def device_of_rank() -> int | None:
    """Return the device of `LOCAL_RANK`, or the calling thread's; `None` if CUDA is not in use.

    Where each rank sees one device only, `LOCAL_RANK` may be beyond it.
    """
    if not is_in_use():
        return None
    import torch

    local_rank = _env.local_rank()
    if local_rank is not None and local_rank < torch.cuda.device_count():
        return local_rank
    return int(torch.cuda.current_device())
