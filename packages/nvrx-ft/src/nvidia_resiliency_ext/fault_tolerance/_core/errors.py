# SPDX-License-Identifier: Apache-2.0
"""The public exceptions of the launcher, the rank's side and the timeout calculation."""

from __future__ import annotations

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

__all__ = ["RankMonitorClientError", "TimeoutsCalcError"]


class UnhealthyNodeException(Exception):  # noqa: N818  # the name is public
    """A node failed its health check and leaves the job.

    Args:
        message: Text of the error.
    """

    def __init__(self, message: str = "A node in the cluster is unhealthy") -> None:
        super().__init__(message)


class TerminalWorkerGroupFailure(Exception):  # noqa: N818  # the name is public
    """The workers failed and there is no restart left."""


class NoRestartRequested(Exception):  # noqa: N818  # the name is public
    """The job must not be restarted and not be queued again.

    Args:
        reason: `attribution_stop` or `no_progress`.
        message: Text of the error; None: made from the reason.

    Attributes:
        reason: Why, such as `no_progress`.
    """

    def __init__(self, reason: str, message: str | None = None) -> None:
        super().__init__(message or f"no restart was requested: {reason}")
        self.reason = reason


class RankMonitorClientError(NvrxError):
    """A call to the rank's monitor was wrong, or the monitor cannot be had."""


class TimeoutsCalcError(Exception):
    """Timeouts cannot be calculated, or a section event does not fit the ones before it."""
