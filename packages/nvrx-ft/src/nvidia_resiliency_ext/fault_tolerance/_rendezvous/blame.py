# SPDX-License-Identifier: Apache-2.0
"""Which hosts fail again and again? Counts what restarts were blamed on. Pure.

A host to blame is not sent away: it works only where there are not enough others. So a program
that is at fault itself, and always falls on the same rank, cannot use up the job's nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["BlameRules", "Failures", "blamed", "is_of_the_node", "note"]

Failures = Mapping[str, tuple[float, ...]]
"""By host: when its failures were, in seconds of one monotonic clock."""

_OF_THE_NODE = frozenset(
    {
        "killed", "exited", "exception", "hang_section", "hang_heartbeat", "node_lost",
        "unhealthy", "start",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlameRules:
    """A host with `limit` failures within `window_s` is to blame; a limit of 0 blames nobody."""

    limit: int = 3
    window_s: float = 3600.0


def is_of_the_node(kind: str) -> bool:
    """Return whether a cause of this kind counts against the host that it names."""
    return kind in _OF_THE_NODE


def note(failures: Failures, host: str, now: float, rules: BlameRules) -> Failures:
    """Return the failures with one more; those before the window are forgotten."""
    since = now - rules.window_s
    kept = {name: tuple(at for at in times if at > since) for name, times in failures.items()}
    kept[host] = (*kept.get(host, ()), now)[-max(1, rules.limit) :]
    return {name: times for name, times in kept.items() if times}


def blamed(failures: Failures, now: float, rules: BlameRules) -> frozenset[str]:
    """Return the hosts that are to blame now."""
    if rules.limit < 1:
        return frozenset()
    since = now - rules.window_s
    return frozenset(
        host for host, times in failures.items() if sum(at > since for at in times) >= rules.limit
    )
