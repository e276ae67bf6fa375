# SPDX-License-Identifier: Apache-2.0
"""From result items to one recommendation, and its forms for replies and exported records."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from nvidia_resiliency_ext.attribution._core.verdict import RawAnalysisResultItem
from nvidia_resiliency_ext.attribution.orchestration.types import (
    RECOMMENDATION_ACTIONS,
    RECOMMENDATION_UNKNOWN,
    AttributionRecommendation,
)

__all__ = [
    "log_fields_for_dataflow_record",
    "logsage_recommendation",
    "recommendation_payload",
]

# What analyses of the older form say in place of an action.
_OLD_HEADS = (
    (re.compile(r"STOP\b|APPLICATION DONE|(?:SLURM|JOB|STEP)\b.*TIME LIMIT"), "STOP"),
    (re.compile(r"RESTART IMMEDIATE|SLURM\b.*PREEMPT|.*\bSTEP\b.*\bCANCELL?ED"), "RESTART"),
    (re.compile(r"ERRORS NOT FOUND"), "CONTINUE"),
)
_PRIORITY = ("STOP", "RESTART", "TIMEOUT", "UNKNOWN", "CONTINUE")


def logsage_recommendation(
    items: Iterable[RawAnalysisResultItem], *, source: str = ""
) -> AttributionRecommendation:
    """Return the most severe action of result items; UNKNOWN if there are none.

    The order is STOP, RESTART, TIMEOUT, UNKNOWN, CONTINUE.

    Args:
        items: The result items, oldest first.
        source: Name of the analysis, for the recommendation.

    Example:
        >>> item = RawAnalysisResultItem("", "", "the GPU fell off the bus", "", 0, "RESTART")
        >>> logsage_recommendation([item]).action
        'RESTART'
    """
    found = {_action_of(item): item for item in reversed(list(items))}
    for action in _PRIORITY:
        if action in found:
            return AttributionRecommendation(action, found[action].auto_resume_explanation, source)
    return AttributionRecommendation(source=source)


def recommendation_payload(recommendation: AttributionRecommendation) -> dict[str, str]:
    """Return `{"action", "source"}`.

    Args:
        recommendation: The recommendation.
    """
    return {"action": recommendation.action, "source": recommendation.source}


def log_fields_for_dataflow_record(
    items: Iterable[RawAnalysisResultItem],
) -> dict[str, Any]:
    """Return the fields of an exported record about the log, from the newest item.

    Args:
        items: The result items, oldest first.
    """
    last = list(items)[-1:]
    item = last[0] if last else None
    return {
        "s_auto_resume": item.auto_resume if item else "",
        "s_auto_resume_explanation": item.auto_resume_explanation if item else "",
        "s_primary_issues": ", ".join(item.primary_issues) if item else "",
    }


def _action_of(item: RawAnalysisResultItem) -> str:
    action = str(item.action or "").strip().upper()
    if action in RECOMMENDATION_ACTIONS:
        return action
    head = str(item.auto_resume or "").strip().upper()
    return next((found for form, found in _OLD_HEADS if form.match(head)), RECOMMENDATION_UNKNOWN)
