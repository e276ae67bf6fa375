# SPDX-License-Identifier: Apache-2.0
"""HTTP messages between the attribution service and its clients.

Both sides use this one definition; neither needs the other. Replies are not trusted: reading one
never raises, and an invalid reply counts as no recommendation.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "ACTION_CONTINUE", "ACTION_RESTART", "ACTION_STOP", "ACTION_TIMEOUT", "ACTION_UNKNOWN",
    "INTENT_PROGRESSIVE", "INTENT_TERMINAL", "INTENT_TRACK_ONLY", "ROUTE_HEALTHZ", "ROUTE_LOGS",
    "LogQuery", "LogReply", "LogSubmission", "Recommendation", "parse_log_reply",
]  # fmt: skip

ROUTE_LOGS = "/logs"
ROUTE_HEALTHZ = "/healthz"

INTENT_TRACK_ONLY = "track_only"
INTENT_PROGRESSIVE = "progressive"
INTENT_TERMINAL = "terminal"

ACTION_STOP = "STOP"
ACTION_RESTART = "RESTART"
ACTION_CONTINUE = "CONTINUE"
ACTION_UNKNOWN = "UNKNOWN"
ACTION_TIMEOUT = "TIMEOUT"

_ACTIONS = frozenset({ACTION_STOP, ACTION_RESTART, ACTION_CONTINUE, ACTION_TIMEOUT})
_TEXT_LENGTH = 2000
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,255}")
_MOST_NODES = 4096


@dataclass(frozen=True, slots=True)
class LogSubmission:
    """Body of ``POST /logs``: analyse this log.

    Attributes:
        log_path: Absolute path; the file may be created later.
        user: Whose job it is.
        job_id: The scheduler's number of the job.
        cycle_id: Which run of the workers it is.
        analysis_intent: One of the `INTENT_` names.
        log_complete: Nothing more will be written to it.
        evidence: Lines of others about its end, such as how a scheduler ended the job.
        attempt_index: Number of requeues of the job; each requeue begins again with cycle 0.
    """

    log_path: str
    user: str = "unknown"
    job_id: str | None = None
    cycle_id: int | None = None
    analysis_intent: str = INTENT_TRACK_ONLY
    log_complete: bool = False
    evidence: tuple[str, ...] = ()
    attempt_index: int | None = None

    def to_payload(self) -> dict[str, Any]:
        """Return the JSON object, without unknown fields."""
        payload = asdict(self) | {
            "log_complete": self.log_complete or None,
            "evidence": list(self.evidence) or None,
        }
        return {name: value for name, value in payload.items() if value is not None}


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Query of ``GET /logs``: what was found in this log?

    Attributes:
        log_path: As it was submitted.
        file: One of several files of a split log.
        wl_restart: Which restart of the workload.
        wait: Answer only when the analysis has ended.
    """

    log_path: str
    file: str | None = None
    wl_restart: int | None = None
    wait: bool = True

    def to_params(self) -> dict[str, str]:
        """Return the parameters of the URL."""
        params = asdict(self) | {"wait": "true" if self.wait else "false"}
        return {name: str(value) for name, value in params.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A service's advice.

    `action` is one of the `ACTION_` names, `reason` one sentence, `source` the analysis's name.
    """

    action: str = ACTION_UNKNOWN
    reason: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class LogReply:
    """Fields that a client needs of the reply to ``GET /logs``.

    Attributes:
        status: ``pending``, ``in_flight``, ``completed`` or ``failed``; empty when unknown.
        recommendation: Of an analysis that has ended.
        exclude_nodes: Nodes that the analysis would not use any more.
    """

    status: str = ""
    recommendation: Recommendation = Recommendation()
    exclude_nodes: tuple[str, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether the analysis has ended, well or not."""
        return self.status in {"completed", "failed"}


def parse_log_reply(payload: object) -> LogReply:
    """Return the reply in `payload`, a decoded JSON value; unknown forms give an empty reply.

    Example:
        >>> parse_log_reply({"recommendation": {"action": "stop"}}).recommendation.action
        'STOP'
    """
    if not isinstance(payload, dict):
        return LogReply()
    recommendation = _recommendation(payload.get("recommendation"))
    nodes = _nodes(payload.get("attribution"))
    return LogReply(_text(payload.get("status")), recommendation, nodes)


def _recommendation(value: object) -> Recommendation:
    if not isinstance(value, dict):
        return Recommendation()
    given = _text(value.get("action")).strip().upper()
    action = given if given in _ACTIONS else ACTION_UNKNOWN
    return Recommendation(action, _text(value.get("reason")), _text(value.get("source")))


def _nodes(attribution: object) -> tuple[str, ...]:
    """Return the nodes that an analysis would exclude, each once."""
    named = attribution.get("exclude_nodes") if isinstance(attribution, dict) else None
    if not isinstance(named, list):
        return ()
    names = (name for name in named[:_MOST_NODES] if isinstance(name, str))
    # A host's name has no spaces and no control characters; anything else would spoil a log.
    good = (name for name in names if _HOST.fullmatch(name))
    return tuple(dict.fromkeys(good))


def _text(value: object) -> str:
    return value[:_TEXT_LENGTH] if isinstance(value, str) else ""
