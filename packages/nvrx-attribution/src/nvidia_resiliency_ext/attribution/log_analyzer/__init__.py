# SPDX-License-Identifier: Apache-2.0
"""Analysis of logs at the path that older programs import it from."""

from __future__ import annotations

from nvidia_resiliency_ext.attribution.log_analyzer.nvrx_logsage import (
    NVRxLogAnalyzer,
    chunk_logs_strict,
    lines_after,
)

__all__ = ["NVRxLogAnalyzer", "chunk_logs_strict", "lines_after"]
