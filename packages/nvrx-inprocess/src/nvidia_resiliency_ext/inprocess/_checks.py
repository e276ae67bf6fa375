# SPDX-License-Identifier: Apache-2.0
"""Checks of callbacks' arguments; each error names the argument."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

__all__ = ["check_callable", "check_duration", "check_integer", "check_path"]


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
    """Check that a value is a `timedelta`, and not negative.

    Raises:
        TypeError: It is none.
        ValueError: It is negative.
    """
    if not isinstance(value, timedelta):
        raise TypeError(f"{name} must be a timedelta, not {value!r}")
    if value < timedelta(0):
        raise ValueError(f"{name} must not be negative, as {value} is")


def check_callable(name: str, value: Any) -> None:
    """Check that a value can be called.

    Raises:
        TypeError: It cannot.
    """
    if not callable(value):
        raise TypeError(f"{name} must be callable, {value!r} is not")


def check_path(name: str, value: Any) -> None:
    """Check that a value names a file.

    Raises:
        TypeError: It does not.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, not {value!r}")
