# SPDX-License-Identifier: Apache-2.0
"""An exported record as Markdown, for messages and tickets."""

from __future__ import annotations

from typing import Any

from nvidia_resiliency_ext.attribution.trace_analyzer.fr_support import fr_markdown_appendix
from nvidia_resiliency_ext.shared_utils.console import plain

__all__ = ["format_posting_markdown_body"]

_ROWS = (
    ("job", "s_job_id"),
    ("user", "s_user"),
    ("cluster", "s_cluster"),
    ("log", "s_log_path"),
    ("action", "s_recommendation_action"),
    ("why", "s_auto_resume_explanation"),
    ("issues", "s_primary_issues"),
)
_MARKUP = str.maketrans({char: f"\\{char}" for char in "\\`*_{}[]<>#|"})
_LONGEST = 2000


def format_posting_markdown_body(record: dict[str, Any]) -> str:
    """Return a record as a Markdown list; text from the log is escaped.

    Args:
        record: The record; see `build_dataflow_record`.

    Example:
        >>> record = {"s_job_id": "42", "s_recommendation_action": "STOP"}
        >>> print(format_posting_markdown_body(record))
        - **job**: 42
        - **action**: STOP
    """
    lines = [
        f"- **{title}**: {plain(str(record[key])[:_LONGEST]).translate(_MARKUP)}"
        for title, key in _ROWS
        if record.get(key)
    ]
    appendix = fr_markdown_appendix(
        dump_path=record.get("s_fr_dump_path") or None,
        analysis_text=str(record.get("s_fr_analysis") or ""),
        hanging_ranks=str(record.get("s_hanging_ranks") or ""),
    )
    return "\n".join(lines) + appendix
