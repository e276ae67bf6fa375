# SPDX-License-Identifier: Apache-2.0
"""Calls of foreign code that are given up with the package's own timeout error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from nvidia_resiliency_ext.shared_utils.abandonable import AbandonableCall

from . import exception

T = TypeVar("T")


def call_bounded(name: str, function: Callable[[], T], timeout: timedelta) -> T:
    """Call a function in a daemon thread; the package's TimeoutError if it takes too long."""

    def run() -> T:
        # Users find the thread by this name, which has no prefix.
        threading.current_thread().name = name
        return function()

    call = AbandonableCall(name, run)
    # An error of its own, which cannot be taken for one that the function raised.
    if not call.ended.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX)):
        raise exception.TimeoutError(f"{name} has not ended within {timeout}")
    return call.result()
