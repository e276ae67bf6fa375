# SPDX-License-Identifier: Apache-2.0
"""Numbers from foreign text."""

from __future__ import annotations

_MOST_DIGITS = 9


def parse_number(text: str) -> int | None:
    """Return the number that up to nine ASCII digits say; None for anything else."""
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
        return int(text)
    return None
