# SPDX-License-Identifier: Apache-2.0
"""Public names of cycle logs: workers' output in one file per cycle. Loaded when first used.

`ft_launcher --ft-per-cycle-applog-prefix` needs none of them.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._logs.reader import (
        MultiplexingReaderThread,
        ReaderConfig,
    )
    from nvidia_resiliency_ext.fault_tolerance._logs.sinks import GrpcWriterThread
    from nvidia_resiliency_ext.fault_tolerance._torch.cycle_log_specs import (
        PipeBasedLogsSpecs,
        PipeSubprocessHandler,
    )

__all__ = [
    "GrpcWriterThread",
    "MultiplexingReaderThread",
    "PipeBasedLogsSpecs",
    "PipeSubprocessHandler",
    "ReaderConfig",
]

_MODULES = {
    "GrpcWriterThread": "_logs.sinks",
    "MultiplexingReaderThread": "_logs.reader",
    "PipeBasedLogsSpecs": "_torch.cycle_log_specs",
    "PipeSubprocessHandler": "_torch.cycle_log_specs",
    "ReaderConfig": "_logs.reader",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = "nvidia_resiliency_ext.fault_tolerance"
    value = getattr(importlib.import_module(f"{package}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
