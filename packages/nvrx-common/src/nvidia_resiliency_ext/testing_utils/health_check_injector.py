# SPDX-License-Identifier: Apache-2.0
"""Lets health checks fail on purpose, at a given cycle on a given node; for tests of recovery.

``NVRX_INJECT_GPU_FAILURE="2:0,5:1:storage"`` fails the GPU check of infrastructure rank 0 in
cycle 2 and the storage check of rank 1 in cycle 5.
"""

from __future__ import annotations

import functools
import logging
import os

__all__ = [
    "KINDS", "HealthCheckInjector", "reset_for_tests", "set_current_cycle", "should_inject_failure",
]  # fmt: skip

logger = logging.getLogger("nvrx")

VARIABLE = "NVRX_INJECT_GPU_FAILURE"
KINDS = ("gpu", "nvl", "nic", "storage", "hang")

_PARTS = (2, 3)


class HealthCheckInjector:
    """Knows which failures are to be injected; the text is read once.

    Args:
        spec: ``cycle:infra_rank[:kind]``, several separated by commas; default
            ``NVRX_INJECT_GPU_FAILURE``. Entries that make no sense are reported and passed over.

    Example:
        >>> HealthCheckInjector("2:0:nic").kinds(cycle=2, infra_rank=0)
        frozenset({'nic'})
    """

    def __init__(self, spec: str | None = None) -> None:
        text = os.environ.get(VARIABLE, "") if spec is None else spec
        self._wanted = _parse(text)
        if self._wanted:
            logger.warning("health check failures are injected on purpose: %s", text)

    def set_current_cycle(self, cycle: int) -> None:
        """Do nothing; kept for older callers, since `should_inject_failure` is told the `cycle`."""

    def kinds(self, cycle: int, infra_rank: int) -> frozenset[str]:
        """Return which kinds of failure to inject now."""
        return self._wanted.get((cycle, infra_rank), frozenset())

    def should_inject_failure(self, cycle: int, infra_rank: int, kind: str | None = None) -> bool:
        """Return whether a check of this kind, or of any kind, shall fail now."""
        kinds = self.kinds(cycle, infra_rank)
        if not kinds or (kind is not None and kind not in kinds):
            return False
        what = kind or " and ".join(sorted(kinds))
        logger.warning(
            "injecting a %s health check failure in cycle %d on rank %d", what, cycle, infra_rank
        )
        return True


def should_inject_failure(cycle: int, infra_rank: int, kind: str | None = None) -> bool:
    """Return whether a check of `kind` (None: any) shall fail at `infra_rank` in `cycle`."""
    if not os.environ.get(VARIABLE):
        return False
    return _shared().should_inject_failure(cycle, infra_rank, kind)


def set_current_cycle(cycle: int) -> None:
    """Do nothing; kept for older callers, since `should_inject_failure` is told the `cycle`."""


def reset_for_tests() -> None:
    """Read the environment anew at the next question."""
    _shared.cache_clear()


_shared = functools.cache(HealthCheckInjector)  # the one object of the process


def _parse(text: str) -> dict[tuple[int, int], frozenset[str]]:
    wanted: dict[tuple[int, int], frozenset[str]] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        parts = [part.strip() for part in entry.split(":")]
        kind = parts[2] if len(parts) == max(_PARTS) else KINDS[0]
        numbers = parts[:2]
        if len(parts) not in _PARTS or not all(n.isascii() and n.isdigit() for n in numbers):
            logger.warning("%s: %r is not cycle:rank or cycle:rank:kind", VARIABLE, entry[:64])
            continue
        if kind not in KINDS:
            logger.warning("%s: %r is none of %s", VARIABLE, kind[:64], ", ".join(KINDS))
            continue
        key = int(numbers[0][:18]), int(numbers[1][:18])
        wanted[key] = wanted.get(key, frozenset()) | {kind}
    return wanted
