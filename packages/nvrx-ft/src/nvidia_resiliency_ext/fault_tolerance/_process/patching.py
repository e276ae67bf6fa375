# SPDX-License-Identifier: Apache-2.0
"""Replacing a method for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["patched_method", "reduce_cuda_ctx_size"]


logger = logging.getLogger("nvrx")

# CUlimit values of the driver's stable interface.
_STACK_SIZE: Final = 0
_PRINTF_FIFO_SIZE: Final = 1
_MALLOC_HEAP_SIZE: Final = 2
# The driver rounds these up to what it needs at least.
_SMALLEST_BYTES: Final = {_STACK_SIZE: 1, _PRINTF_FIFO_SIZE: 1, _MALLOC_HEAP_SIZE: 1}


def reduce_cuda_ctx_size() -> None:
    """Lower the device memory limits of the calling thread's CUDA context.

    Without a driver, or without a context in this thread, there is nothing to reduce and nothing
    happens; above all, no context is created.
    """
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    context = ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) != 0 or not context.value:
        return
    for limit, size_bytes in _SMALLEST_BYTES.items():
        status = driver.cuCtxSetLimit(ctypes.c_int(limit), ctypes.c_size_t(size_bytes))
        if status != 0:
            logger.debug("cuCtxSetLimit(%d) answered %d", limit, status)


@contextmanager
def patched_method(obj: Any, name: str, new: Any) -> Iterator[None]:
    """Let `obj.name` be `new` inside the block, and what it was before afterwards.

    An attribute that `obj` only inherits is not written onto it for good.

    Raises:
        AttributeError: there is no such attribute.
    """
    getattr(obj, name)
    own = vars(obj)
    is_own = name in own
    before = own.get(name)
    setattr(obj, name, new)
    try:
        yield
    finally:
        if is_own:
            setattr(obj, name, before)
        else:
            delattr(obj, name)
