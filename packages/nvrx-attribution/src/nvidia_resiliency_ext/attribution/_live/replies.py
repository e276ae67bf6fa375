# SPDX-License-Identifier: Apache-2.0
"""Verdicts as the replies that clients get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.attribution.orchestration.utils import log_analyzer_result_payload

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution import engine

__all__ = ["failed_reply", "recommendation_of", "reply_of"]

_SOURCE = "rules"
_MODEL_SOURCE = "rules, refined by a model"
_LISTS = ("groups", "suspects", "findings")
_MOST_LISTED = 256


def reply_of(verdict: engine.Verdict, dump_path: str | None, *, is_lib: bool) -> dict[str, Any]:
    """Return the reply about a log whose analysis has ended.

    Args:
        verdict: What was found.
        dump_path: Where dumps were found, or None.
        is_lib: The result is `restart_agent_response.v1`; else the items of old.
    """
    if is_lib:
        result = verdict.to_restart_agent_response()
    else:
        result = log_analyzer_result_payload([verdict.to_item()])
    return {
        "result": result,
        "status": "completed",
        "fr_dump_path": dump_path,
        "fr_analysis": None if verdict.fr is None else _ranks_text(verdict.fr),
        "recommendation": recommendation_of(verdict),
        "candidate_recommendation": recommendation_of(verdict),
        "attribution": {**verdict.to_dict(), "fr": _bounded(verdict.fr)},
    }


def recommendation_of(verdict: engine.Verdict) -> dict[str, str]:
    """Return action, reason and source of a verdict."""
    is_refined = verdict.refinement is not None and verdict.refinement["used"]
    source = _MODEL_SOURCE if is_refined else _SOURCE
    return {"action": verdict.action, "reason": verdict.reason, "source": source}


def _bounded(report: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a report whose long lists are cut: clients refuse replies over 1 MiB."""
    if report is None:
        return None
    cut = {name: report[name][:_MOST_LISTED] for name in _LISTS if name in report}
    return {**report, **cut}


def failed_reply(reason: str, action: str = "UNKNOWN") -> dict[str, Any]:
    """Return the reply about a log whose analysis failed."""
    recommendation = {"action": action, "reason": reason, "source": _SOURCE}
    return {"result": None, "status": "failed", "recommendation": recommendation}


def _ranks_text(report: dict[str, Any]) -> str:
    return f"{report['kind']}: hanging ranks: {report['guilty_ranks']}"
