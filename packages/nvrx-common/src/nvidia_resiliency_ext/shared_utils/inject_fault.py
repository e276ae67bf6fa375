# SPDX-License-Identifier: Apache-2.0
"""Fault injection, to test that a job survives faults.

`dispatch_fault_injection` injects a fault into the calling process, `inject_fault` into random
ranks of a job, the same choice on all ranks. torch is imported only for GPU faults.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from ._faults.dispatch import (
    DispatchedFault,
    abort,
    async_raise_exception,
    dispatch_fault_injection,
    gpu_sleep,
    lock_gil,
    raise_gpu_error,
    register_fault,
    segfault,
    send_signal,
    workload_exception,
)
from ._faults.interpreter import (
    async_raise,
    clear_workload_exception,
    maybe_raise_workload_exception,
    termination_signal_handler,
    workload_raise_event,
)
from ._faults.kinds import Fault, InjectedException, draw_plan

__all__ = [
    "DispatchedFault", "Fault", "InjectedException", "abort", "async_raise",
    "async_raise_exception", "clear_workload_exception", "dispatch_fault_injection", "gpu_sleep",
    "inject_fault", "lock_gil", "maybe_raise_workload_exception", "raise_gpu_error",
    "register_fault", "segfault", "send_signal", "termination_signal_handler", "workload_exception",
    "workload_raise_event",
]  # fmt: skip


def inject_fault(
    faults: Fault | Iterable[Fault],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    callback: Callable[[], object] | None = None,
) -> DispatchedFault | None:
    """Choose some ranks at random, and inject a fault if this rank is one of them.

    Every rank must call this with the same arguments; all compute the same plan from `RANK` and
    `WORLD_SIZE` (0 of 1 if they are not set).

    Args:
        faults: One of these is injected, the same one on all chosen ranks.
        num_faults: Number of chosen ranks, or its minimum and maximum.
        keep_alive: Number of ranks, from 0 on, that are never chosen.
        delay: Seconds until the fault, or the minimum and maximum.
        seed: Seed of the random choice.
        callback: Called on a chosen rank right before the fault.

    Returns:
        The handle on a chosen rank, else `None`.

    Raises:
        RuntimeError: As `dispatch_fault_injection`.
        ValueError: `faults` is empty, or a minimum is larger than its maximum.

    Example:
        >>> inject_fault(Fault.SIGKILL, num_faults=1, keep_alive=1, delay=60.0, seed=7)
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    fault, ranks, seconds = draw_plan(faults, num_faults, keep_alive, delay, seed, world_size)
    return dispatch_fault_injection(fault, seconds, callback) if rank in ranks else None


def __getattr__(name: str) -> Any:
    if name == "ctx":
        # Kept for programs that import it; nothing here starts a process with it.
        import multiprocessing

        return multiprocessing.get_context("spawn")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
