# SPDX-License-Identifier: Apache-2.0
"""Runs foreign code in a thread that can be left behind when it takes too long."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

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
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(min(max(timeout.total_seconds(), 0.0), threading.TIMEOUT_MAX))
    try:
        if errors:
            raise errors[0]
        if not results:
            raise exception.TimeoutError(f"{name} has not ended within {timeout}")
        return results[0]
    finally:
        # The error's frames hold this list, which would hold them in turn.
        errors.clear()
