# SPDX-License-Identifier: Apache-2.0
"""Public names of cycle logs: workers' output in one file per cycle. Loaded when first used.

`ft_launcher --ft-per-cycle-applog-prefix` needs none of them.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._cyclelogs.grpc_writer import GrpcWriterThread
    from ._cyclelogs.reader import MultiplexingReaderThread, ReaderConfig
    from ._cyclelogs.torch_specs import PipeBasedLogsSpecs, PipeSubprocessHandler

__all__ = [
    "GrpcWriterThread",
    "MultiplexingReaderThread",
    "PipeBasedLogsSpecs",
    "PipeSubprocessHandler",
    "ReaderConfig",
]

_MODULES = {
    "GrpcWriterThread": "_cyclelogs.grpc_writer",
    "MultiplexingReaderThread": "_cyclelogs.reader",
    "PipeBasedLogsSpecs": "_cyclelogs.torch_specs",
    "PipeSubprocessHandler": "_cyclelogs.torch_specs",
    "ReaderConfig": "_cyclelogs.reader",
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
