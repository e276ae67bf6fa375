# SPDX-License-Identifier: Apache-2.0
"""Take secrets out of quoted text: keys, tokens, credentials in addresses."""

from __future__ import annotations

import re

__all__ = ["redact"]

_HIDDEN = "[removed]"
_PATTERNS = (
    re.compile(r"(?<=://)[^/\s:@]{1,200}:[^/\s@]{1,200}(?=@)"),
    re.compile(
        r"(?i)\b((?:api|access|secret|private)[_-]?key(?:[_-]?id)?|token|password|passwd|secret"
        r"|authorization|bearer)(\"?'?\s*[=:]\s*\"?'?|\s+)(?!is\b|was\b|has\b|expired\b|invalid\b)"
        r"[A-Za-z0-9+/._~-]{8,}=*"
    ),
    re.compile(r"\b(?:sk|hf|ghp|gho|glpat|xoxb|nvapi|AKIA|ASIA)[-_]?[A-Za-z0-9_-]{16,}\b"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"),
)


def redact(text: str) -> str:
    """Return a text without secrets.

    Example:
        >>> redact("GET https://me:pw@host/x token=abcdefgh1234")
        'GET https://[removed]@host/x token=[removed]'
    """
    text = _PATTERNS[0].sub(_HIDDEN, text)
    text = _PATTERNS[1].sub(lambda match: match[1] + match[2] + _HIDDEN, text)
    for pattern in _PATTERNS[2:]:
        text = pattern.sub(_HIDDEN, text)
    return text
