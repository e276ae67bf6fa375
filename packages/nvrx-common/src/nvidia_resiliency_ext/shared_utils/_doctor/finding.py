# SPDX-License-Identifier: Apache-2.0
"""Owns the shape of one finding of the self-check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level"]

Level = Literal["ok", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of the doctor.

    Args:
        level: `error` if a person must act, else `ok`, `info` or `warning`.
        topic: What was examined.
        text: The finding.
    """

    level: Level
    topic: str
    text: str
