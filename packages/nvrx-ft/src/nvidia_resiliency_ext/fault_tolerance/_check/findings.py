# SPDX-License-Identifier: Apache-2.0
"""What a check found, one line each. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = [
    "Finding",
    "Status",
    "exit_code_of",
    "failed",
    "json_within",
    "passed",
    "render",
    "skipped",
]

# Of what is too long, the first so many of a list are told, and so many characters of a text.
_MOST_ITEMS = 20
_LEAST_TEXT = 16

Status = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    text: str


def passed(name: str, text: str) -> Finding:
    """Return a finding that stands in nobody's way."""
    return Finding(name, "pass", text)


def failed(name: str, text: str) -> Finding:
    """Return a finding that a person must act on before the job can run."""
    return Finding(name, "fail", text)


def skipped(name: str, text: str) -> Finding:
    """Return a finding that there was nothing to look at."""
    return Finding(name, "skipped", text)


def render(findings: Sequence[Finding], *, as_json: bool) -> str:
    """Return the findings for people, or as one JSON object with the key `checks`."""
    if as_json:
        return json.dumps({"checks": [asdict(finding) for finding in findings]}) + "\n"
    width = max((len(finding.name) for finding in findings), default=0)
    lines = [f"{f.status:<8} {f.name:<{width}}  {' '.join(f.text.split())}" for f in findings]
    return "".join(f"{line}\n" for line in lines)


def json_within(value: object, limit: int) -> str:
    """Return a value as JSON of at most `limit` bytes: long texts and lists are shortened."""
    text, longest = json.dumps(value), limit
    while len(text) > limit and longest > _LEAST_TEXT:
        longest //= 2
        text = json.dumps(_shortened(value, longest))
    return text


def _shortened(value: object, longest: int) -> object:
    if isinstance(value, str) and len(value) > longest:
        return f"{value[:longest]}... ({len(value)} characters)"
    if isinstance(value, Mapping):
        return {key: _shortened(item, longest) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shortened(item, longest) for item in value[:_MOST_ITEMS]]
    return value


def exit_code_of(findings: Sequence[Finding]) -> int:
    """Return 0 when nothing failed, else 1."""
    return int(any(finding.status == "fail" for finding in findings))
