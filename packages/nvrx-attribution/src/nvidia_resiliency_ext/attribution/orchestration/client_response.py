# SPDX-License-Identifier: Apache-2.0
"""Read a reply of the service as a client needs it; odd replies are no recommendation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nvidia_resiliency_ext.attribution.orchestration.types import (
    AttributionRecommendation,
    normalize_recommendation_action,
)
from nvidia_resiliency_ext.shared_utils.console import plain

__all__ = ["AttrSvcResult", "parse_attrsvc_response", "recommendation_should_stop"]


@dataclass(frozen=True)
class AttrSvcResult:
    """One reply to `GET /logs`.

    Attributes:
        result: As the service gave it.
        status: pending, in_flight, completed, failed, or empty.
        log_path: The log that was asked for.
        recommendation: What to do.
        should_stop: Whether that is STOP.
        mode: `single` or `splitlog`.
        analyzed_log_file: The file of a split log that was analysed.
        wl_restart: Which restart of the workload.
        sched_restarts: Restarts by the scheduler.
    """

    result: Any = None
    status: str = ""
    log_path: str | None = None
    recommendation: AttributionRecommendation = field(default_factory=AttributionRecommendation)
    should_stop: bool = False
    mode: str = "single"
    analyzed_log_file: str | None = None
    wl_restart: int | None = None
    sched_restarts: int | None = None

    def attribution_preview(self, max_chars: int = 200) -> str:
        """Return the beginning of the finding, on one line.

        Args:
            max_chars: Its greatest length in characters. Default 200.
        """
        result = self.result
        if isinstance(result, dict):
            result = result.get("justification") or result.get("result") or ""
        if isinstance(result, list) and result:
            result = result[0]
        if isinstance(result, dict):
            result = result.get("attribution_text") or result.get("raw_text") or ""
        text = " ".join(str(result or "").split())
        return plain(text[:max_chars])

    def result_id_preview(self, length: int = 16) -> str:
        """Return the beginning of the result's identifier; empty when there is none.

        Args:
            length: Its greatest length in characters. Default 16.
        """
        value = self.result.get("result_id") if isinstance(self.result, dict) else None
        return plain(value[:length]) if isinstance(value, str) else ""

    def format_summary(self, prefix: str = "", preview_chars: int = 200) -> str:
        """Return one line for people: status, action and finding.

        Args:
            prefix: Text in front.
            preview_chars: Greatest length of the finding in characters. Default 200.
        """
        preview = self.attribution_preview(preview_chars)
        text = f"{prefix}{self.status or 'unknown'}: {self.recommendation.action}"
        return f"{text} ({preview})" if preview else text

    def format_log_message(self, preview_chars: int = 200) -> str:
        """Return one line for a log, with the log's path.

        Args:
            preview_chars: Greatest length of the finding in characters. Default 200.
        """
        return self.format_summary(f"attribution of {plain(self.log_path or '?')}: ", preview_chars)


def recommendation_should_stop(recommendation: Any) -> bool:
    """Return whether a recommendation, an object or a mapping, says STOP.

    Args:
        recommendation: An object or a mapping with `action`.
    """
    if isinstance(recommendation, dict):
        action = recommendation.get("action")
    else:
        action = getattr(recommendation, "action", None)
    return normalize_recommendation_action(action) == "STOP"


def parse_attrsvc_response(payload: Any, *, log_path: str | None = None) -> AttrSvcResult:
    """Return the reply in a decoded JSON value; unknown forms give an empty reply.

    Args:
        payload: The decoded value.
        log_path: The log that was asked about; None: as the reply says.

    Example:
        >>> reply = {"status": "completed", "recommendation": {"action": "STOP"}}
        >>> parse_attrsvc_response(reply).should_stop
        True
    """
    if not isinstance(payload, dict):
        return AttrSvcResult(log_path=log_path)
    given = payload.get("recommendation")
    given = given if isinstance(given, dict) else {}
    recommendation = AttributionRecommendation(
        normalize_recommendation_action(given.get("action")),
        _text(given.get("reason")) or "",
        _text(given.get("source")) or "",
    )
    return AttrSvcResult(
        result=payload.get("result"),
        status=_text(payload.get("status")) or "",
        log_path=log_path if log_path is not None else _text(payload.get("log_path")),
        recommendation=recommendation,
        should_stop=recommendation_should_stop(recommendation),
        mode=_text(payload.get("mode")) or "single",
        analyzed_log_file=_text(payload.get("log_file")),
        wl_restart=_number(payload.get("wl_restart")),
        sched_restarts=_number(payload.get("sched_restarts")),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
