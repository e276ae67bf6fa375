# SPDX-License-Identifier: Apache-2.0
"""Analysis of flight-recorder traces: which ranks hold a hung job up; no model is needed."""

from __future__ import annotations

from nvidia_resiliency_ext.attribution.trace_analyzer.fr_support import (
    FR_DUMP_PATH_ENV,
    FR_DUMP_PATH_LOG_LINE_PATTERN,
    FR_DUMP_PATH_LOG_SCAN_LINES,
    FRAnalysisResult,
    TraceAnalyzer,
    analyze_fr_dump,
    extract_fr_dump_path,
    fr_fields_for_dataflow_record,
    fr_markdown_appendix,
    fr_markdown_appendix_from_result,
    fr_path_resolvable_for_collective_analyzer,
    fr_result_from_mcp_module_response,
)

__all__ = [
    "FR_DUMP_PATH_ENV",
    "FR_DUMP_PATH_LOG_LINE_PATTERN",
    "FR_DUMP_PATH_LOG_SCAN_LINES",
    "FRAnalysisResult",
    "TraceAnalyzer",
    "analyze_fr_dump",
    "extract_fr_dump_path",
    "fr_fields_for_dataflow_record",
    "fr_markdown_appendix",
    "fr_markdown_appendix_from_result",
    "fr_path_resolvable_for_collective_analyzer",
    "fr_result_from_mcp_module_response",
]
