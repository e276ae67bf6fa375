# SPDX-License-Identifier: Apache-2.0
"""A `zip` that insists on equal lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["zip_strict"]


def zip_strict(*args: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Zip sequences of equal length.

    Args:
        args: The sequences.

    Raises:
        AssertionError: The lengths differ; the message names all of them.

    Example:
        >>> list(zip_strict([1, 2], "ab"))
        [(1, 'a'), (2, 'b')]
    """
    lengths = [len(arg) for arg in args]
    if len(set(lengths)) > 1:
        raise AssertionError(f"sequences of different lengths: {lengths}")
    return zip(*args, strict=True)
