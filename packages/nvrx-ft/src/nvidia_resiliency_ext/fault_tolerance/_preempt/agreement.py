# SPDX-License-Identifier: Apache-2.0
"""At which call of `should_checkpoint` all ranks save. Pure.

Every rank counts its calls and shows the count before it looks whether saving is asked for. Once
that is asked of a rank, it waits in its next call until the call is agreed. So the counts that are
read after it was asked of everybody are those of the last calls that any rank can have left: the
highest plus one is a call that all ranks still have before them, and no rank that waits is needed
by another one on the way to be read. A rank that has not called yet counts 0.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["agreed_call"]


def agreed_call(calls: Iterable[int]) -> int:
    """Return the call at which all ranks save, from how often each has called."""
    return max(calls, default=0) + 1
