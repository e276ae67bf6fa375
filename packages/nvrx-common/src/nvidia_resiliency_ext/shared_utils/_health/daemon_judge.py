# SPDX-License-Identifier: Apache-2.0
"""What do a target and an answer of the node health daemon mean? Pure; answers are foreign."""

from __future__ import annotations

import json
from typing import Any

from .result import Finding, healthy, unhealthy

__all__ = ["judge_answer", "socket_of"]

_TEXT_LENGTH = 500


def socket_of(socket_path: str | None, endpoint: str | None) -> str | None:
    """Return the Unix socket that the arguments mean; `None` when they mean none.

    An endpoint wins over a path.
    """
    target = endpoint or socket_path
    if not target or "\0" in target:
        return None
    if target.startswith("unix:"):
        target = target.removeprefix("unix:")
        # unix:///path as well as unix:/path
        return target.removeprefix("//") or None
    return target if target.startswith(("/", "./")) or not endpoint else None


def judge_answer(*, success: bool, exit_code: int, output: str, error: str) -> Finding:
    """Return what to think of an answer.

    Args:
        success: Whether the daemon ran its checks and all passed.
        exit_code: Of its program.
        output: JSON text with `fail_count` and `failed_checks`.
        error: What went wrong, in its words.
    """
    details = _details(output)
    evidence: dict[str, Any] = {"exit_code": exit_code}
    failed: float = 0
    names: object = None
    if details is not None:
        count, names = details.get("fail_count"), details.get("failed_checks")
        failed = count if isinstance(count, int | float) and not isinstance(count, bool) else 0
        evidence |= {"fail_count": failed, "failed_checks": _shorten(names)}
    if failed > 0:
        return unhealthy(f"{failed} checks of the node failed: {_shorten(names)}", evidence)
    if isinstance(names, list) and names:
        return unhealthy(f"checks of the node failed: {_shorten(names)}", evidence)
    if not success:
        words = error or f"exit code {exit_code}"
        return unhealthy(f"the node health daemon says: {words[:_TEXT_LENGTH]}", evidence)
    if details is None:
        return healthy("the daemon's answer has no usable details", evidence)
    return healthy(evidence=evidence)


def _details(output: str) -> dict[str, Any] | None:
    try:
        details = json.loads(output)
    except (ValueError, RecursionError):
        return None
    return details if isinstance(details, dict) else None


def _shorten(value: object) -> str:
    return str(value)[:_TEXT_LENGTH]
