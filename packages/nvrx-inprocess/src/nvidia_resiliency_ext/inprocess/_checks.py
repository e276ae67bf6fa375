# SPDX-License-Identifier: Apache-2.0
"""Checks of callbacks' arguments; each error names the argument."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

__all__ = ["check_callable", "check_duration", "check_integer"]


def check_integer(name: str, value: Any, *, least: int | None = None) -> None:
    """Check that a value is an integer, and at least `least`.

    Raises:
        TypeError: It is no integer.
        ValueError: It is less.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def check_duration(name: str, value: Any) -> None:
    """Check that a value is a `timedelta`.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, timedelta):
        raise TypeError(f"{name} must be a timedelta, not {value!r}")


def check_callable(name: str, value: Any) -> None:
    """Check that a value can be called.

    Raises:
        TypeError: It cannot.
    """
    if not callable(value):
        raise TypeError(f"{name} must be callable, {value!r} is not")
