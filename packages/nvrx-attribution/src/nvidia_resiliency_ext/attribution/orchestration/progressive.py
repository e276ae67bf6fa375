# SPDX-License-Identifier: Apache-2.0
"""Why a log is submitted: to be known, to be read while it grows, or because it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.shared_utils.attribution_wire import (
    INTENT_PROGRESSIVE,
    INTENT_TERMINAL,
    INTENT_TRACK_ONLY,
)

__all__ = [
    "ANALYSIS_INTENT_PROGRESSIVE",
    "ANALYSIS_INTENT_TERMINAL",
    "ANALYSIS_INTENT_TRACK_ONLY",
    "PROGRESSIVE_START_TOOL",
    "STATUS_FAILED",
    "STATUS_STARTED",
    "STATUS_UNSUPPORTED",
    "ProgressiveStartResult",
    "normalize_analysis_intent",
]

ANALYSIS_INTENT_TRACK_ONLY = INTENT_TRACK_ONLY
ANALYSIS_INTENT_PROGRESSIVE = INTENT_PROGRESSIVE
ANALYSIS_INTENT_TERMINAL = INTENT_TERMINAL
PROGRESSIVE_START_TOOL = "log_analyzer_progressive_start"
STATUS_UNSUPPORTED = "unsupported"
STATUS_FAILED = "failed"
STATUS_STARTED = "started"

_INTENTS = frozenset({INTENT_TRACK_ONLY, INTENT_PROGRESSIVE, INTENT_TERMINAL})


@dataclass(frozen=True)
class ProgressiveStartResult:
    """Whether a log is being read while it grows.

    Attributes:
        status: unsupported, failed or started.
        message: Why not.
        handle: The reader, when it has started.
    """

    status: str
    message: str = ""
    handle: Any = None


def normalize_analysis_intent(value: Any) -> str:
    """Return an intent in lower case; `track_only` for None and empty text.

    Args:
        value: The intent as given.

    Raises:
        ValueError: The value is none of `track_only`, `progressive` and `terminal`.

    Example:
        >>> normalize_analysis_intent(" Terminal "), normalize_analysis_intent(None)
        ('terminal', 'track_only')
    """
    if value is None or value == "":
        return INTENT_TRACK_ONLY
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in _INTENTS:
        raise ValueError(f"analysis_intent {value!r} is none of {', '.join(sorted(_INTENTS))}")
    return text
