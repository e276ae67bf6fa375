# SPDX-License-Identifier: Apache-2.0
"""Exceptions of launcher, rank and timeouts, and the reasons for which a job is ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError

DEFAULT_NO_RESTART_EXIT_CODE: Final = 93
RDZV_SHUTDOWN_REASON_GRACEFUL: Final = "graceful"
RDZV_SHUTDOWN_REASON_FAILURE: Final = "failure"
RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP: Final = "attribution_stop"
RDZV_SHUTDOWN_REASON_NO_PROGRESS: Final = "no_progress"
RDZV_NO_RESTART_REASONS: Final = frozenset(
    {RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP, RDZV_SHUTDOWN_REASON_NO_PROGRESS}
)


class UnhealthyNodeException(Exception):  # noqa: N818  # the name is public
    """A node failed its health check and leaves the job; `message` says why."""

    def __init__(self, message: str = "A node in the cluster is unhealthy") -> None:
        super().__init__(message)


class TerminalWorkerGroupFailure(Exception):  # noqa: N818  # the name is public
    """The workers failed and there is no restart left."""


class NoRestartRequested(Exception):  # noqa: N818  # the name is public
    """The job must not be restarted and not be queued again.

    `reason` is `attribution_stop` or `no_progress`; without `message` it makes the text.
    """

    def __init__(self, reason: str, message: str | None = None) -> None:
        super().__init__(reason, message)
        self.reason = reason

    def __str__(self) -> str:
        return self.args[1] or f"no restart was requested: {self.reason}"


class RankMonitorClientError(NvrxError):
    """A call to the rank's monitor was wrong, or the monitor cannot be had."""


class TimeoutsCalcError(Exception):
    """Timeouts cannot be calculated, or a section event does not fit the ones before it."""


class FaultToleranceConfigError(ConfigError):
    """Settings are wrong: each of `problems` says where, which key and value, what is allowed."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


class SectionMissingError(FaultToleranceConfigError):
    """A file has no `fault_tolerance` section, or an empty one."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the known name most like `name`, or an empty text."""
    return "".join(f"; did you mean {match}?" for match in similar(name, known))


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name most like `name`, or nothing."""
    import difflib

    return difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.6)
