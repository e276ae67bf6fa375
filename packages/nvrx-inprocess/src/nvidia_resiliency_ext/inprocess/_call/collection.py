# SPDX-License-Identifier: Apache-2.0
"""Garbage collection around a wrapped call: one pass per restart, over what the call has made.

A full pass over the modules of a training program takes 0.2 s and more, in the middle of every
restart. What is there before the call outlives it anyway, so it is set aside for that time.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class YoungGarbage:
    """Context manager of a call: what existed before it is not searched again until it ends."""

    def __init__(self) -> None:
        self._froze = False

    def __enter__(self) -> YoungGarbage:  # noqa: PYI034  # Self is not in Python 3.10
        # Somebody else's frozen objects could not be told apart from ours afterwards.
        self._froze = gc.get_freeze_count() == 0
        if self._froze:
            gc.freeze()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._froze:
            gc.unfreeze()

    def collect(self) -> None:
        """Free what the interrupted function left in cycles: one pass, be it whole or not."""
        gc.collect()
