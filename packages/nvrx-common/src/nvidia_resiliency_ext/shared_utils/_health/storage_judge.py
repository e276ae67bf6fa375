# SPDX-License-Identifier: Apache-2.0
"""What do answers about mounts and paths mean? Pure judgement."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Limits", "judge_mount", "judge_paths", "parse_object"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How full a file system may get; zero allows all.

    Attributes:
        free_fraction: Least part of its bytes that must be free.
        free_inodes_fraction: Least part of its inodes that must be free, where it counts them.
    """

    free_fraction: float = 0.0
    free_inodes_fraction: float = 0.0


def parse_object(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a child's output, `None` if it is something else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def judge_mount(answer: Mapping[str, Any] | None, limits: Limits) -> str | None:
    """Return what is wrong with a mount after its probe ended, if anything."""
    if answer is None:
        return "the probe failed"
    if "error" in answer:
        return f"cannot be listed: {answer['error']}"
    room = _part(answer.get("blocks_free"), answer.get("blocks"))
    if room is not None and room < limits.free_fraction:
        return f"only {room:.1%} of its space is free"
    files = _part(answer.get("files_free"), answer.get("files"))
    if files is not None and files < limits.free_inodes_fraction:
        return f"only {files:.1%} of its inodes are free"
    return None


def judge_paths(answer: Mapping[str, Any] | None) -> str | None:
    """Return what is wrong with paths after `storage_probe` ended, if anything."""
    if answer is None:
        return "the probe failed"
    problems = [
        f"{kind}: {', '.join(map(str, answer[kind]))}"
        for kind in ("invalid", "missing", "unreadable", "unwritable")
        if answer.get(kind)
    ]
    return "; ".join(problems) or None


def _part(free: object, whole: object) -> float | None:
    if not isinstance(free, int) or not isinstance(whole, int) or whole <= 0:
        return None
    return free / whole
