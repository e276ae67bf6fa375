# SPDX-License-Identifier: Apache-2.0
"""How long a restart waits when cycles fail again and again right after their start. Pure.

A crash loop is a row of cycles that each ended within `SHORT_CYCLE_S` and in which no rank told of
a step. The first of them restarts at once, the second waits `FIRST_DELAY_S`, each further one
twice as long, up to a limit. Programs without heartbeats or sections tell of no steps: for them the
time alone decides. Whoever is killed by a signal that others send did not crash.
"""

from __future__ import annotations

import signal

from .cause import Cause

__all__ = ["FIRST_DELAY_S", "SHORT_CYCLE_S", "crashes_after", "delay_s"]

SHORT_CYCLE_S = 10.0
FIRST_DELAY_S = 1.0

_FREE_CRASHES = 1
_NOT_THE_PROGRAM = frozenset({"node_lost", "drained", "left", "unhealthy", "start", "opened"})
"""Kinds of causes that say nothing about the program: a machine went, or somebody wanted it so."""
_SENT_BY_OTHERS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)


def crashes_after(crashes: int, cause: Cause, lived_s: float, *, has_stepped: bool) -> int:
    """Return how many short cycles in a row there are now.

    Args:
        crashes: How many there were before this cycle.
        cause: Why the cycle ended.
        lived_s: How long its workers ran.
        has_stepped: Whether a rank told of a step in it.
    """
    if has_stepped or lived_s >= SHORT_CYCLE_S:
        return 0
    return crashes + 1 if _is_crash(cause) else crashes


def _is_crash(cause: Cause) -> bool:
    return cause.kind not in _NOT_THE_PROGRAM and cause.signal not in _SENT_BY_OTHERS


def delay_s(crashes: int, limit_s: float) -> float:
    """Return how long the next start waits after so many short cycles in a row."""
    doublings = crashes - _FREE_CRASHES - 1
    if doublings < 0:
        return 0.0
    # 2.0 ** 1024 does not exist.
    return min(limit_s, FIRST_DELAY_S * 2.0 ** min(doublings, 64))
