# SPDX-License-Identifier: Apache-2.0
"""The result item of older callers: five texts and two flags per analysed log."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["RawAnalysisResultItem"]

_KEYS = (
    "raw_text",
    "auto_resume",
    "auto_resume_explanation",
    "attribution_text",
    "checkpoint_saved_flag",
    "action",
    "primary_issues",
    "secondary_issues",
)


@dataclass(frozen=True)
class RawAnalysisResultItem:
    """One analysed log, as older callers know it.

    Attributes:
        raw_text: Five lines: head, explanation, attribution, checkpoint flag, issues.
        auto_resume: Head such as `RESTART IMMEDIATE`.
        auto_resume_explanation: Why, in one line.
        attribution_text: What failed and where.
        checkpoint_saved_flag: 1 when a checkpoint was saved.
        action: STOP, RESTART, CONTINUE or UNKNOWN.
        primary_issues: Code of the first fault.
        secondary_issues: Codes of the others.
    """

    raw_text: str
    auto_resume: str
    auto_resume_explanation: str
    attribution_text: str
    checkpoint_saved_flag: int
    action: str
    primary_issues: list[str] = field(default_factory=list)
    secondary_issues: list[str] = field(default_factory=list)

    @classmethod
    def from_payload(cls, payload: Any) -> RawAnalysisResultItem:
        """Return the item that a decoded JSON object holds.

        Args:
            payload: The object, with all eight keys.

        Raises:
            TypeError: The value is no object, or a key is missing.
        """
        if not isinstance(payload, dict) or any(key not in payload for key in _KEYS):
            raise TypeError(f"a result item is an object with {', '.join(_KEYS)}")
        return cls(**{key: payload[key] for key in _KEYS})

    def to_payload(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)
