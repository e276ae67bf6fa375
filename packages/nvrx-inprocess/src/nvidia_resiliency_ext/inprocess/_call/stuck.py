# SPDX-License-Identifier: Apache-2.0
"""Gets a main thread out of calls that no signal ends; which they are is seen from outside."""

from __future__ import annotations

import contextlib

from nvidia_resiliency_ext.inprocess import _env
from nvidia_resiliency_ext.inprocess._abort.gloo_sockets import (
    end_gloo_connections,
    end_gloo_meetings,
)
from nvidia_resiliency_ext.inprocess._abort.kernel_call import is_in_futex

from .store_waits import StoreWaits

__all__ = ["StuckCalls"]


class StuckCalls:
    """Ends waits at torch's stores, and what gloo waits for.

    That is ranks that do not come any more, and collectives: the abort is over, but a main thread
    that was making a group meanwhile may have gone on into a collective of that group.

    Args:
        native_id: The main thread, by the kernel's number.
    """

    def __init__(self, native_id: int) -> None:
        self._native_id = native_id
        self._waits = StoreWaits(native_id)

    def end(self) -> None:
        """End the call in which the thread is now, if it is one of those."""
        if not self._waits.end() and is_in_futex(self._native_id):
            # A process that has no descriptor left may have one the next time.
            with contextlib.suppress(OSError):
                end_gloo_connections()
                end_gloo_meetings(_env.active_world_size())
