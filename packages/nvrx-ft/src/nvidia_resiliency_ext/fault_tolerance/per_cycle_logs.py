# SPDX-License-Identifier: Apache-2.0
"""Public names of cycle logs: workers' output in one file per cycle. Loaded when first used."""

from __future__ import annotations

from nvidia_resiliency_ext.shared_utils.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._logs.reader import MultiplexingReaderThread, ReaderConfig
    from ._logs.sinks import GrpcWriterThread
    from ._torch.cycle_log_specs import PipeBasedLogsSpecs, PipeSubprocessHandler

__all__ = [
    "GrpcWriterThread", "MultiplexingReaderThread", "PipeBasedLogsSpecs", "PipeSubprocessHandler",
    "ReaderConfig",
]  # fmt: skip

__getattr__, _ = lazy_names(
    globals(),
    {
        "_logs.reader": ("MultiplexingReaderThread", "ReaderConfig"),
        "_logs.sinks": ("GrpcWriterThread",),
        "_torch.cycle_log_specs": ("PipeBasedLogsSpecs", "PipeSubprocessHandler"),
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
