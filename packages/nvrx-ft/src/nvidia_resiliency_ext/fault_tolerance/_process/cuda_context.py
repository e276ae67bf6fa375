# SPDX-License-Identifier: Apache-2.0
"""Making a CUDA context small, for processes that need one but run no real kernels."""

import logging
from typing import Final

__all__ = ["reduce_cuda_ctx_size"]

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
