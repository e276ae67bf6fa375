# SPDX-License-Identifier: Apache-2.0
"""Which kinds of hardware could be here? Looks from outside, so that their absence costs nothing.

Asking a driver means loading tens of milliseconds of code; on most machines without a device these
questions answer first. Whoever asks does so in a thread: a library may lie on a slow file system.
"""

from __future__ import annotations

import os

__all__ = ["has_adapters", "has_gpu_driver"]

_DRIVER_LIBRARY = "libnvidia-ml.so.1"


def has_gpu_driver() -> bool:
    """Return whether the library of the NVIDIA driver can be loaded."""
    import ctypes

    try:
        ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError:
        return False
    return True


def has_adapters(sysfs_root: str = "/sys") -> bool:
    """Return whether the kernel knows a network card for InfiniBand or RoCE."""
    try:
        return bool(os.listdir(f"{sysfs_root}/class/infiniband"))
    except OSError:
        return False
