# SPDX-License-Identifier: Apache-2.0
"""Which functions a restart request must not be raised in: those that could not pass it on."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    F = TypeVar("F", bound=Callable[..., object])

__all__ = ["is_shielded", "shielded"]

_codes: set[CodeType] = set()


def shielded(function: F) -> F:
    """Mark a function: nothing is raised in it, nor in what it calls."""
    _codes.add(function.__code__)
    return function


def is_shielded(frame: FrameType | None) -> bool:
    """Say whether a marked function is running in this frame or around it."""
    while frame is not None:
        if frame.f_code in _codes:
            return True
        frame = frame.f_back
    return False
