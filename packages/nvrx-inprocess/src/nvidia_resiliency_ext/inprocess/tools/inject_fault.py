# SPDX-License-Identifier: Apache-2.0
"""Another name for `nvidia_resiliency_ext.shared_utils.inject_fault`."""

from __future__ import annotations

from typing import Any

from nvidia_resiliency_ext.shared_utils import inject_fault as _home
from nvidia_resiliency_ext.shared_utils.inject_fault import (
    DispatchedFault,
    Fault,
    InjectedException,
    abort,
    async_raise,
    async_raise_exception,
    clear_workload_exception,
    dispatch_fault_injection,
    gpu_sleep,
    inject_fault,
    lock_gil,
    maybe_raise_workload_exception,
    raise_gpu_error,
    register_fault,
    segfault,
    send_signal,
    termination_signal_handler,
    workload_exception,
    workload_raise_event,
)

__all__ = [
    "DispatchedFault",
    "Fault",
    "InjectedException",
    "abort",
    "async_raise",
    "async_raise_exception",
    "clear_workload_exception",
    "dispatch_fault_injection",
    "gpu_sleep",
    "inject_fault",
    "lock_gil",
    "maybe_raise_workload_exception",
    "raise_gpu_error",
    "register_fault",
    "segfault",
    "send_signal",
    "termination_signal_handler",
    "workload_exception",
    "workload_raise_event",
]


def __getattr__(name: str) -> Any:
    return getattr(_home, name)
