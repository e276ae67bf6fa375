# SPDX-License-Identifier: Apache-2.0
"""Calls of foreign code that are given up with the package's own timeout error."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from nvidia_resiliency_ext.shared_utils.abandonable import StuckError, call_within

from . import exception

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

__all__ = ["call_bounded"]

T = TypeVar("T")


def call_bounded(name: str, function: Callable[[], T], timeout: timedelta) -> T:
    """Call a function in a daemon thread and return what it returns.

    Args:
        name: The thread's name, also in messages.
        function: Called once.
        timeout: How long it may take.

    Raises:
        exception.TimeoutError: It has not ended; its thread goes on, nobody waits for it.
        BaseException: What the function raised.
    """
    try:
        return call_within(name, function, timeout.total_seconds())
    except StuckError:
        raise exception.TimeoutError(f"{name} has not ended within {timeout}") from None
