# SPDX-License-Identifier: Apache-2.0
"""What the analysis of a log hands out: recommendations, results, previews and errors."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from nvidia_resiliency_ext.attribution._core.errors import AttributionError
from nvidia_resiliency_ext.attribution._core.verdict import RawAnalysisResultItem
from nvidia_resiliency_ext.attribution.orchestration.config import ErrorCode
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

__all__ = [
    "RECOMMENDATION_ACTIONS",
    "RECOMMENDATION_CONTINUE",
    "RECOMMENDATION_RESTART",
    "RECOMMENDATION_STOP",
    "RECOMMENDATION_TIMEOUT",
    "RECOMMENDATION_UNKNOWN",
    "AttributionRecommendation",
    "LogAnalysisCycleResult",
    "LogAnalysisSplitlogResult",
    "LogAnalyzerConfig",
    "LogAnalyzerError",
    "LogAnalyzerFilePreview",
    "LogAnalyzerOutcome",
    "LogAnalyzerSubmitResult",
    "LogSageAnalysisResult",
    "RawAnalysisResultItem",
    "normalize_recommendation_action",
]

RECOMMENDATION_STOP = "STOP"
RECOMMENDATION_RESTART = "RESTART"
RECOMMENDATION_CONTINUE = "CONTINUE"
RECOMMENDATION_UNKNOWN = "UNKNOWN"
RECOMMENDATION_TIMEOUT = "TIMEOUT"
RECOMMENDATION_ACTIONS = frozenset(
    {
        RECOMMENDATION_STOP,
        RECOMMENDATION_RESTART,
        RECOMMENDATION_CONTINUE,
        RECOMMENDATION_UNKNOWN,
        RECOMMENDATION_TIMEOUT,
    }
)


def normalize_recommendation_action(action: Any) -> str:
    """Return an action in upper case; UNKNOWN for anything but the five actions.

    Args:
        action: The action as given.

    Example:
        >>> normalize_recommendation_action(" stop ")
        'STOP'
    """
    text = action.strip().upper() if isinstance(action, str) else ""
    return text if text in RECOMMENDATION_ACTIONS else RECOMMENDATION_UNKNOWN


@dataclass(frozen=True)
class AttributionRecommendation:
    """Recommended action for the job.

    Attributes:
        action: STOP, RESTART, CONTINUE, UNKNOWN or TIMEOUT.
        reason: Why, in one line.
        source: Who says so.
    """

    action: str = RECOMMENDATION_UNKNOWN
    reason: str = ""
    source: str = ""


@dataclass(frozen=True)
class LogSageAnalysisResult:
    """Result items of a log, and the recommendation that follows from them.

    Args:
        items: The result items.
        recommendation: The recommendation that follows from them.
    """

    items: list[RawAnalysisResultItem]
    recommendation: AttributionRecommendation = AttributionRecommendation()


def _no_recommendation() -> dict[str, str]:
    return {"action": RECOMMENDATION_UNKNOWN, "source": ""}


@dataclass
class LogAnalysisCycleResult:
    """Findings of one cycle in a log.

    Attributes:
        result: `restart_agent_response.v1` or, for the backend `mcp`, items; None: not yet.
        status: pending, in_flight, completed or failed.
        wl_restart: Which restart of the workload.
        wl_restart_count: How many there were, if known.
        fr_dump_path: Where dumps were found.
        fr_analysis: Text of their analysis.
        llm_merged_summary: Prose of a model.
        recommendation: `{"action", "reason", "source"}` of an analysis that has ended.
        candidate_recommendation: What the rules say while it runs.
        attribution: `nvrx_attribution.v1`.
    """

    result: Any
    status: str = "completed"
    wl_restart: int = 0
    wl_restart_count: int | None = None
    fr_dump_path: str | None = None
    fr_analysis: str | None = None
    llm_merged_summary: str | None = None
    recommendation: dict[str, str] = field(default_factory=_no_recommendation)
    candidate_recommendation: dict[str, str] = field(default_factory=_no_recommendation)
    attribution: dict[str, Any] | None = None

    def to_payload(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


@dataclass
class LogAnalysisSplitlogResult:
    """Findings in one of the files of a split log.

    Attributes:
        result: As `LogAnalysisCycleResult.result`.
        status: pending, in_flight, completed or failed.
        mode: Always "splitlog".
        sched_restarts: Restarts by the scheduler.
        log_file: Path of the file.
        wl_restart: Index of the file, from 0.
        fr_dump_path: Where flight recorder dumps were found.
        fr_analysis: Text of their analysis.
        llm_merged_summary: Prose of a model.
        recommendation: `{"action", "reason", "source"}` of an analysis that has ended.
        candidate_recommendation: The same while it runs, from the rules.
        attribution: `nvrx_attribution.v1`.
    """

    result: Any
    status: str = "completed"
    mode: str = "splitlog"
    sched_restarts: int = 0
    log_file: str = ""
    wl_restart: int = 0
    fr_dump_path: str | None = None
    fr_analysis: str | None = None
    llm_merged_summary: str | None = None
    recommendation: dict[str, str] = field(default_factory=_no_recommendation)
    candidate_recommendation: dict[str, str] = field(default_factory=_no_recommendation)
    attribution: dict[str, Any] | None = None

    def to_payload(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class LogAnalyzerSubmitResult:
    """The answer to a submission.

    Args:
        submitted: Whether the log was accepted.
        normalized_path: The resolved path.
        mode: "single", "splitlog" or "pending". Default "single".
        logs_dir: Directory of a split log's files.
        sched_restarts: Restarts by the scheduler so far.
        files_analyzed: Files of a split log that have a result.
    """

    submitted: bool
    normalized_path: str
    mode: str = "single"
    logs_dir: str | None = None
    sched_restarts: int = 0
    files_analyzed: int = 0

    def to_payload(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class LogAnalyzerFilePreview:
    """The beginning of a log as text.

    Args:
        content: The text, without control characters.
        path: The resolved path.
    """

    content: str
    path: str


@dataclass(frozen=True)
class LogAnalyzerConfig:
    """Where logs may lie.

    Raises:
        ConfigError: `allowed_root` is no absolute path.
    """

    allowed_root: str

    def __post_init__(self) -> None:
        if not os.path.isabs(self.allowed_root):
            raise ConfigError(f"allowed_root must be an absolute path: {self.allowed_root!r}")


class LogAnalyzerError(AttributionError):
    """A request is refused.

    Args:
        error_code: Why.
        message: The same in words, with the value.
    """

    def __init__(self, error_code: ErrorCode, message: str) -> None:
        super().__init__(error_code, message)
        self.error_code = ErrorCode(error_code)
        self.message = message

    def __str__(self) -> str:
        return f"{self.error_code.value}: {self.message}"


LogAnalyzerOutcome = LogAnalysisCycleResult | LogAnalysisSplitlogResult | LogAnalyzerError
