# SPDX-License-Identifier: Apache-2.0
"""The collectors that save this rank's flight record; nvrx-common owns them.

Example:
    >>> collector = TorchFRTraceCollector("/dumps", checks={})
    >>> collector.collect()  # doctest: +SKIP
    '/dumps/_dump_0.json'
"""

from nvidia_resiliency_ext.shared_utils.trace_collector import (
    TorchFRTraceCollector,
    TraceCollector,
)

__all__ = ["TorchFRTraceCollector", "TraceCollector"]
